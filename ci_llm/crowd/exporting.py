"""The export of a saved crowd: all agents, one of them, or a merge of them, as PEFT folders or within the base.

`compare` scores a merge beside the crowd and its agents, teacher-forced, on the rows that the run was evaluated on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from ci_llm.base.load import load_architecture, load_base
from ci_llm.base.quantized import stored_quantization
from ci_llm.config import Config, parse_config
from ci_llm.core.durable import new_folder, write_new
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.card import CardFacts, adapter_card, crowd_card, model_card, public_name
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.distilling import CONTROL, distil
from ci_llm.crowd.merge_methods import DISTILLED, Distillation, Merge
from ci_llm.crowd.merging import Adapter, merge_into_base, merged
from ci_llm.crowd.model import default_names
from ci_llm.crowd.pretrained import Pretrained, open_pretrained, require_free, write_crowd
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.batches import Batch, pack
from ci_llm.data.prompts import tokenizer_files
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import BadInput, CheckpointError, DataError, ModelError
from ci_llm.lora.layer import LoraSettings


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
        return tokenize(
            rows, saved.prompter.tokenizer, max_seq_length=config.max_seq_length, long_rows=config.long_rows
        )
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


@dataclass(frozen=True)
class Export:
    """What will be written.

    Attributes:
        name: "crowd", "agent2", or the name of a merge.
        adapter: the one adapter; None: all agents.
        title, what: of the card.
        beside: adapters that are scored beside it, by name, and not written.
    """

    saved: Pretrained
    name: str
    adapter: Adapter | None
    title: str
    what: str
    beside: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Of the adapters that will be written."""
        return [self.adapter.rank] if self.adapter else [int(config["r"]) for config in self.saved.configs]

    @property
    def can_be_scored(self) -> bool:
        """Whether it is known which rows the agents were evaluated on."""
        return self.saved.run_config is not None

    def scores(self) -> Comparison:
        """Scores of agents, crowd and merge. Raises DataError: the rows are not found any more."""
        is_merge = self.adapter is not None and not self.name.startswith("agent")
        merges = {self.name: self.adapter, **self.beside} if self.adapter is not None and is_merge else {}
        return compare(self.saved, merges)

    def write(self, target: Path, scores: Comparison | None, *, into_base: bool = False) -> None:
        """Write it as `target`, whole or not at all.

        Args:
            scores: for the card.
            into_base: a model of Transformers with merged weights. It takes the base, which has them afterwards.

        Raises:
            ModelError: `target` exists, or there is no one adapter to merge into the base.
            CheckpointError: it cannot be written.
        """
        require_free(target)
        if self.adapter is None:
            if into_base:
                what = "one adapter can be merged into the base, and not a crowd"
                raise ModelError(what, where="into_base", hint="give an agent or a merge")
            self._write_agents(target, scores)
            return
        card = (model_card if into_base else adapter_card)(self._facts(scores), self.title, self.what)
        files = {**tokenizer_files(self.saved.prompter.tokenizer), "README.md": card.encode()}
        try:
            with new_folder(target) as draft:
                if into_base:
                    self._write_whole(draft, self.adapter)
                else:
                    files |= _peft_files(self.adapter)
                for name, data in files.items():
                    write_new(draft / name, [data])
        except OSError as error:
            raise CheckpointError(f"{target.name} cannot be written: {error}", where=str(target)) from error

    def _write_agents(self, target: Path, scores: Comparison | None) -> None:
        saved = self.saved
        tensors = {f"{name}/adapter_model": agent for name, agent in zip(saved.names, saved.agents, strict=True)}
        configs = {f"{name}/adapter_config": config for name, config in zip(saved.names, saved.configs, strict=True)}
        meta = {**saved.meta, "base_model_name_or_path": saved.base.name}
        card = crowd_card(self._facts(scores)).encode()
        tokenizer = tokenizer_files(saved.prompter.tokenizer)
        write_crowd(
            target,
            {**tensors, **configs},
            meta,
            tokenizer,
            step=saved.step,
            card=card,
            calibration=saved.calibration,
        )

    def _write_whole(self, draft: Path, adapter: Adapter) -> None:
        model = merge_into_base(self._dense_base(), adapter)
        # Here the base is read without a cache of keys and values; whoever generates with the model wants its own.
        model.config.use_cache = getattr(load_architecture(self.saved.base.name), "use_cache", True)
        model.save_pretrained(draft)

    def _dense_base(self) -> PreTrainedModel:
        """The base to merge into: a quantised one is loaded again, because its 4 or 8 bits hold no merged weights."""
        saved = self.saved
        if stored_quantization(saved.base.model.config) is None:
            return saved.base.model
        model = load_base(saved.base.name, saved.meta["base_dtype"], saved.base.model.device).model
        if stored := stored_quantization(model.config):
            raise ModelError(
                f"the files of the base are quantised ({stored}), and an adapter is merged into dense weights only",
                where=f"base model: {public_name(saved.base.name)}",
                hint="export without --into-base",
            )
        return model

    def _facts(self, scores: Comparison | None) -> CardFacts:
        saved = self.saved
        configs = [self.adapter.config] if self.adapter else saved.configs
        trained = ""
        if saved.run_config is not None:
            names = parse_config(saved.run_config, "config.yaml").all_dataset_names
            trained = f" for {saved.step} optimizer steps on `{', '.join(map(public_name, names))}`"
        return CardFacts(
            base=saved.base.name,
            ranks=self.ranks,
            use_rslora=any(config.get("use_rslora") for config in configs),
            trained=trained,
            scores=scores.table() if scores else "",
            notes=[_note(saved.calibration)] if saved.calibration and self.adapter is None else [],
        )


def _note(calibration: Calibration) -> str:
    return (
        f"`calibration.json` says how probably an answer is right, after {calibration.rows} rows of {calibration.data}:"
        " `generate(..., details=True)` has it as `probability_right`, and `abstain_below=0.5` gives no other answer."
    )


def prepare(
    source: str | Path,
    *,
    agent: int | None = None,
    merge: Merge | Distillation | None = None,
    base_model: str | None = None,
    device: torch.device | str | None = None,
) -> Export:
    """Open a crowd, and merge its agents if that is asked for.

    Args:
        source, base_model, device: see `open_pretrained`.
        agent: this one alone, not merged.

    Raises:
        BadInput: there is no such crowd or agent, its agents cannot be merged in this way, or one agent alone is to be.
        DamagedCheckpoint, ForeignCheckpoint: see `open_pretrained`.
    """
    if agent is not None and merge is not None:
        raise BadInput("one agent alone cannot be merged", where=f"agent {agent}", hint="leave agent out, or merge")
    saved = open_pretrained(source, device, base_model)
    agents = [Adapter(config, tensors) for config, tensors in zip(saved.configs, saved.agents, strict=True)]
    count = len(agents)
    if isinstance(merge, Distillation):
        return _distilled(saved, merge)
    if merge is not None:
        if merge.method.of_factors and not saved.common_start and count > 1:
            raise _no_common_start(merge)
        adapter = merged(saved.base.model, agents, merge)
        title = f"{count} LoRA agents merged by `{merge.name}`"
        what = f"This LoRA adapter of rank {adapter.rank} merges {count} agents: {_details(merge, count)}."
        return Export(saved, merge.name, adapter, title, what)
    if agent is None:
        return Export(saved, "crowd", None, "", "")
    if (name := f"agent{agent}") not in saved.names:
        there = ", ".join(saved.names) if saved.names != default_names(count) else f"0 to {count - 1}"
        raise BadInput(f"there is no agent {agent}", where="--agent", hint=f"{there}: there are {count}")
    title = f"Agent {agent} of {count}"
    what = f"This LoRA adapter is agent {agent} of {count} that were trained together."
    return Export(saved, name, agents[saved.names.index(name)], title, what)


def _distilled(saved: Pretrained, how: Distillation) -> Export:
    if saved.run_config is None:
        raise BadInput(
            "no run trained these agents, so there are no rows to distil on",
            where=f"--merge {DISTILLED}",
            hint="take the run or one of its checkpoints; or --merge svd, which needs no rows",
        )
    student, control = distil(saved, parse_config(saved.run_config, "config.yaml"), how)
    title = f"{saved.settings.num_agents} LoRA agents distilled into one"
    what = f"This LoRA adapter of rank {student.rank} learned the distributions of {saved.settings.num_agents} agents."
    return Export(saved, DISTILLED, student, title, what, {CONTROL: control})


def _no_common_start(merge: Merge) -> ModelError:
    return ModelError(
        "the agents began with different random weights, and so the mean of their A times the mean of their B is not"
        " the mean of their products",
        where=f"--merge {merge.name}",
        hint="--merge cat and --merge svd take the mean of the products B A instead; for a common start, train with"
        " initialize_adapters_rand=false lora_dropout=0.1, or with init_from=ONE_ADAPTER",
    )


def _details(merge: Merge, count: int) -> str:
    parts = [merge.method.does]
    if merge.weights:
        parts.append("with the weights " + ", ".join(f"{share:.3g}" for share in merge.shares(count)))
    if merge.density:
        parts.append(f"density {merge.density:g}")
    return ", ".join(parts)


def _peft_files(adapter: Adapter) -> dict[str, bytes]:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    return {
        "adapter_config.json": json.dumps(dict(adapter.config), indent=2).encode(),
        "adapter_model.safetensors": safetensors.torch.save(tensors, {"format": "pt"}),
    }
