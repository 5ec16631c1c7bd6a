"""The ways in which trained agents answer, measured by teacher forcing: for `benchmarks.crowd` and `worth`.

Legend: K agents, S targets, n rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ci_llm.base.gguf import gguf_file, plain_folder
from ci_llm.base.load import load_base
from ci_llm.config import Config, load_config, parse_config
from ci_llm.crowd.adapter_files import Adapter, settings_of
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.distilling import distil
from ci_llm.crowd.judging import calibration_error
from ci_llm.crowd.merging import Distillation, merge_of, merged
from ci_llm.crowd.pretrained import Pretrained, open_pretrained
from ci_llm.data.batches import Batch, pack
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.lora.settings import LoraSettings

CONFIG = Path(__file__).parent.parent / "configs.yaml"
ROWS_AT_A_TIME = 50


class Measured(TypedDict):
    """One way to answer, on n rows.

    right: [n], 1 for an exact match; nll: [n], nats over the answer tokens, and tokens: [n], both empty where texts
    were generated; ece: calibration error; agents: that an answer takes.
    """

    right: list[float]
    nll: list[float]
    tokens: list[int]
    ece: float
    agents: float


Answers: TypeAlias = "dict[str, Measured]"
#: From a final checkpoint, and the folder of its run, to ways to answer by name.
Way: TypeAlias = "Callable[[Path, Path], Answers]"


def answers_of(name: str, split: str = "test") -> Way:
    """Whatever the run has trained, as it answers: the crowd, or one agent."""

    def measure(checkpoint: Path, _: Path) -> Answers:
        saved = open_pretrained(checkpoint, "cpu")
        return {name: {**everyone(saved, embedded(split))[-1], "agents": float(len(saved.agents))}}

    return measure


def crowd_answers(checkpoint: Path, _: Path) -> Answers:
    """The mean of the agents, the agent that was best on the validation split, and the crowd."""
    saved = open_pretrained(checkpoint, "cpu")
    best = best_agent(everyone(saved, embedded("validation"))[:-1])
    return beside_each_other(everyone(saved, embedded("test")), best)


def beside_each_other(measured: Sequence[Measured], best: int) -> Answers:
    """The mean of the agents, one of them, and the crowd.

    Args:
        measured: K agents, then the crowd.
        best: the number of the agent that was best on the validation rows.
    """
    *agents, crowd = measured
    mean: Any = {key: np.mean([one[key] for one in agents], axis=0).tolist() for key in ("right", "nll", "ece")}
    return {
        f"agents, mean of {len(agents)}": {**agents[0], **mean},
        "best agent by validation": agents[best],
        "crowd": {**crowd, "agents": float(len(agents))},
    }


def best_agent(agents: Sequence[Measured]) -> int:
    """The agent with the highest exact match, and among equals the one with the lowest NLL."""
    return max(range(len(agents)), key=lambda k: (sum(agents[k]["right"]), -sum(agents[k]["nll"])))


def merges(crowd: str | None, methods: Mapping[str, str]) -> Way:
    """Merges of the agents.

    Args:
        crowd: the name of the agents together, if they are to be measured as well.
        methods: method -> name.
    """

    def measure(checkpoint: Path, _: Path) -> Answers:
        saved = open_pretrained(checkpoint, "cpu")
        together: Answers = {}
        if crowd is not None:
            together[crowd] = {**everyone(saved, embedded("test"))[-1], "agents": float(len(saved.agents))}
        agents = saved.agents
        for method, name in methods.items():
            together[name] = alone(saved, merged(saved.base.model, agents, merge_of(method)), embedded("test"))
        return together

    return measure


def distillates(checkpoint: Path, _: Path) -> Answers:
    """One agent that learned the crowd's distributions, and the control that learned its own texts."""
    saved = open_pretrained(checkpoint, "cpu")
    assert saved.run_config is not None
    student, control = distil(saved, parse_config(saved.run_config, "config.yaml"), Distillation(learning_rate=2e-3))
    rows = embedded("test")
    return {"distilled": alone(saved, student, rows), "distilled, own labels": alone(saved, control, rows)}


# Teacher forcing


def embedded(split: str) -> Config:
    """The configuration that evaluates on all rows of a split of the embedded task."""
    return load_config(CONFIG, [f"eval_split={split}", "eval_samples=null"])


def everyone(
    saved: Pretrained, rows: Config, at_a_time: int = ROWS_AT_A_TIME, crowds: Sequence[Sequence[int]] | None = None
) -> list[Measured]:
    """K agents, then each crowd of some of them (default: of all), on all rows that a configuration evaluates on."""
    return _measured(saved, saved.settings, [agent.tensors for agent in saved.agents], rows, at_a_time, crowds)


def alone(saved: Pretrained, adapter: Adapter, rows: Config, at_a_time: int = ROWS_AT_A_TIME) -> Measured:
    """One adapter on the base of a saved crowd, on all rows that a configuration evaluates on."""
    return _measured(saved, settings_of(saved.base.model, [adapter]), [adapter.tensors], rows, at_a_time)[0]


def folder_of(model: Path | str) -> str:
    """The folder that `from_pretrained` opens; for a GGUF file that of the dequantised model."""
    file = gguf_file(str(model))
    return str(plain_folder(file) if file else model)


def untrained(
    model_name: str, rows: Config, at_a_time: int = ROWS_AT_A_TIME, model_dtype: str | None = None
) -> Measured:
    """A base without agents, on all rows that a configuration evaluates on."""
    base = load_base(model_name, model_dtype)
    crowd = Crowd(base.model, LoraSettings(num_agents=1, rank=1, alpha=1), base.name, base.pad_id)
    crowd.base_model.choose_route()
    return scored(crowd.eval(), batches(rows, base.tokenizer, at_a_time))[0]  # what has learned nothing is the base


def _measured(
    saved: Pretrained,
    settings: LoraSettings,
    agents: Sequence[Mapping[str, Tensor]],
    rows: Config,
    at_a_time: int,
    crowds: Sequence[Sequence[int]] | None = None,
) -> list[Measured]:
    """These agents on the base, which is without agents before and after."""
    crowd = Crowd(saved.base.model, settings, saved.base.name, saved.base.pad_id)
    try:
        for k, tensors in enumerate(agents):
            crowd.agents[k].load_state_dict(tensors, f"agent{k}")
        crowd.base_model.choose_route()
        return scored(crowd.eval(), batches(rows, saved.prompter.tokenizer, at_a_time), crowds)
    finally:
        crowd.detach()


def batches(config: Config, tokenizer: PreTrainedTokenizerBase, at_a_time: int) -> list[Batch]:
    """All rows that a configuration evaluates on, in order."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = tokenize(
            load_rows(config, "eval"), tokenizer, max_seq_length=config.max_seq_length, cache_folder=Path(scratch)
        )
        parts = [range(at, min(at + at_a_time, len(rows))) for at in range(0, len(rows), at_a_time)]
        return [pack([rows[number] for number in part], part) for part in parts]


@torch.no_grad()
def scored(crowd: Crowd, batches: Iterable[Batch], crowds: Sequence[Sequence[int]] | None = None) -> list[Measured]:
    """K agents, then the mean of the probabilities of each crowd (default: of all); each as an answer of one agent."""
    right, nll, tokens = list[Tensor](), list[Tensor](), list[Tensor]()
    sure, hits = list[Tensor](), list[Tensor]()
    for batch in batches:
        log_probs = crowd.head.logits(crowd.states(batch)[:, batch.predict_from]).log_softmax(-1)
        means = [aggregate(log_probs[[*each]], "probability")[None] for each in crowds or [range(len(log_probs))]]
        everyone = torch.cat([log_probs, *means])
        best, chosen = everyone.max(-1)
        is_right = chosen == batch.targets
        own = everyone.gather(-1, batch.targets.expand(len(everyone), -1)[..., None]).squeeze(-1)
        empty = torch.zeros(len(everyone), batch.num_rows, dtype=torch.float64)
        right.append(empty.index_add(1, batch.target_rows, (~is_right).double()) == 0)
        nll.append(empty.index_add(1, batch.target_rows, -own.double()))
        tokens.append(torch.bincount(batch.target_rows, minlength=batch.num_rows))
        sure.append(best.exp())
        hits.append(is_right)
    columns = [torch.cat(each, dim=-1) for each in (right, nll, sure, hits)]
    counts = torch.cat(tokens).tolist()
    return [
        {
            "right": exact.double().tolist(),
            "nll": nats.tolist(),
            "tokens": counts,
            "ece": calibration_error(p.clamp(max=1), hit),
            "agents": 1.0,
        }
        for exact, nats, p, hit in zip(*columns, strict=True)
    ]
