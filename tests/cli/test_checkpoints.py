"""`ci-llm checkpoints`: what a person types, what is printed, what is removed, and the exit code."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from ci_llm.checkpoints.checkpoint import compare, load_checkpoint, write_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.cli.main import main
from ci_llm.config import load_config
from ci_llm.core.run_status import RunStatus
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import load_initial_adapters
from ci_llm.data.encoder import BUILT_IN_TEMPLATE
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import CheckpointError
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.start.agent_settings import lora_settings
from tests.checkpoints.test_store import flip
from tests.support.messages import Messages
from tools.testbed.disks import Crash, FailingDisk, MortalDisk


def state(step: int, **changes: Any) -> dict[str, Any]:
    """A state with one value of each kind that a checkpoint holds."""
    return {
        "agent0/adapter_model": {"layer.lora_A.weight": torch.arange(6.0).reshape(2, 3) + step},
        "optimizer": {"agent0": {"exp_avg": torch.arange(4.0, dtype=torch.float64), "step": torch.tensor(float(step))}},
        "rng": {"process0": {"torch": torch.arange(8, dtype=torch.uint8), "numpy": {"pos": 3, "cached": float("nan")}}},
        "train_state": {"step": step, "skipped": (0, 1)},
        "trackers": {"wandb": "one"},
        "config.yaml": b"output_dir: here\n",
    } | changes


def make_run(folder: Path, steps: int = 4) -> Path:
    with CheckpointManager(folder, async_save=False) as manager:
        for step in range(1, steps + 1):
            manager.save(step, state(step), info={"position": 12 * step, "surroundings": {"threads": 1}})
        manager.saver.make_final({"README.md": b"a card"})
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("verbs") / "run")


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def verb(*words: object) -> int:
    return main(["checkpoints", *map(str, words)])


def told(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = verb(*words, "--json")
    return code, json.loads(capsys.readouterr().out)


# list and verify


def test_list_shows_the_checkpoints_and_those_set_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoint_step_2" / "optimizer.safetensors", 900)
    with CheckpointManager(run, async_save=False) as manager:
        manager.store.supersede(3)
    code, listed = told(capsys, "list", run)
    entries = listed["checkpoints"]
    assert code == 0
    assert [(entry["name"], entry["step"], entry["line"], entry["damage"] is None) for entry in entries] == [
        ("checkpoint_step_3", 3, "current", True),
        ("checkpoint_step_2", 2, "current", False),
        ("checkpoint_step_1", 1, "current", True),
        ("superseded/checkpoint_step_4", 4, "superseded", True),
        ("superseded/final_checkpoint", 4, "superseded", True),
    ]
    assert [entry["final"] for entry in entries] == [False, False, False, False, True]
    assert entries[0]["nbytes"] == verify_folder(run / "checkpoint_step_3").nbytes
    assert verb("list", run) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split()[0] == "2"
    assert "damaged" in out.splitlines()[2]
    assert "tensor" in out.splitlines()[-1], "the damage is told in full"
    assert "optimizer.safetensors" in out.splitlines()[-1]


def test_a_quick_list_reads_no_more_than_the_manifests(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoint_step_2" / "optimizer.safetensors", 900)
    (run / "final_checkpoint" / "manifest.json").unlink()
    _, listed = told(capsys, "list", run, "--quick")
    assert [entry["step"] for entry in listed["checkpoints"]] == [None, 4, 3, 2, 1]
    assert [entry["damage"] is None for entry in listed["checkpoints"]] == [False, True, True, True, True]
    assert verb("list", run, "--quick") == 0
    assert capsys.readouterr().out.count("unread") == 4


def test_a_folder_without_a_run_is_refused_and_a_run_without_a_checkpoint_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    for more in ([], ["--json"]):
        assert verb("list", tmp_path, *more) == 2
        assert "this folder holds nothing of a run" in capsys.readouterr().err
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.store.acquire_lease()
        assert verb("list", tmp_path) == 0
    assert verb("list", tmp_path) == 0
    assert capsys.readouterr().out.count(f"no checkpoint in {tmp_path}") == 2
    assert told(capsys, "list", tmp_path) == (0, {"checkpoints": []})
    for name, make in (("status.json", Path.touch), ("attempts", Path.mkdir)):
        (tmp_path / f"of {name}").mkdir()
        make(tmp_path / f"of {name}" / name)
        assert verb("list", tmp_path / f"of {name}") == 0


def test_verify_names_the_bad_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb("verify", run) == 0
    assert capsys.readouterr().out.count("verified") == 5
    flip(run / "checkpoint_step_2" / "agent0" / "adapter_model.safetensors", 8 * 100)
    assert verb("verify", run / "checkpoint_step_2") == 1
    said = capsys.readouterr().err
    assert "agent0/adapter_model.safetensors" in said
    assert str(run / "checkpoint_step_2") in said
    code, verdict = told(capsys, "verify", run)
    assert code == 1
    assert list(verdict["damaged"]) == [str(run / "checkpoint_step_2")]
    assert len(verdict["verified"]) == 4
    assert (run / "checkpoint_step_2").is_dir(), "looking moves nothing"


def test_verify_overlooks_no_final_checkpoint_and_no_lost_manifest(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "final_checkpoint" / "manifest.json", 900)
    code, verdict = told(capsys, "verify", run)
    assert code == 1
    assert list(verdict["damaged"]) == [str(run / "final_checkpoint")]
    assert len(verdict["verified"]) == 4
    (run / "checkpoint_step_4" / "manifest.json").unlink()
    assert verb("verify", run / "checkpoint_step_4") == 1
    assert "is damaged" in capsys.readouterr().err
    (tmp_path / "begun").mkdir()
    assert verb("verify", tmp_path / "begun") == 2
    assert "there is no checkpoint here" in capsys.readouterr().err


def test_many_damaged_files_are_counted_and_five_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {f"layer{number}": torch.zeros(4) for number in range(40)}
    write_checkpoint(tmp_path / "a", {f"agent{number}": tensors for number in range(9)})
    for path in (tmp_path / "a").glob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-640] + b"\x01" * 640)
    assert verb("verify", tmp_path / "a") == 1
    told = capsys.readouterr().err
    assert "agent0.safetensors has another digest" in told
    assert told.count("has another digest") == 5
    assert "; 4 more" in told


# diff


def test_two_runs_with_the_same_bits_do_not_differ(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(tmp_path / "other", async_save=False) as manager:
        elsewhere = state(4, **{"config.yaml": b"output_dir: there\n", "trackers": {"wandb": "two"}})
        manager.save(4, elsewhere, info={"position": 48, "surroundings": {"threads": 2}})
    assert verb("diff", run / "checkpoint_step_4", tmp_path / "other") == 0
    out = capsys.readouterr().out
    assert "bit-identical, 4 tensors" in out
    beside = out.partition("beside the state: ")[2]
    assert {"config.yaml", "trackers.wandb"} <= {*beside.strip().split(", ")}
    assert "manifest.json.surroundings.threads" in beside
    assert verb("diff", run, run / "checkpoint_step_4") == 0, "a run is its newest checkpoint"


def test_the_backend_that_wrote_a_checkpoint_is_no_difference(run: Path, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "other", async_save=False, checkpoint_backend="distributed") as manager:
        manager.save(4, state(4), info={"position": 48, "surroundings": {"threads": 1}})
    assert verb("verify", tmp_path / "other") == 0
    assert verb("diff", run / "checkpoint_step_4", tmp_path / "other") == 0


def nudged(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, 9.0))


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda s: s["agent0/adapter_model"].update({"layer.lora_A.weight": nudged(torch.arange(6.0).reshape(2, 3))}),
         "agent0/adapter_model.layer.lora_A.weight", "6 of 6 elements, by at most 4.77e-07"),
        (lambda s: s["optimizer"]["agent0"].update(exp_avg=torch.tensor([-0.0, 1, 2, 3], dtype=torch.float64)),
         "optimizer.agent0.exp_avg", "1 of 4 elements, by at most 0"),
        (lambda s: s["optimizer"]["agent0"].update(exp_avg=torch.tensor([0, 1, 2, torch.nan], dtype=torch.float64)),
         "optimizer.agent0.exp_avg", "1 of 4 elements, by at most inf"),
        (lambda s: s["optimizer"]["agent0"].update(exp_avg=torch.arange(4.0)),
         "optimizer.agent0.exp_avg", "(4,) of float64 in A, (4,) of float32 in B"),
        (lambda s: s["rng"]["process0"].update(torch=torch.tensor([0, 1, 2, 3, 4, 5, 6, 9], dtype=torch.uint8)),
         "rng.process0.torch", "1 of 8 elements, by at most 2"),
        (lambda s: s["rng"]["process0"]["numpy"].update(pos=4), "rng.process0.numpy.pos", "3 in A, 4 in B"),
        (lambda s: s["train_state"].update(skipped=(0, True)), "train_state.skipped[1]", "1 in A, True in B"),
        (lambda s: s.pop("rng"), "rng.process0.numpy.cached", "only in A"),
        (lambda s: s.update(more={"x": torch.ones(2)}), "more.x", "only in B"),
    ],
)  # fmt: skip
def test_differences_are_named_with_their_sizes(tmp_path: Path, change: Any, where: str, what: str) -> None:
    changed = copy.deepcopy(state(0))
    change(changed)
    write_checkpoint(tmp_path / "a", state(0))
    write_checkpoint(tmp_path / "b", changed)
    found = compare(load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "b"))
    assert not found.identical
    assert (where, what) in [(difference.where, difference.what) for difference in found.differences]
    assert compare(load_checkpoint(tmp_path / "a"), load_checkpoint(tmp_path / "a")).differences == ()


# prune


def test_prune_keeps_the_newest_that_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "checkpoint_step_4" / "optimizer.safetensors", 900)
    before = sorted(path.name for path in run.iterdir())
    code, plan = told(capsys, "prune", run, "--keep", 2, "--dry-run")
    assert (code, plan["kept"], plan["removed"], plan["dry_run"]) == (0, [3, 2], [1], True)
    assert plan["freed_bytes"] > 0
    assert sorted(path.name for path in run.iterdir()) == before, "a dry run changes nothing"
    assert verb("prune", run, "--keep", 2) == 0
    out = capsys.readouterr().out
    assert "removed: 1 (" in out
    assert "checkpoint_step_4 is damaged" in out
    left = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    assert left == ["checkpoint_step_2", "checkpoint_step_3", "checkpoint_step_4", "final_checkpoint"]


def test_the_last_that_verifies_is_never_removed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 3, 4):
        flip(run / f"checkpoint_step_{step}" / "optimizer.safetensors", 900)
    assert verb("prune", run, "--keep", 1) == 0
    assert (run / "checkpoint_step_1").is_dir()
    flip(run / "checkpoint_step_1" / "optimizer.safetensors", 900)
    assert verb("prune", run, "--keep", 1) == 1
    assert "none of these checkpoints verifies" in capsys.readouterr().err
    assert sorted(run.glob("checkpoint_step_*"))[0].name == "checkpoint_step_1"


def test_the_best_step_stays(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = RunStatus(run, 1)
    status.update(best_step=2)
    status.finish("interrupted", "signal:SIGTERM")
    _, listed = told(capsys, "list", run)
    assert [entry["step"] for entry in listed["checkpoints"] if entry["pinned"]] == [2]
    assert verb("list", run) == 0
    assert "checkpoint_step_2 (best)" in capsys.readouterr().out
    assert verb("prune", run, "--keep", 1) == 0
    out = capsys.readouterr().out
    assert "removed: 3, 1 (" in out
    assert out.endswith("kept: 4, 2 (best)\n"), "--keep 1 leaves two, and says why"
    assert CheckpointManager(run).all_steps() == [2, 4]


def test_prune_is_refused_while_the_best_step_is_unknown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "status.json").write_text('{"status": "comp')
    before = sorted(run.glob("checkpoint_*"))
    for dry in (["--dry-run"], []):
        assert verb("prune", run, "--keep", 1, *dry) == 2
        assert "which step is the best is not known, and nothing was removed" in capsys.readouterr().err
    assert sorted(run.glob("checkpoint_*")) == before
    assert verb("list", run) == 0
    (run / "status.json").unlink()
    assert verb("prune", run, "--keep", 1) == 0, "a folder without a run has no best step"


def test_a_run_that_holds_its_folder_is_not_pruned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(run, async_save=False) as manager:
        manager.save(5, state(5))
        assert verb("prune", run, "--keep", 1) == 2
        assert "writes to this folder" in capsys.readouterr().err
        assert verb("prune", run, "--keep", 1, "--dry-run") == 0
        assert manager.all_steps() == [1, 2, 3, 4, 5]
    assert verb("prune", run, "--keep", 1) == 0
    assert CheckpointManager(run).all_steps() == [4, 5], "the final checkpoint of step 4 stays"


# Bad calls


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frobnicate"],
        ["list"],
        ["list", "NOWHERE"],
        ["list", "RUN/checkpoint_step_4"],
        ["verify", "NOWHERE"],
        ["diff", "RUN"],
        ["diff", "RUN", "NOWHERE"],
        ["prune", "RUN"],
        ["prune", "RUN", "--keep", "0"],
        ["prune", "NOWHERE", "--keep", "1"],
        ["import", "NOWHERE", "--to", "NEW"],
        ["import", "RUN", "--to", "NEW"],
        ["import", "RUN", "--to", "RUN"],
    ],
    ids=" ".join,
)
def test_a_bad_call_of_checkpoints_is_one_message(
    words: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: Messages
) -> None:
    places = {"RUN": str(run), "NOWHERE": str(tmp_path / "nowhere"), "NEW": str(tmp_path / "new")}
    named = {f"RUN/{folder.name}": str(folder) for folder in run.iterdir()}
    assert verb(*({**places, **named}.get(word, word) for word in words)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    messages.same(said, theirs=r"(invalid choice: ).*")  # argparse quotes the choices as each Python likes
    assert "hint:" in said
    assert "Traceback" not in said
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "new").exists()


# import

TARGETS = ["q_proj", "v_proj"]


def lora(**changes: Any) -> peft.LoraConfig:
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": TARGETS, "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**settings, **changes})


def embedded() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    model.name_or_path = str(BASE_FOLDER)
    return model


def peft_folders(place: Path, count: int, **changes: Any) -> list[Path]:
    folders = []
    for k in range(count):
        torch.manual_seed(k)
        folders.append(place / f"adapter{k}")
        peft.get_peft_model(embedded(), lora(**changes)).save_pretrained(folders[-1])
    return folders


def logits_of(crowd: Crowd, agent: int) -> Tensor:
    ids = torch.arange(5, 17)[None]
    with torch.no_grad(), crowd.eval().base_model.active_agent(agent) as model:
        logits: Tensor = model(input_ids=ids).logits
        return logits


@pytest.mark.slow
def test_peft_folders_become_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = peft_folders(tmp_path, 2)
    code, made = told(capsys, "import", *folders, "--to", tmp_path / "crowd")
    assert (code, made["num_agents"], made["lora_rank"]) == (0, 2, 4)
    crowd = Crowd.from_pretrained(tmp_path / "crowd", device="cpu")
    for k, folder in enumerate(folders):
        plain = peft.PeftModel.from_pretrained(embedded(), folder).eval()
        with torch.no_grad():
            wanted = plain(input_ids=torch.arange(5, 17)[None]).logits
        torch.testing.assert_close(logits_of(crowd, k), wanted)
    assert crowd.generate(["Ann has 7 pens."], max_new_tokens=4)
    fresh = Crowd(embedded(), LoraSettings(2, rank=4, alpha=8, target_modules=("q_proj", "v_proj")), str(BASE_FOLDER))
    assert "one adapter for each agent" in load_initial_adapters(fresh, tmp_path / "crowd")
    assert torch.equal(fresh.storage.weights, crowd.storage.weights)
    assert verb("verify", tmp_path / "crowd") == 0


def bring_tokenizer(folder: Path, template: str) -> None:
    """Save a tokenizer beside an adapter, as TRL does."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_imported_agents_keep_their_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, without = peft_folders(tmp_path, 3)
    other = Path(shutil.copytree(two, tmp_path / "other"))
    for folder in (one, two):
        bring_tokenizer(folder, f"{{{{ 'Ask: ' }}}}{BUILT_IN_TEMPLATE}")
    bring_tokenizer(other, f"{{{{ 'Say: ' }}}}{BUILT_IN_TEMPLATE}")
    assert verb("import", one, two, "--to", tmp_path / "crowd") == 0
    for opened in (tmp_path / "crowd", tmp_path / "again"):
        crowd = Crowd.from_pretrained(opened, device="cpu")
        assert crowd.prompter is not None
        assert crowd.prompter.text(crowd.prompter.ids("How many?")) == "Ask: How many?\n"
        if opened.name == "crowd":  # its agents bring the template along as well
            assert verb("import", opened, "--to", tmp_path / "again") == 0
    capsys.readouterr()
    for sources in ([one, other], [one, without], [without, one]):
        assert verb("import", *sources, "--to", tmp_path / "mixed") == 2
        assert "these two have different ones" in capsys.readouterr().err
    (one / "tokenizer.json").write_text("torn")
    assert verb("import", one, "--to", tmp_path / "mixed") == 2
    assert "the adapter's tokenizer cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "mixed").exists()


@pytest.mark.slow
def test_the_suggested_command_that_trains_imported_agents_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("import", *peft_folders(tmp_path, 1, use_rslora=True), "--to", tmp_path / "crowd") == 0
    made, _, command = capsys.readouterr().out.splitlines()
    assert made.endswith("on embedded"), "and not the path of this installation"
    config = load_config(None, command.split("train.py")[1].split())
    assert (config.num_agents, config.lora_rank, config.lora_alpha, config.use_rslora) == (1, 4, 8, True)
    assert config.model_name == "embedded"
    crowd = Crowd(embedded(), lora_settings(config), config.model_name)
    assert "one adapter" in load_initial_adapters(crowd, Path(str(config.init_from)))


@pytest.mark.slow
def test_weights_that_peft_saved_as_a_pickle_are_imported(tmp_path: Path) -> None:
    (folder,) = peft_folders(tmp_path, 1)
    weights = load_file(folder / "adapter_model.safetensors")
    torch.save(weights, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    assert verb("import", folder, "--to", tmp_path / "crowd") == 0
    saved = load_file(tmp_path / "crowd" / "agent0" / "adapter_model.safetensors")
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it was executed')",))


def test_a_pickle_that_executes_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = peft_folders(tmp_path, 1)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"weights": Bomb()}, folder / "adapter_model.bin")
    assert verb("import", folder, "--to", tmp_path / "crowd", "--base-model", "embedded") == 2
    said = capsys.readouterr().err
    assert "adapter_model.bin cannot be read" in said
    assert "it was executed" not in said
    assert not (tmp_path / "crowd").exists()


@pytest.mark.slow
def test_folders_that_do_not_make_a_crowd_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = peft_folders(tmp_path / "one", 1)
    (other,) = peft_folders(tmp_path / "other", 1, r=2)
    (dora,) = peft_folders(tmp_path / "dora", 1, use_dora=True)
    (pissa,) = peft_folders(tmp_path / "pissa", 1, init_lora_weights="pissa")
    gap = tmp_path / "gap"
    for k, folder in zip((0, 2), peft_folders(tmp_path / "two", 2), strict=True):
        shutil.move(folder, gap / f"agent{k}")
    hollow = Path(shutil.copytree(one, tmp_path / "hollow"))
    (hollow / "adapter_model.safetensors").unlink()
    torn = Path(shutil.copytree(one, tmp_path / "torn"))
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    for sources, message in (
        ([one, other], "differ in rank 4 and 2"),
        ([dora], "use_dora: True"),
        ([pissa], "init_lora_weights: pissa, which changes the base"),
        ([gap], "agent1/adapter_config.json"),
        ([hollow], "no weights"),
        ([torn], "adapter_model.safetensors cannot be read"),
    ):
        assert verb("import", *sources, "--to", tmp_path / "crowd") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "crowd").exists()


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "new" / "lone", state(0), disk=FailingDisk(9, 28))
    assert not (tmp_path / "new" / "lone").exists()
    write_checkpoint(tmp_path / "lone", state(0))
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_checkpoint(tmp_path / "lone", state(1), disk=FailingDisk(12, 28))
    assert load_checkpoint(tmp_path / "lone").state["train_state"]["step"] == 0
    write_checkpoint(tmp_path / "lone", state(2))
    assert load_checkpoint(tmp_path / "lone").state["train_state"]["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lone", "new"]


@pytest.mark.slow
def test_a_crash_in_the_replacement_of_a_checkpoint_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    lone = tmp_path / "lone"
    seen = set()
    for lives in itertools.count():
        write_checkpoint(lone, state(0))
        try:
            write_checkpoint(lone, state(1), disk=MortalDisk(lives))
        except Crash:
            seen.add(load_checkpoint(lone).state["train_state"]["step"])
        else:
            break
    assert seen == {0, 1}


class Plain(FailingDisk):
    """A disk that cannot exchange two names, like a network file system."""

    def exchange(self, one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FailingDisk, Plain])
def test_a_disk_that_refuses_the_replacement_of_a_checkpoint_leaves_the_old_one(
    kind: type[FailingDisk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed clean-up after the commit is not an error."""
    lone = tmp_path / "lone"
    committed = 0
    for lives in itertools.count():
        write_checkpoint(lone, state(0))
        caplog.clear()
        disk = kind(lives, errno.EBUSY)
        try:
            write_checkpoint(lone, state(1), disk=disk)
        except CheckpointError:
            assert not committed
        else:
            committed += 1
            assert ("a leftover stays" in caplog.text) == (lives < disk.changes)
        assert load_checkpoint(lone).state["train_state"]["step"] == bool(committed)
        if lives >= disk.changes:
            break
    assert committed > 1
