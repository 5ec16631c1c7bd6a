"""Every segment of a sweep is one run of a tracker, in the group of the sweep, also where the sweep is interrupted."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.trials import called, record, words
from tools.testbed.forkserver import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="there is no wandb; make install-dev")

KEYS = {"learning_rate": "[2e-3,4e-3]", "agents_per_pass": 2, "report_to": "[wandb,tensorboard]"}
HEADER, RECORD = 7, struct.Struct("<IHB")  # of W&B's file, and of a record in it: checksum, length, kind


def records(file: Path) -> Iterator[Any]:
    """What W&B has recorded offline; each record of a small file is whole."""
    data, at = file.read_bytes(), HEADER
    while at < len(data):
        _, length, kind = RECORD.unpack_from(data, at)
        assert kind == 1
        yield pb.Record.FromString(data[at + RECORD.size : at + RECORD.size + length])
        at += RECORD.size + length


def runs(sweep: Path) -> dict[str, dict[str, Any]]:
    """Segment -> ids, names, groups and settings of its runs, and the steps that have a loss of agent 0, in order."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(sweep.glob("segments/*/wandb/offline-run-*/*.wandb")):
        segment = file.relative_to(sweep).parts[1]
        told = found.setdefault(segment, {"ids": set(), "names": set(), "groups": set(), "steps": []})
        for each in records(file):
            if each.HasField("run"):
                told["ids"].add(each.run.run_id)
                told["names"].add(each.run.display_name)
                told["groups"].add(each.run.run_group)
            if each.HasField("config"):
                told |= {item.key: json.loads(item.value_json) for item in each.config.update if item.key}
            if each.HasField("history"):
                values = {item.key or item.nested_key[0]: item.value_json for item in each.history.item}
                if "train/agent0/loss" in values:
                    told["steps"].append(int(values["step"]))
    return found


def test_a_segment_is_one_run_in_the_group_of_its_sweep(server: ForkServer, tmp_path: Path) -> None:
    """The sweep is interrupted in its first segment, and resumes it."""
    how: dict[str, Any] = {"folder": str(tmp_path), "command": "sweep", "arguments": words(**KEYS)}
    how["environment"] = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    place = "ci_llm.checkpoints.store.CheckpointStore._prune"
    stopped = server.run(called, tmp_path / "log", place=place, call=3, sent="SIGTERM", **how)
    assert stopped == [75], (tmp_path / "log").read_text()
    assert server.run(called, tmp_path / "log", **how) == [0], (tmp_path / "log").read_text()
    found, told = runs(tmp_path / "run"), record(tmp_path)
    assert [*found] == [str(segment["number"]) for segment in told["segments"]]
    for segment in told["segments"]:
        run = found[str(segment["number"])]
        assert len(run["ids"]) == 1, "a resumed segment continues its run"
        assert run["groups"] == {"run"}
        assert f"run-{segment['number']}" in run["names"], "the name says which sweep and segment it is"
        assert {*run["steps"]} == ({2, 4}, {6, 8})[segment["rung"]]
        assert all(f"trial{id}" in run["agents"] for id in segment["trials"])
        assert [*(tmp_path / f"run/segments/{segment['number']}/tensorboard").iterdir()]
