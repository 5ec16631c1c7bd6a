"""Import: existing PEFT adapters become the agents of one crowd, committed as a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.crowd.base import load_base
from ci_llm.crowd.external_adapters import ExternalAdapter, read_adapters
from ci_llm.crowd.lora import LoraSettings
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.pretrained import require_free
from ci_llm.crowd.prompts import Prompter
from ci_llm.crowd.recognise import META
from ci_llm.crowd.targets import peft_targets
from ci_llm.errors import ModelError


def import_crowd(sources: Sequence[Path], target: Path, base_model: str | None = None) -> Crowd:
    """Make the adapters of one or more folders the agents of one crowd, and commit it as `target`.

    Args:
        sources: folders that `read_adapters` can read; the agents are numbered in this order.
        target: folder of the new checkpoint, which must not exist.
        base_model: hub id or folder of the base; by default the one that the adapters name.

    Raises:
        ModelError: `target` exists; there is no adapter; adapters differ in rank, scale, modules or base; or the base
            is not found.
        ForeignCheckpoint: an adapter does not fit the base.
        CheckpointError: `target` cannot be written.
    """
    require_free(target)
    adapters = [adapter for source in sources for adapter in read_adapters(source)]
    _require_alike(adapters)
    base = load_base(base_model or _base_name(adapters))
    targets = peft_targets(base.model, adapters[0].modules)
    settings = LoraSettings(
        num_agents=len(adapters),
        rank=adapters[0].rank,
        alpha=adapters[0].alpha,
        dropout=adapters[0].dropout,
        use_rslora=adapters[0].use_rslora,
        target_modules=tuple(targets["target_modules"]),
        layers=tuple(targets.get("layers_to_transform", ())) or "all",
    )
    crowd = Crowd(base.model, settings, base.name, base.pad_id)
    crowd.prompter = Prompter(base.tokenizer, adapters[0].prompts)
    for k, adapter in enumerate(adapters):
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    state = {**crowd.adapter_files(), META: crowd.meta(base.fingerprint)}
    write_checkpoint(target, state, info={"imported_from": [str(source.absolute()) for source in sources]})
    return crowd


def _require_alike(adapters: Sequence[ExternalAdapter]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        odd = [
            f"{name} {getattr(first, name)} and {getattr(adapter, name)}"
            for name in ("rank", "alpha", "use_rslora")
            if getattr(first, name) != getattr(adapter, name)
        ]
        if adapter.modules != first.modules:
            odd.append(f"adapted modules ({len(first.modules)} and {len(adapter.modules)})")
        if odd:
            raise ModelError(
                f"adapters that are imported together have the same shape, and these two differ in {', '.join(odd)}",
                where=f"{first.source}, {adapter.source}",
                hint="import adapters of one shape; init_from with `agents:` starts from adapters of different shapes",
            )


def _base_name(adapters: Sequence[ExternalAdapter]) -> str:
    names = sorted({adapter.base_name for adapter in adapters if adapter.base_name})
    if len(names) == 1:
        return names[0]
    raise ModelError(
        f"the adapters name different bases: {', '.join(names)}" if names else "the adapters do not name their base",
        where=str(adapters[0].source),
        hint="give it: --base-model NAME_OR_FOLDER, the base they were trained on",
    )
