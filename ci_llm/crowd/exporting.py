"""The export of a saved crowd: all agents, one of them, or a merge, as PEFT folders, as a GGUF file or within the base.

A merge is scored beside the crowd and its agents, teacher-forced, on the rows of the run's evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from ci_llm.base.gguf import gguf_file
from ci_llm.base.load import auto_class, load_architecture, load_base, stored_dtype
from ci_llm.base.quantized import stored_quantization
from ci_llm.config import Config
from ci_llm.core.durable import new_folder, write_new
from ci_llm.core.measures import measures_of
from ci_llm.crowd.adapter_files import Adapter, require_convertible, settings_of, write_gguf_adapter
from ci_llm.crowd.card import ADAPTER, MODELFILE, CardFacts, Kind, adapter_card, crowd_card, public_name
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.distilling import CONTROL, distil
from ci_llm.crowd.merging import DISTILLED, METHODS, Distillation, Merge, merge_into_base, merged
from ci_llm.crowd.pretrained import Pretrained, class_names, default_names, open_pretrained, require_free, write_crowd
from ci_llm.crowd.scoring import score
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.batches import in_order, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import tokenizer_files
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import unit_of, without_end
from ci_llm.distributed.precision import DTYPES
from ci_llm.errors import BadInput, CheckpointError, DataError, ModelError
from ci_llm.lora.heads import pad_of, require_class
from ci_llm.lora.passes import distance, tolerance
from ci_llm.lora.settings import LoraSettings
from ci_llm.objectives import BY_ROWS, measured_as

#: The name of the written folder among the scores.
FOLDER: Final = "the folder"


@dataclass(frozen=True)
class Comparison:
    """Scores by name: the agents, the crowd, and a merge if there is one.

    Attributes:
        rows: the number of rows that were scored.
        trained_on: how many of them were trained on: none, some or all.
        scores: (exact match, NLL): the share of rows whose whole solution greedy decoding reproduces, for heads of
            right classes or pairs; and nats per target token, for heads the loss of a row.
        objective: the objective of their training; see `measured_as`.
    """

    rows: int
    trained_on: str
    scores: Mapping[str, tuple[float, float]]
    objective: str = "sft"

    def table(self) -> str:
        """A table for people; the agents' mean stands before the crowd."""
        words = measures_of(self.objective)
        right = words.right if self.objective != "regression" else ""
        width = max(10, len(words.nll) + 2)
        lines = [f"{'':<16}{right:>12}{words.nll:>{width}}"]
        agents = [found for name, found in self.scores.items() if name.startswith("agent")]
        exact_mean, nll_mean = map(fmean, zip(*agents, strict=True))
        shown = [*self.scores.items()]
        shown.insert([*self.scores].index("crowd"), ("agents, mean", (exact_mean, nll_mean)))
        for title, (exact, nll) in shown:
            lines.append(f"{title:<16}{f'{exact:.3f}' if right else '':>12}{nll:>{width}.4f}")
        but = "" if self.trained_on == "none" else f", of which {self.trained_on} were trained on"
        measured = "whole solutions, teacher-forced" if words.right == "exact match" else "scored by heads"
        lines.append(f"{self.rows} rows of the run's evaluation{but}: {measured}")
        if CONTROL in self.scores and self.scores[DISTILLED][1] >= self.scores[CONTROL][1]:
            lines.append(f"{DISTILLED} is not better than its control, {CONTROL}: it gains nothing from the crowd")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The scores for scripts."""
        scores = {name: {"exact_match": exact, "nll": nll} for name, (exact, nll) in self.scores.items()}
        return {"rows": self.rows, "rows_trained_on": self.trained_on, **scores}

    def about_folder(self, name: str) -> str | None:
        """A line on the folder's scores and their distance from those of adapter `name`; None without scores."""
        if FOLDER not in self.scores:
            return None
        (exact, nll), (_, before) = self.scores[FOLDER], self.scores[name]
        but = f", {nll - before:+.4f} beside {name} above" if round(nll - before, 4) else ""
        return f"{FOLDER}: exact match {exact:.3f}, NLL {nll:.4f}, as Transformers opens it{but}"


def _rows(config: Config, saved: Pretrained) -> TokenizedRows:
    try:
        return saved.tokenized(load_rows(config, "eval"), config)
    except DataError as error:
        hint = "--no-score exports without the scores"
        raise DataError(f"no scores: {error.what}", where=error.where, hint=hint) from error


def _scores(crowd: Crowd, rows: TokenizedRows, config: Config) -> list[tuple[float, float]]:
    """(exact match, NLL) of each agent and of the crowd, whose base is free again afterwards."""
    crowd.base_model.choose_route()
    try:
        scores = score(crowd, in_order(rows, 4 * config.batch_size), config.aggregator)
    finally:
        crowd.detach()
    assert scores is not None  # no stop function was given
    return [*zip(scores.exact_match, scores.mean_nll, strict=True)]


@dataclass(frozen=True)
class Export:
    """An export that can be scored and written.

    Attributes:
        name: "crowd", "agent2", or the name of a merge.
        adapter: the adapter to write; None to write all agents.
        title, what: the title of the card, and its first sentence.
        beside: further adapters by name, which are scored and not written.
    """

    saved: Pretrained
    name: str
    adapter: Adapter | None
    title: str
    what: str
    beside: Mapping[str, Adapter] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the adapters that will be written."""
        return [self.adapter.rank] if self.adapter else [adapter.rank for adapter in self.saved.agents]

    def scores(self) -> Comparison:
        """The scores of agents, crowd and merge; the base has no agents on it before and after the call.

        Raises:
            DataError: the rows are not found any more.
        """
        saved, config = self.saved, self.saved.config
        assert config is not None
        rows = _rows(config, saved)
        scores = dict(zip([*saved.names, "crowd"], _scores(Crowd.of(saved), rows, config), strict=True))
        merge = {} if self.adapter is None or self.name.startswith("agent") else {self.name: self.adapter}
        for name, adapter in {**merge, **self.beside}.items():
            alone = Crowd(
                saved.base.model, settings_of(saved.base.model, [adapter]), saved.base.name, saved.base.pad_id
            )
            alone.agents[0].load_state_dict(adapter.tensors, name)
            scores[name] = _scores(alone, rows, config)[0]
        objective = BY_ROWS[rows.rows.form.kind] if config.objective == "auto" else measured_as(config)
        return Comparison(len(rows), rows.rows.trained_on, scores, objective)

    def require_form(self, kind: Kind) -> None:
        """Refuse a form in which these agents cannot be written.

        Raises:
            ModelError: they have heads, or llama.cpp's layout of this base is not known.
        """
        if kind != "adapter" and self.saved.settings.outputs:
            what = "agents with heads are neither merged into the base nor made a GGUF file"
            where = "--into-base" if kind == "model" else "--format gguf"
            raise ModelError(what, where=where, hint="export them as PEFT folders")
        if kind == "gguf":
            require_convertible(self.saved.base.model.config)

    def write(
        self, target: Path, scores: Comparison | None, kind: Kind = "adapter", dtype: str | None = None
    ) -> Comparison | None:
        """Write the export as `target`, completely or not at all.

        Args:
            scores: the scores for the card.
            kind: a PEFT folder, for each agent if there is no adapter; an adapter for llama.cpp and Ollama; or a model
                of Transformers with merged weights, after which the base cannot be used.
            dtype: the dtype of merged weights; None for that of the base on disk.

        Returns:
            `scores`, and of a model also those of the written folder.

        Raises:
            ModelError: `target` exists, or `require_form` refuses the form.
            CheckpointError: it cannot be written.
        """
        require_free(target)
        self.require_form(kind)
        if self.saved.settings.outputs:
            _require_same_scores(self.saved)
        if self.adapter is None:
            assert kind == "adapter", "the others are forms of one adapter"
            self._write_agents(target, scores)
            return scores
        named = self.saved.config and gguf_file(self.saved.config.model_name)
        of_base = named.name if named else "base.gguf"
        if kind == "gguf":
            files = {MODELFILE: f"FROM ./{of_base}\nADAPTER ./{ADAPTER}\n".encode()}
        else:
            files = tokenizer_files(self.saved.prompter.tokenizer) | ({} if kind == "model" else self.adapter.files())
        try:
            with new_folder(target) as draft:
                for name, data in files.items():
                    write_new(draft / name, [data])
                if kind == "gguf":
                    write_gguf_adapter(draft / ADAPTER, self.adapter, self.saved.base.model.config)
                elif kind == "model":
                    scores = self._write_whole(draft, self.adapter, scores, dtype)
                card = adapter_card(self._facts(scores), self.title, self.what, kind, of_base)
                write_new(draft / "README.md", [card.encode()])
        except OSError as error:
            raise CheckpointError(f"{target.name} cannot be written: {error}", where=str(target)) from error
        return scores

    def _write_agents(self, target: Path, scores: Comparison | None) -> None:
        saved = self.saved
        each = [*zip(saved.names, saved.agents, strict=True)]
        tensors = {f"{name}/adapter_model": adapter.tensors for name, adapter in each}
        configs = {f"{name}/adapter_config": adapter.config for name, adapter in each}
        write_crowd(
            target,
            {**tensors, **configs},
            {**saved.meta, "base_model_name_or_path": saved.base.name},
            tokenizer_files(saved.prompter.tokenizer),
            step=saved.step,
            card=crowd_card(self._facts(scores)).encode(),
            calibration=saved.calibration,
        )

    def _write_whole(
        self, draft: Path, adapter: Adapter, scores: Comparison | None, dtype: str | None
    ) -> Comparison | None:
        device, name = self.saved.base.model.device, self.saved.base.name
        written = DTYPES[dtype] if dtype else stored_dtype(name)
        model = merge_into_base(self._dense_base(), adapter).to(written)
        # This program reads the base without a cache of keys and values; users of the model want its own setting.
        model.config.use_cache = getattr(load_architecture(name), "use_cache", True)
        model.save_pretrained(draft)
        model.to("meta")  # so that memory holds one base, and not two
        config = self.saved.config
        if scores is None or config is None:
            return scores
        base = load_base(str(draft), next(key for key, value in DTYPES.items() if value == written), device)
        untrained = Crowd(base.model, LoraSettings(num_agents=1, rank=1), base.name, base.pad_id)  # adds zeros
        own = _scores(untrained, _rows(config, self.saved), config)[0]
        return replace(scores, scores={**scores.scores, FOLDER: own})

    def _dense_base(self) -> PreTrainedModel:
        """The base to merge into, in fp32 or fp64, because 16 bits would round a part of the adapter away.

        A base in 16 bits or quantised is loaded again, into the memory of the host: a GPU that holds it in fewer bits
        may be too small.
        """
        saved, loaded = self.saved, self.saved.base.model
        is_dense = stored_quantization(loaded.config) is None
        if is_dense and loaded.dtype in (torch.float32, torch.float64):
            return loaded
        if is_dense:
            loaded.to("meta")  # so that memory holds one base, and not two
        model = load_base(saved.base.name, "fp32", torch.device("cpu")).model
        if stored := stored_quantization(model.config):
            raise ModelError(
                f"the files of the base are quantised ({stored}), and an adapter is merged into dense weights only",
                where=f"base model: {public_name(saved.base.name)}",
                hint="export without --into-base",
            )
        return model

    def _facts(self, scores: Comparison | None) -> CardFacts:
        saved = self.saved
        trained = ""
        if saved.config is not None:
            names = saved.config.all_dataset_names
            trained = f" for {saved.step} optimizer steps on `{', '.join(map(public_name, names))}`"
        return CardFacts(
            base=saved.base.name,
            ranks=self.ranks,
            agents=saved.names,
            trained=trained,
            scores=scores.table() if scores else "",
            notes=[_note(saved.calibration)] if saved.calibration and self.adapter is None else [],
            opened_with=auto_class(saved.base.model.config).__name__,
            num_labels=saved.settings.outputs,
            classes=class_names(saved.meta.get("head", {})),
        )


def _note(calibration: Calibration) -> str:
    if calibration.aggregator == "heads":
        told = f"{calibration.temperature:.3g}, after {calibration.rows} rows of {calibration.data}"
        return f"`calibration.json` has the temperature of the crowd's probabilities: {told}. `score` takes it."
    return (
        f"`calibration.json` says how probably an answer is right, after {calibration.rows} rows of {calibration.data}:"
        " `generate(..., details=True)` has it as `probability_right`, and `abstain_below=0.5` gives no other answer."
    )


#: The number of tokens of the trial's text.
_TOKENS: Final = 12


@torch.no_grad()
def _require_same_scores(saved: Pretrained) -> None:
    """Refuse agents whose scores in plain PEFT differ from the crowd's, by a trial on one row.

    Raises:
        ModelError: the family has no class for sequence classification, or an agent's scores differ.
    """
    require_class(saved.base.model)
    if stored_quantization(saved.base.model.config):
        return  # its layers cannot be shared with PEFT, and do not change where Transformers pools
    crowd = Crowd.of(saved)
    crowd.base_model.choose_route()
    try:
        vocabulary = saved.base.model.get_input_embeddings().weight.shape[0]
        pad = pad_of(saved.base.model.config, saved.prompter.tokenizer)
        ids = torch.randint(0, vocabulary, (_TOKENS,), generator=torch.Generator().manual_seed(0))
        row = without_end(Example(ids.numpy().astype(np.int32), np.zeros(_TOKENS, bool)), pad)
        batch = pack([unit_of([row])], [0]).to(crowd.device)
        values = crowd(batch).values
        for k, name in enumerate(crowd.names):
            plain = crowd[k](input_ids=batch.input_ids[None]).logits
            if distance(values[k], plain) > tolerance(saved.base.model.dtype, plain.dtype):
                raise ModelError(
                    f"plain PEFT would score texts otherwise than {name}: {plain.tolist()}, not {values[k].tolist()}",
                    where=saved.source,
                    hint="use the run by ci-llm score and Crowd.score",
                )
    finally:
        crowd.detach()


def prepare(
    source: str | Path,
    *,
    agent: int | None = None,
    merge: Merge | Distillation | None = None,
    base_model: str | None = None,
    device: torch.device | str | None = None,
) -> Export:
    """Open a crowd, and merge its agents on request.

    Args:
        source, base_model, device: see `open_pretrained`.
        agent: export this agent alone; None for all agents, or their merge.
        merge: the merge to make; None with an agent.

    Raises:
        BadInput: there is no such crowd or agent.
        ModelError: the agents cannot be merged in this way.
        DamagedCheckpoint, ForeignCheckpoint: see `open_pretrained`.
    """
    saved = open_pretrained(source, device, base_model)
    if saved.settings.outputs and merge is not None:
        raise ModelError(
            "agents with heads are not merged: no single head gives the mean of their scores",
            where="--merge",
            hint="export all of them, or one by --agent",
        )
    agents, count = saved.agents, len(saved.agents)
    if isinstance(merge, Distillation):
        return _distilled(saved, merge)
    if merge is not None:
        if merge.name == "mean" and not saved.common_start and count > 1:
            raise ModelError(
                "the agents began with different random weights, and so the mean of their A times the mean of their B"
                " is not the mean of their products",
                where=f"--merge {merge.name}",
                hint="--merge cat and --merge svd take the mean of the products B A instead; for a common start, train"
                " with initialize_adapters_rand=false lora_dropout=0.1, or with init_from=ONE_ADAPTER",
            )
        adapter = merged(saved.base.model, agents, merge)
        shares = ", ".join(f"{share:.3g}" for share in merge.shares(count))
        how = METHODS[merge.name] + (f", with the weights {shares}" if merge.weights else "")
        what = f"This LoRA adapter of rank {adapter.rank} merges {count} agents: {how}."
        return Export(saved, merge.name, adapter, f"{count} LoRA agents merged by `{merge.name}`", what)
    if agent is None:
        return Export(saved, "crowd", None, "", "")
    name = f"agent{agent}"
    if name not in saved.names:
        there = ", ".join(saved.names) if saved.names != default_names(count) else f"0 to {count - 1}"
        raise BadInput(f"there is no agent {agent}", where="--agent", hint=f"{there}: there are {count}")
    title = f"Agent {agent} of {count}"
    what = f"This LoRA adapter is agent {agent} of {count} that were trained together."
    return Export(saved, name, agents[saved.names.index(name)], title, what)


def _distilled(saved: Pretrained, how: Distillation) -> Export:
    if saved.config is None:
        raise BadInput(
            "no run trained these agents, so there are no rows to distil on",
            where=f"--merge {DISTILLED}",
            hint="take the run or one of its checkpoints; or --merge svd, which needs no rows",
        )
    student, control = distil(saved, saved.config, how)
    title = f"{saved.settings.num_agents} LoRA agents distilled into one"
    what = f"This LoRA adapter of rank {student.rank} learned the distributions of {saved.settings.num_agents} agents."
    return Export(saved, DISTILLED, student, title, what, {CONTROL: control})
