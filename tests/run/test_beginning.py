"""The keys that say where a run begins: each acts once, is recorded, and is refused where it contradicts the record."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ci_llm.checkpoints.checkpoint import load_checkpoint, write_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import load_config
from ci_llm.core.run_folder import BEGINNING
from ci_llm.errors import BadInput, CheckpointError, ConfigError, DamagedCheckpoint, ProgressLost
from ci_llm.run.start.beginning import Start, find_start, known_beginning, read_beginning, record_start
from tests.support.bit_flips import flip
from tests.support.log_lines import log_lines


def state(origin: str, step: int) -> dict[str, object]:
    """A small state with the files of a run's checkpoint; `origin` says which run has written it."""
    parts = {key: {"origin": origin} for key in ("ci_llm_meta_config", "optimizer", "rng")}
    return {**parts, "train_state": {"origin": origin, "step": step}, "config.yaml": b"seed: 42\n"}


class Folder:
    """A run's folder, in which attempts begin and save without training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []

    def begin(self, *words: str, saves: tuple[int, ...] = (), at_most: int | None = None) -> Start:
        """One attempt: where it begins, and what it saves."""
        config = load_config(None, [f"output_dir={self.path}", *words])
        with log_lines() as self.lines, CheckpointManager(self.path, async_save=False) as manager:
            start = find_start(manager, config, known_beginning(manager, config), at_most)
            manager.store.acquire_lease()
            self.lines += [start.note, *record_start(manager, start)]
            for step in saves:
                assert manager.save(step, state(self.path.name, step))
        return start

    def resumes_from(self, *words: str, at_most: int | None = None) -> str | None:
        """The folder and step from which an attempt resumes."""
        source = self.begin(*words, at_most=at_most).source
        return None if source is None else f"{source.folder.relative_to(self.path.parent)}"

    def finish(self) -> None:
        with CheckpointManager(self.path) as manager:
            assert manager.saver.make_final()

    def refusal(self, *words: str) -> ConfigError:
        before = sorted(self.path.rglob("*"))
        with pytest.raises(ConfigError) as caught:
            self.begin(*words)
        assert caught.value.exit_code == 2
        assert sorted(self.path.rglob("*")) == before
        return caught.value


@pytest.fixture
def source(tmp_path: Path) -> Folder:
    """A run of another folder, with steps 4 and 8 and a final checkpoint."""
    folder = Folder(tmp_path / "source")
    folder.begin(saves=(4, 8))
    folder.finish()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def from_path(path: Path) -> str:
    return f"resume_from_checkpoint={path}"


# Said once, and again


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["checkpoint_step_4", "checkpoint_step_8", "final_checkpoint", ""])
def test_a_path_says_where_a_run_begins_and_later_calls_take_its_own_newest_step(
    name: str, source: Folder, run: Folder
) -> None:
    words = from_path(source.path / name)
    began = name or "checkpoint_step_8"
    assert run.resumes_from(words) == f"source/{began}"
    assert run.resumes_from(words) == f"source/{began}"  # nothing was saved in between
    run.begin(words, saves=(9, 10))
    assert run.resumes_from(words) == "run/checkpoint_step_10"
    assert run.resumes_from() == "run/checkpoint_step_10"
    assert run.resumes_from(words) == "run/checkpoint_step_10"
    assert not (run.path / "superseded").exists()
    assert source.resumes_from() == "source/checkpoint_step_8"


def test_null_begins_a_run_afresh_and_later_calls_take_its_own_newest_step(run: Folder) -> None:
    assert run.resumes_from("resume_from_checkpoint=null") is None
    assert run.resumes_from("resume_from_checkpoint=null") is None
    run.begin("resume_from_checkpoint=null", saves=(3,))
    assert run.resumes_from("resume_from_checkpoint=null") == "run/checkpoint_step_3"


@pytest.mark.parametrize("name", ["checkpoint_step_8", "final_checkpoint"])
def test_the_folder_of_the_run_and_its_own_newest_mean_latest(name: str, run: Folder) -> None:
    run.begin(saves=(4, 8))
    run.finish()
    assert run.resumes_from(from_path(run.path)) == "run/checkpoint_step_8"
    words = from_path(run.path / name)
    assert run.resumes_from(words) == "run/checkpoint_step_8"
    run.begin(words, saves=(12,))
    assert run.resumes_from(words) == "run/checkpoint_step_12"  # the same command, called again


def test_a_run_whose_own_steps_all_fail_verification_begins_where_it_began(source: Folder, run: Folder) -> None:
    words = from_path(source.path / "checkpoint_step_4")
    run.begin(words, saves=(5, 6))
    assert run.resumes_from(words, at_most=5) == "run/checkpoint_step_5"
    assert run.resumes_from(words, at_most=4) == "source/checkpoint_step_4"
    assert sorted(path.name for path in (run.path / "superseded").iterdir()) == [
        "checkpoint_step_5",
        "checkpoint_step_6",
    ]


def test_a_run_whose_trusted_steps_are_pruned_goes_back_to_its_oldest_one(run: Folder) -> None:
    run.begin(saves=(60, 70, 80))
    assert run.resumes_from(at_most=60) == "run/checkpoint_step_60"
    run.begin(saves=(70, 80))
    flip(run.path / "checkpoint_step_60" / "optimizer.json", 0)
    assert run.resumes_from(at_most=30) == "run/checkpoint_step_70"
    assert any("no older checkpoint is left: the run goes back to its oldest one, of step 70" in x for x in run.lines)
    assert sorted(path.name for path in (run.path / "superseded").iterdir()) == [
        "checkpoint_step_70",
        "checkpoint_step_80",
        "checkpoint_step_80.2",
    ]
    assert run.resumes_from(at_most=0) is None


def test_checkpoints_without_a_record_of_the_beginning_that_are_all_damaged_are_refused_again(run: Folder) -> None:
    run.begin(saves=(4,))
    (run.path / BEGINNING).unlink()
    flip(run.path / "checkpoint_step_4" / "optimizer.json", 0)
    for _ in range(2):  # the second call finds it in quarantine
        with pytest.raises(ProgressLost):
            run.begin()


def test_another_beginning_of_a_run_that_has_begun_is_refused_with_the_alternatives(
    source: Folder, run: Folder
) -> None:
    path = source.path / "checkpoint_step_4"
    run.begin(saves=(2, 6))
    for words in (from_path(path), "resume_from_checkpoint=null", from_path(run.path / "checkpoint_step_2")):
        refusal = run.refusal(words)
        assert "this folder holds checkpoints of steps 2, 6" in refusal.what
        for way in ("latest continues", "experiment_name=", "overwrite_output_dir=true", "restart_from="):
            assert way in str(refusal.hint)
    run = Folder(run.path.parent / "other")
    run.begin(from_path(path), saves=(6,))
    assert f"began from {path}" in run.refusal(from_path(source.path)).what
    run.refusal("resume_from_checkpoint=null")


def test_latest_resumes_where_the_record_is_damaged(run: Folder) -> None:
    run.begin(saves=(2, 6))
    record = read_beginning(run.path)
    (run.path / BEGINNING).write_bytes(b"\x00" + (run.path / BEGINNING).read_bytes()[1:])
    assert run.resumes_from() == "run/checkpoint_step_6"
    assert any("cannot be read" in line and str(run.path / BEGINNING) in line for line in run.lines)
    assert read_beginning(run.path) == record


@pytest.mark.parametrize("words", [["resume_from_checkpoint=null"], ["restart_from=2"], ["overwrite_output_dir=true"]])
def test_calls_that_need_a_damaged_record_are_refused(words: list[str], run: Folder) -> None:
    run.begin(saves=(2, 6))
    (run.path / BEGINNING).write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.begin(*words)


# Restart_from


def test_restart_from_goes_back_once_and_newer_steps_are_superseded(run: Folder) -> None:
    run.begin(saves=(2, 4, 6))
    start = run.begin("restart_from=2", saves=(3,))
    assert start.source is not None
    assert start.source.manifest.step == 2
    assert "going back on purpose" in start.note
    assert sorted(path.name for path in (run.path / "superseded").iterdir()) == [
        "checkpoint_step_4",
        "checkpoint_step_6",
    ]
    assert run.resumes_from("restart_from=2") == "run/checkpoint_step_3"  # a queue, a supervisor
    assert run.resumes_from() == "run/checkpoint_step_3"
    assert run.resumes_from("restart_from=2") == "run/checkpoint_step_2"  # given again


def test_restart_from_a_path_begins_another_line(source: Folder, run: Folder) -> None:
    words = f"restart_from={source.path / 'final_checkpoint'}"
    run.begin(saves=(2, 12))
    assert run.resumes_from(words) == "source/final_checkpoint"
    assert {path.name for path in (run.path / "superseded").iterdir()} == {"checkpoint_step_2", "checkpoint_step_12"}
    assert run.resumes_from(words) == "source/final_checkpoint"
    run.begin(words, saves=(9,))
    assert run.resumes_from(words) == "run/checkpoint_step_9"
    back = f"restart_from={run.path / 'superseded' / 'checkpoint_step_12'}"
    assert run.resumes_from(back) == "run/superseded/checkpoint_step_12"


def test_restart_from_a_step_that_is_not_there_is_refused(run: Folder) -> None:
    run.begin(saves=(2, 6))
    assert "this run has no step 4: it holds 2, 6" in run.refusal("restart_from=4").what
    assert "keep one of them" in str(run.refusal("restart_from=2", "overwrite_output_dir=true").hint)


# Overwrite_output_dir


def test_overwriting_moves_the_run_aside_once_and_leaves_other_files(source: Folder, run: Folder) -> None:
    run.begin(saves=(2, 6))
    run.finish()
    for name in ("metrics.jsonl", "status.json", "recovery.json", "mine.jsonl", "other/status.json"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("{}")
    words = ("overwrite_output_dir=true", from_path(source.path / "checkpoint_step_4"))
    assert run.resumes_from(*words) == "source/checkpoint_step_4"
    aside = run.path / "overwritten" / "1"
    assert run.lines[1] == f"what was here moved to {aside}"
    moved = {path.name for path in aside.iterdir()}
    assert moved == {
        *("checkpoint_step_2", "checkpoint_step_6", "final_checkpoint", BEGINNING),
        *("metrics.jsonl", "status.json", "recovery.json"),
    }
    assert load_checkpoint(aside / "final_checkpoint").manifest.step == 6
    left = {path.name for path in run.path.iterdir() if not path.name.startswith(".")}
    assert left == {"mine.jsonl", "other", "overwritten", BEGINNING}
    run.begin(*words, saves=(5,))
    assert run.resumes_from(*words) == "run/checkpoint_step_5"
    assert run.resumes_from(words[0]) == "run/checkpoint_step_5"
    assert run.resumes_from(words[1]) == "run/checkpoint_step_5"
    assert run.resumes_from(*words) == "run/checkpoint_step_5"


def test_overwriting_acts_once_per_run_and_again_for_another_run(source: Folder, run: Folder) -> None:
    assert run.resumes_from("overwrite_output_dir=true") is None
    run.begin("overwrite_output_dir=true", saves=(3,))
    assert run.resumes_from("overwrite_output_dir=true", "max_train_steps=9") == "run/checkpoint_step_3"
    assert run.resumes_from("overwrite_output_dir=true", "learning_rate=3e-3") is None
    run.begin("overwrite_output_dir=true", "learning_rate=3e-3", saves=(4,))
    words = ("overwrite_output_dir=true", "learning_rate=3e-3", from_path(source.path))
    assert run.resumes_from(*words) == "source/checkpoint_step_8"
    assert sorted(path.name for path in (run.path / "overwritten").iterdir()) == ["1", "2"]
    shutil.rmtree(run.path / "overwritten" / "1")  # to make space
    run.begin(*words, saves=(6,))
    assert run.resumes_from("overwrite_output_dir=true", "learning_rate=4e-3") is None
    assert sorted(path.name for path in (run.path / "overwritten").iterdir()) == ["2", "3"]


def test_a_run_cannot_begin_from_what_it_moves_aside(run: Folder) -> None:
    run.begin(saves=(2, 6))
    refusal = run.refusal("overwrite_output_dir=true", from_path(run.path / "checkpoint_step_2"))
    assert "restart_from=" in str(refusal.hint)
    inside = Folder(run.path / "other")
    inside.begin(saves=(4,))
    assert run.resumes_from("overwrite_output_dir=true", from_path(inside.path)) == "run/other/checkpoint_step_4"


def test_a_run_that_a_dead_attempt_was_moving_aside_is_kept(run: Folder) -> None:
    run.begin(saves=(2, 6))
    dead = run.path / ".taken-over-9-x" / "token" / "overwritten" / "1"
    dead.mkdir(parents=True)
    (run.path / "checkpoint_step_2").rename(dead / "checkpoint_step_2")
    assert run.resumes_from() == "run/checkpoint_step_6"
    assert load_checkpoint(run.path / "overwritten" / "1" / "checkpoint_step_2").manifest.step == 2


# What is no checkpoint of ours


def of_another_loop(folder: Path) -> Path:
    with CheckpointManager(folder, async_save=False) as manager:
        manager.save(4, {"weights": {"a": 1}})
    return folder / "checkpoint_step_4"


def of_the_hooks(folder: Path) -> Path:
    write_checkpoint(folder / "ci_llm", {"ci_llm_meta_config": {"num_agents": 1}, "accelerate": {"optimizers": [1]}})
    return folder


def imported(folder: Path) -> Path:
    write_checkpoint(folder, {"ci_llm_meta_config": {"num_agents": 1}}, info={"imported_from": ["a"]})
    return folder


def an_adapter(folder: Path) -> Path:
    (folder / "agent0").mkdir(parents=True)
    (folder / "agent0" / "adapter_config.json").write_text("{}")
    return folder


def pruned(folder: Path) -> Path:
    Folder(folder).begin(saves=(2, 6))
    return folder / "checkpoint_step_1"


OTHERS = {
    of_another_loop: ("CheckpointManager of another loop", ".restore(4)"),
    of_the_hooks: ("an Accelerate loop with `register_hooks`", "accelerator.load_state("),
    imported: ("a crowd of imported adapters", "init_from="),
    an_adapter: ("PEFT adapters", "init_from="),
    pruned: ("there is no checkpoint_step_1 in this run: it holds 2, 6", "for its newest"),
    lambda folder: folder: ("there is no checkpoint at this path", "RUN/final_checkpoint"),
}


@pytest.mark.parametrize("key", ["resume_from_checkpoint", "restart_from"])
@pytest.mark.parametrize(("make", "told"), OTHERS.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_a_path_that_is_not_a_checkpoint_of_a_run_is_refused_with_one_message(make, told, key, run: Folder) -> None:  # type: ignore[no-untyped-def]
    given = make(run.path.parent / "given")
    with pytest.raises(BadInput) as caught:
        run.begin(f"{key}={given}")
    error = caught.value
    assert error.exit_code == 2
    assert told[0] in error.what
    assert told[1] in str(error.hint)
    assert str(given) in str(error.where)
    assert not run.path.exists()


def test_a_damaged_checkpoint_is_refused_with_the_place_of_undamaged_ones(source: Folder, run: Folder) -> None:
    folder = source.path / "checkpoint_step_4"
    (folder / "optimizer.json").write_text("{}")
    with pytest.raises(DamagedCheckpoint) as caught:
        run.begin(from_path(folder))
    assert f"ci-llm checkpoints list {source.path}" in str(caught.value.hint)
