"""Scores of a merge beside the crowd and its agents, teacher-forced, on the rows that the run was evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ci_llm.config import Config, parse_config
from ci_llm.crowd.lora import LoraSettings
from ci_llm.crowd.merging import Adapter
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.pretrained import Pretrained
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.batches import Batch, pack
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import DataError


@dataclass(frozen=True)
class Comparison:
    """Scores by name: the agents, the crowd, and a merge if there is one.

    Attributes:
        rows: how many.
        trained_on: whether none, some or all of them were trained on.
        exact_match: share of rows whose whole solution greedy decoding reproduces.
        nll: nats per target token.
    """

    rows: int
    trained_on: str
    exact_match: Mapping[str, float]
    nll: Mapping[str, float]

    def table(self) -> str:
        """For people; the agents' mean stands before the crowd."""
        lines = [f"{'':<16}{'exact match':>12}{'nll':>10}"]
        agents = [name for name in self.nll if name.startswith("agent")]
        for name in self.nll:
            if name == "crowd":
                means = (sum(values[k] for k in agents) / len(agents) for values in (self.exact_match, self.nll))
                lines.append(_line("agents, mean", *means))
            lines.append(_line(name, self.exact_match[name], self.nll[name]))
        but = "" if self.trained_on == "none" else f", of which {self.trained_on} were trained on"
        lines.append(f"{self.rows} rows of the run's evaluation{but}: whole solutions, teacher-forced")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For scripts."""
        scores = {name: {"exact_match": self.exact_match[name], "nll": self.nll[name]} for name in self.nll}
        return {"rows": self.rows, "rows_trained_on": self.trained_on, **scores}


def _line(name: str, exact_match: float, nll: float) -> str:
    return f"{name:<16}{exact_match:>12.3f}{nll:>10.4f}"


def compare(saved: Pretrained, merges: Mapping[str, Adapter]) -> Comparison:
    """Score agents, crowd and merges; the base is without agents before and after.

    Args:
        merges: by name.

    Raises:
        DataError: the rows are not found any more.
    """
    assert saved.run_config is not None
    config = parse_config(saved.run_config, "config.yaml")
    rows = _rows(config, saved)
    found = _score(Crowd.of(saved), rows, config)
    names = [*saved.names, "crowd"]
    exact, nll = (dict(zip(names, values, strict=True)) for values in (found.exact_match, found.mean_nll))
    for name, merge in merges.items():
        alone = Crowd(saved.base.model, settings_of(merge), saved.base.name, saved.base.pad_id)
        alone.agents.load_agent(0, merge.tensors, name)
        one = _score(alone, rows, config)
        exact[name], nll[name] = one.exact_match[0], one.mean_nll[0]
    return Comparison(len(rows), rows.rows.trained_on, exact, nll)


def settings_of(adapter: Adapter) -> LoraSettings:
    """A crowd of this one agent."""
    config = adapter.config
    return LoraSettings(
        num_agents=1,
        rank=adapter.rank,
        alpha=config["lora_alpha"],
        use_rslora=config["use_rslora"],
        target_modules=tuple(adapter.modules),
    )


def _rows(config: Config, saved: Pretrained) -> TokenizedRows:
    try:
        rows = load_rows(config, "eval")
        return tokenize(rows, saved.prompter.tokenizer, max_seq_length=config.max_seq_length)
    except DataError as error:
        hint = "--no-score exports without the scores"
        raise DataError(f"no scores: {error.what}", where=error.where, hint=hint) from error


def _score(crowd: Crowd, rows: TokenizedRows, config: Config) -> Scores:
    crowd.choose_route()
    try:
        scores = score(crowd, _batches(rows, 4 * config.batch_size), config.aggregator)
    finally:
        crowd.detach()
    assert scores is not None  # nobody asks it to stop
    return scores


def _batches(rows: TokenizedRows, size: int) -> Iterator[Batch]:
    for at in range(0, len(rows), size):
        part = range(at, min(at + size, len(rows)))
        yield pack([rows[number] for number in part], part)
