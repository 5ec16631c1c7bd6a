"""Every trial has one run in a tracker, which goes on over its segments, whenever the sweep is killed."""

from __future__ import annotations

import json
import signal
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
    """Trial -> ids, groups and settings of its runs, and step -> names of what they hold, in order."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(sweep.glob("trackers/*/wandb/offline-run-*/*.wandb")):
        told = found.setdefault(file.relative_to(sweep).parts[1], {"ids": set(), "group": set(), "lines": []})
        for each in records(file):
            if each.HasField("run"):
                told["ids"].add(each.run.run_id)
                told["group"].add(each.run.run_group)
            if each.HasField("config"):
                told |= {item.key: json.loads(item.value_json) for item in each.config.update if item.key}
            if each.HasField("history"):
                values = {item.key or item.nested_key[0]: item.value_json for item in each.history.item}
                told["lines"].append((int(values["step"]), {name for name in values if "/" in name}))
    return found


def test_a_trial_is_one_run_in_the_group_of_its_sweep(server: ForkServer, tmp_path: Path) -> None:
    """The sweep is killed before it has sent what its first segment has logged."""
    how: dict[str, Any] = {"folder": str(tmp_path), "command": "sweep", "arguments": words(**KEYS)}
    how["environment"] = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    killed = server.run(called, tmp_path / "log", place="ci_llm.sweep.curves.Curves.send", call=2, **how)
    assert killed == [-signal.SIGKILL], (tmp_path / "log").read_text()
    assert server.run(called, tmp_path / "log", **how) == [0], (tmp_path / "log").read_text()
    found, told = runs(tmp_path / "run"), record(tmp_path)
    assert [*found] == ["trial0", "trial1"]
    assert len({id for run in found.values() for id in run["ids"]}) == 2, "a trial is one run"
    for trial in told["trials"]:
        run = found[f"trial{trial['id']}"]
        assert run["group"] == {"run"}
        assert run["learning_rate"] == trial["settings"]["learning_rate"]
        ends = (4, 8)[: trial["rung"]]
        assert [step for step, _ in run["lines"]] == [*range(2, ends[-1] + 1, 2)], "each line once, over all segments"
        assert [step for step, names in run["lines"] if "score/nll" in names] == [*ends]
        assert all({"train/loss", "train/learning_rate"} <= names for _, names in run["lines"])
        assert [*(tmp_path / f"run/tensorboard/trial{trial['id']}").iterdir()]
    assert not [*(tmp_path / "run/segments").glob("*/wandb")], "segments are no runs of a tracker"
