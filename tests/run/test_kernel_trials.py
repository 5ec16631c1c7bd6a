"""Fast kernels are used where a trial finds them right; a run keeps what it began with, and says what it takes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.lora import kernels
from ci_llm.lora.kernels import PARTS
from ci_llm.run.autotune import approve_kernels
from ci_llm.run.exactness import fixed_batch, kernels_of
from tests.run.test_layer_digest import assert_same, crowd_on, everything, trains
from tests.support import small_run

ALONE: Any = SimpleNamespace(follow=lambda: None, gather_object=lambda value: [value], autocast=nullcontext)
LENGTHS = (5, 9, 17)


def tried(crowd: Crowd, processes: Any = ALONE, train: Any = None, *, own_rows: bool = False) -> list[str]:
    batch = fixed_batch(crowd, LENGTHS, own_rows=own_rows, most_targets=8)
    return approve_kernels(crowd, batch, train or trains(crowd), processes)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("llama", []),
        ("gemma2", ["norms stays plain: it changes losses or gradients by"]),  # they weigh by 1 + w
        ("cohere", ["rotation stays plain: it changes losses or gradients by"]),  # it rotates pairs of neighbours
        ("gpt_neox", ["rotation stays plain: RuntimeError"]),  # it rotates a part of a head
    ],
)
def test_a_part_that_a_family_computes_otherwise_stays_plain(family: str, told: list[str]) -> None:
    crowd = crowd_on(family, layers=None)
    said = tried(crowd)
    assert [line[: len(start)] for line, start in zip(said, told, strict=True)] == told
    left = [line.partition(" ")[0] for line in told]
    assert crowd.base_model.fast == tuple(part for part in PARTS if part not in left)
    assert kernels_of(Config(), crowd) == (f"fast without {', '.join(left)}" if left else "fast")
    assert kernels_of(Config(kernels="plain"), crowd) == "plain"


def test_a_part_with_only_its_gradient_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.SwiGlu, "backward", lambda _, grad: (grad * 0.2, grad * 0.3))
    crowd = crowd_on()
    assert [line[:17] for line in tried(crowd)] == ["gate stays plain:"]
    assert "gate" not in crowd.base_model.fast


def test_a_part_that_one_process_finds_wrong_stays_plain_on_all() -> None:
    answers = iter([None, "one part is wrong", None, "it ran out of memory"] + [None] * 9)
    peers: Any = SimpleNamespace(**vars(ALONE) | {"gather_object": lambda value: [value, next(answers)]})
    crowd = crowd_on()
    assert tried(crowd, peers) == ["norms stays plain: it ran out of memory"]
    assert crowd.base_model.fast == tuple(part for part in PARTS if part != "norms")


@pytest.mark.parametrize("own_rows", [False, True])
def test_a_trial_leaves_base_and_generators_as_they_were(own_rows: bool) -> None:
    crowd = crowd_on(dropout=0.1, dropconnect=0.1)
    tried(crowd, own_rows=own_rows)
    before, fast = everything(crowd), crowd.base_model.fast
    tried(crowd, own_rows=own_rows)
    assert_same(before, everything(crowd))
    assert crowd.base_model.fast == fast


@pytest.mark.slow
@pytest.mark.usefixtures("threads_as_they_were")
def test_a_run_keeps_its_kernels_and_a_resume_with_others_is_not_called_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, *words: str) -> str:
        run = f"output_dir={tmp_path / 'run'}"
        assert main(["train", *small_run.WORDS, f"max_train_steps={steps}", run, *words]) == 0
        return capsys.readouterr().out

    def recorded(step: int) -> tuple[Any, Any]:
        found: Any = read_manifest(tmp_path / "run" / f"checkpoint_step_{step}").info["surroundings"]
        return found["kernels"], found["settings"]["numerics"]

    assert "exactness" not in train(2, "kernels=plain", "lr_scheduler_type=constant")
    assert recorded(2) == ("plain", "1")
    assert "exactness: bitwise" in train(4, "lr_scheduler_type=constant")
    assert recorded(4) == ("plain", "1")
    said = train(6, "kernels=fast", "lr_scheduler_type=constant")
    assert "exactness: sample-exact (kernels plain -> fast; numerics 1 -> 4; other bits in a layer)" in said
    assert recorded(6) == ("fast", "4")
