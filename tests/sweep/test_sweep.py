"""Sweeps as a whole: killed anywhere they come to the same trials and bits, and the winner is what it is alone."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.cli.main import main
from ci_llm.config import parse_config
from ci_llm.core.run_status import read_status
from ci_llm.run import attempt, loop
from ci_llm.sweep.sweep import Sweep
from tests.support.campaign import drawn, size
from tests.sweep.trials import KEYS, LOADED, by_hand, called, facts, record, single, words
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import _leaves, differences

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("narrow")]

Folder = Callable[[], Path]


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root, numbers = tmp_path_factory.mktemp("sweeps"), itertools.count()

    def make() -> Path:
        folder = root / str(next(numbers))
        folder.mkdir()
        return folder

    return make


def call(server: ForkServer, folder: Path, command: str = "sweep", ranks: int = 1, **how: Any) -> list[int]:
    arguments = how.pop("arguments", None) or words()
    return server.run(
        called, folder / "log", ranks=ranks, folder=str(folder), command=command, arguments=arguments, **how
    )


def complete(server: ForkServer, folder: Path, **how: Any) -> Path:
    ranks = how.get("ranks", 1)
    assert call(server, folder, **how) == [0] * ranks, (folder / "log").read_text()
    return folder


@pytest.fixture(scope="module")
def undisturbed(server: ForkServer, new_folder: Folder) -> Path:
    """A sweep of four trials: segments of three, of one, and of the two that continue."""
    return complete(server, new_folder())


def of_agent(checkpoint: Path, agent: int) -> dict[str, Any]:
    """Weights and moments of one agent in a checkpoint, to the last bit."""
    leaves = dict(_leaves({k: v for k, v in load_checkpoint(checkpoint).state.items() if not isinstance(v, bytes)}))
    parts = (f"agent{agent}/adapter_model/", f"optimizer/agent{agent}/")
    return {name.replace(f"agent{agent}/", ""): value for name, value in leaves.items() if name.startswith(parts)}


@pytest.mark.usefixtures("threads_as_they_were")
def test_the_job_of_a_sweep_is_put_back_when_its_own_status_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SLURM ends what is left of the job then: the sweep was left as running."""
    seen: list[str] = []

    def requeue(*_: object, **__: object) -> str:
        seen.append(read_status(tmp_path / "run").status)
        return "SLURM job 7 is put back into the queue"

    def struck(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    real = loop.apply_gradients

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(attempt, "requeue", requeue)
    monkeypatch.setattr(loop, "apply_gradients", struck)
    assert main(["sweep", "--config", os.devnull, *words()]) == 75
    assert seen == ["interrupted"]
    assert capsys.readouterr().out.count("SLURM job 7 is put back into the queue") == 1


def test_a_sweep_leaves_the_documented_files(undisturbed: Path) -> None:
    told, run = record(undisturbed), undisturbed / "run"
    assert told["complete"]
    assert [(s["rung"], len(s["trials"])) for s in told["segments"]] == [(0, 3), (0, 1), (1, 2)]
    assert len((undisturbed / LOADED).read_text().splitlines()) == 1, (
        "a call loads its base once; a complete one does not"
    )
    assert told["plan"]["steps"] == [4, 8]
    assert [trial["settings"]["learning_rate"] for trial in told["trials"]] == [1e-3, 2e-3, 4e-3, 8e-3]
    first = [trial["scores"][0] for trial in told["trials"]]
    ahead = sorted(range(4), key=first.__getitem__)[:2]
    assert sorted(told["segments"][2]["trials"]) == sorted(ahead)
    assert [trial["status"] for trial in told["trials"]] == [
        "completed" if id in ahead else "pruned" for id in range(4)
    ]
    best = told["trials"][told["best"]]
    assert best["score"] == min(told["trials"][id]["score"] for id in ahead)
    assert (read_status(run).status, read_status(run).step) == ("completed", 12)
    config = json.loads((run / "best/adapter_config.json").read_text())
    assert config["r"] == 2
    assert f"`learning_rate` {best['settings']['learning_rate']:g}" in (run / "best/README.md").read_text()
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    assert peft.PeftModel.from_pretrained(base, run / "best").peft_config["default"].r == 2
    said = (undisturbed / "log").read_text()
    assert "4 trials by sampler grid, compared by nll: 4 to step 4, 2 to step 8" in said
    assert "sweep     the best trial is chosen on the rows of split test; " in said
    for rung in (1, 2):
        assert re.search(rf"sweep     rung {rung}, on 4 rows: trial \d is ahead of trial \d, but so few rows", said)
    for part in ("trial  status", "completed", "longer     ci-llm train", "init_from=run/best", "crowd      ci-llm"):
        assert part in said


def test_every_trial_has_the_bits_of_its_own_single_run(
    server: ForkServer, undisturbed: Path, new_folder: Folder
) -> None:
    """Of a plain run: the same command with one rate and one agent."""
    told = record(undisturbed)
    for trial in [told["trials"][id] for id in told["segments"][2]["trials"]]:
        rate = trial["settings"]["learning_rate"]
        alone = complete(
            server, new_folder(), command="train", arguments=single(learning_rate=f"{rate:g}", num_agents=1)
        )
        segment = undisturbed / f"run/segments/{trial['segment']}/final_checkpoint"
        own = of_agent(alone / "run/final_checkpoint", 0)
        assert not differences(own, of_agent(segment, trial["agent"]))
        assert any("exp_avg_sq" in name for name in own)
        evaluation = json.loads((alone / "run/evaluation.json").read_text())
        assert evaluation["nll"]["agents"] == [trial["score"]]


def test_killed_at_every_boundary(server: ForkServer, undisturbed: Path, new_folder: Folder) -> None:
    """A record is written before and after each of three segments, and at the end; each call is killed before the
    second that it would write, in a sample before the third, so that no two are killed at the same one.
    """
    folder, kills = new_folder(), 0
    while (codes := call(server, folder, place="ci_llm.sweep.sweep.write_record", call=size(3, 2))) != [0]:
        assert codes == [-signal.SIGKILL], (folder / "log").read_text()
        kills += 1
    assert kills == size(3, 6)
    assert not differences(facts(undisturbed), facts(folder))


def test_killed_inside_of_every_segment(server: ForkServer, undisturbed: Path, new_folder: Folder) -> None:
    """Each call takes three steps and is killed in the fourth: of twelve steps, once in each of the three segments."""
    folder, kills = new_folder(), 0
    while (codes := call(server, folder, place="ci_llm.run.loop.apply_gradients", call=4)) == [-signal.SIGKILL]:
        kills += 1
    assert codes == [0], (folder / "log").read_text()
    assert kills == 3
    assert not differences(facts(undisturbed), facts(folder))


@pytest.mark.parametrize(
    ("place", "number"),
    drawn(
        [
            ("ci_llm.checkpoints.checkpoint.commit", 1),
            ("ci_llm.checkpoints.saver.Saver.make_final", 3),
            ("ci_llm.sweep.runner.new_folder", 1),
        ],
        1,
    ),
)
def test_killed_between_segments(
    server: ForkServer, undisturbed: Path, new_folder: Folder, place: str, number: int
) -> None:
    folder = new_folder()
    assert call(server, folder, place=place, call=number) == [-signal.SIGKILL], (folder / "log").read_text()
    complete(server, folder)
    assert not differences(facts(undisturbed), facts(folder))
    assert not [
        path for path in (folder / "run").rglob(".*") if "partial" in path.name or "checkpoint_step" in path.name
    ]


def test_the_checkpoint_that_trials_continue_from_is_verified_and_kept_twice(
    server: ForkServer, undisturbed: Path, new_folder: Folder
) -> None:
    folder = new_folder()
    codes = call(server, folder, place="ci_llm.sweep.handover.write_checkpoint", call=1)
    assert codes == [-signal.SIGKILL], (folder / "log").read_text()
    ended = folder / "run/segments/1"
    copies = [ended / name / "agent2/adapter_model.safetensors" for name in ("final_checkpoint", "checkpoint_step_4")]
    whole = [copy.read_bytes() for copy in copies]
    for copy in copies:
        copy.write_bytes(whole[0][:-1] + bytes([whole[0][-1] ^ 1]))
    assert call(server, folder) == [1]
    assert "the segment holds no whole checkpoint of step 4" in (folder / "log").read_text()
    for copy, data in zip(copies[1:], whole[1:], strict=True):
        copy.write_bytes(data)
    complete(server, folder)
    copies[0].write_bytes(whole[0])
    assert not differences(facts(undisturbed), facts(folder))


def test_interrupted_and_called_again(server: ForkServer, undisturbed: Path, new_folder: Folder) -> None:
    """It says what stands so far, with its exit code, and resumes when called again."""
    folder = new_folder()
    codes = call(server, folder, place="ci_llm.run.loop.apply_gradients", call=6, sent="SIGTERM")
    assert codes == [75], (folder / "log").read_text()
    said = (folder / "log").read_text()
    assert "running" in said.rpartition("interrupted (signal:SIGTERM)")[2]
    status = read_status(folder / "run")
    assert (status.status, status.reason, status.exit_code) == ("interrupted", "signal:SIGTERM", 75)
    complete(server, folder)
    assert not differences(facts(undisturbed), facts(folder))
    assert read_status(folder / "run").status == "completed"


def test_two_processes_interrupted_and_called_again(server: ForkServer, new_folder: Folder) -> None:
    whole = complete(server, new_folder(), ranks=2)
    folder = new_folder()
    codes = call(server, folder, ranks=2, place="ci_llm.run.loop.apply_gradients", call=6, sent="SIGTERM")
    assert codes == [75, 75], (folder / "log").read_text()
    complete(server, folder, ranks=2)
    assert not differences(facts(whole), facts(folder))


def test_a_sick_trial_costs_the_others_nothing(server: ForkServer, undisturbed: Path, new_folder: Folder) -> None:
    """Its rate makes its weights infinite: the others end with the bits that they have without it."""
    folder = new_folder()
    keys = {"learning_rate": "[1e-3,2e-3,4e-3,8e-3,1e30]", "keep": 0.4}
    complete(server, folder, arguments=words(**keys), max_in_a_row=1)
    told, healthy = record(folder), record(undisturbed)
    assert told["trials"][4]["status"] == "failed"
    assert told["trials"][4]["score"] is None
    for mine, theirs in zip(told["trials"], healthy["trials"], strict=False):
        assert mine["scores"] == theirs["scores"]
    assert told["best"] == healthy["best"]
    best = [path / "run/best/adapter_model.safetensors" for path in (folder, undisturbed)]
    assert best[0].read_bytes() == best[1].read_bytes()
    assert "dropped; the others train on" in (folder / "log").read_text()


def test_a_pack_of_sick_trials_alone_ends_itself_and_not_the_sweep(server: ForkServer, new_folder: Folder) -> None:
    folder = new_folder()
    keys = {"learning_rate": "[1e30,2e-3]", "agents_per_pass": 1}
    complete(server, folder, arguments=words(**keys), max_in_a_row=1)
    assert [trial["status"] for trial in record(folder)["trials"]] == ["failed", "completed"]


def test_packs_of_another_size_after_a_kill_come_to_the_same_trials_and_bits(
    server: ForkServer, undisturbed: Path, new_folder: Folder
) -> None:
    folder = new_folder()
    codes = call(server, folder, place="ci_llm.sweep.sweep.write_record", call=3)  # when the first pack was scored
    assert codes == [-signal.SIGKILL], (folder / "log").read_text()
    complete(server, folder, arguments=words(agents_per_pass=1))
    told, before = record(folder), record(undisturbed)
    assert [len(segment["trials"]) for segment in told["segments"]] == [3, 1, 1, 1]
    results = [[(trial["settings"], trial["scores"]) for trial in each["trials"]] for each in (told, before)]
    assert results[0] == results[1]
    best = [path / "run/best/adapter_model.safetensors" for path in (folder, undisturbed)]
    assert best[0].read_bytes() == best[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_sweep_that_is_asked_names_the_run_of_its_best_trial(
    verb: str, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = undisturbed / "run"
    assert main([verb, str(folder), *(["How many?"] if verb == "generate" else [])]) == 2
    record = json.loads((folder / "sweep.json").read_text())
    [best] = [trial for trial in record["trials"] if trial["id"] == record["best"]]
    segment = folder / "segments" / str(best["segment"])
    assert segment.is_dir()
    assert f"give {segment}, the run of the best trial" in capsys.readouterr().err


def test_another_space_in_the_same_folder_is_refused(server: ForkServer, undisturbed: Path) -> None:
    before = (undisturbed / "run/sweep.json").read_bytes()
    other = words(learning_rate="[1e-3,2e-3]", keep=0.25, batch_size=4, trials=2)
    assert call(server, undisturbed, arguments=other) == [2]
    said = (undisturbed / "log").read_text()
    for part in ("the space of learning_rate was", "keep was 0.5, is 0.25", "experiment_name=NAME"):
        assert part in said
    assert (undisturbed / "run/sweep.json").read_bytes() == before


@pytest.mark.parametrize("dry", [[], ["--dry_run"]], ids=["in earnest", "dry run"])
def test_the_folder_of_a_run_is_refused_before_anything_is_loaded(
    dry: list[str], server: ForkServer, new_folder: Folder
) -> None:
    folder = new_folder()
    (folder / "run").mkdir()
    (folder / "run/beginning.json").write_text("{}")
    assert call(server, folder, arguments=[*dry, *words()]) == [2]
    assert "this folder holds a run and not a sweep" in (folder / "log").read_text()
    assert not (folder / LOADED).exists()


def test_a_sweep_in_which_every_trial_fails_has_failed(server: ForkServer, new_folder: Folder) -> None:
    """It was called completed, and a supervisor took it for a success."""
    folder = new_folder()
    arguments = words(learning_rate="[1e28,1e29]", lora_dropout=0, mixed_precision="no")
    for _ in range(2):
        assert call(server, folder, arguments=arguments) == [2]
        said = (folder / "log").read_text()
        assert "every trial has failed: none gave finite numbers to its first rung" in said
        status = read_status(folder / "run")
        assert (status.status, status.reason, status.exit_code) == ("failed", "all_trials_failed", 1)
    assert "This sweep is complete; nothing is left to do." in said


def test_the_loop_in_python_comes_to_the_same(server: ForkServer, undisturbed: Path, new_folder: Folder) -> None:
    folder = new_folder()
    keys = {**KEYS, "learning_rate": [1e-3, 2e-3, 4e-3, 8e-3], "save_interval_seconds": None, "eval_steps": None}
    assert server.run(by_hand, folder / "log", folder=str(folder), keys=keys) == [0], (folder / "log").read_text()
    ours, theirs = record(folder), record(undisturbed)
    for part in ("trials", "segments", "best", "plan", "spaces", "complete"):
        assert ours[part] == theirs[part]


def test_random_trials_of_other_shapes_and_their_curves(server: ForkServer, new_folder: Folder) -> None:
    """Ranks and layers differ; a pack puts equal shapes side by side; every segment has its curves in TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = new_folder()
    keys = {
        "learning_rate": "log(1e-3,1e-2)",
        "lora_rank": "[2,4]",
        "lora_target_modules": "[all-linear,[q_proj,v_proj]]",
        "trials": 5,
        "sampler": "tpe",
        "report_to": "tensorboard",
        "eval_steps": 2,
        "num_workers": 1,  # forked again for every segment
        "mixed_precision": "auto",
        "model_dtype": "auto",
    }
    complete(server, folder, arguments=words(**keys))
    told = record(folder)
    complete(server, folder, arguments=words(**keys))  # auto is no other precision than the one that it chose
    config = parse_config(told["config"], "sweep.json")
    assert (config.mixed_precision, config.model_dtype) in (("bf16", "bf16"), ("no", "fp32")), "chosen once for all"
    assert len({str(trial["settings"]) for trial in told["trials"]}) == 5
    for segment in told["segments"]:
        shapes = [str({**told["trials"][id]["settings"], "learning_rate": 0}) for id in segment["trials"]]
        assert shapes == sorted(shapes)
    best = told["trials"][told["best"]]
    trained = [each for each in told["segments"] if best["id"] in each["trials"]]
    for segment, steps, score in zip(trained, ([2, 4], [6, 8]), best["scores"], strict=True):
        curves = EventAccumulator(str(folder / f"run/segments/{segment['number']}/tensorboard"))
        curves.Reload()
        agent = f"agent{segment['trials'].index(best['id'])}"
        assert [e.step for e in curves.Scalars(f"train/{agent}/loss")] == steps
        last = curves.Scalars(f"eval/{agent}/nll")[-1]
        assert (last.step, last.value) == (steps[-1], pytest.approx(score))
    assert math.isfinite(best["score"])


def test_no_call_plans_more_trials_of_a_pass_than_there_are(tmp_path: Path) -> None:
    keys = {"learning_rate": [1e-3, 2e-3], "max_train_steps": 4, "output_dir": str(tmp_path / "sweep")}
    first = Sweep(None, agents_per_pass=8, **keys)
    assert first.ask() is not None
    for wanted, planned in ((8, 2), (1, 1), (3, 2)):
        assert Sweep(None, agents_per_pass=wanted, **keys).standings.plan.per_pass == planned
