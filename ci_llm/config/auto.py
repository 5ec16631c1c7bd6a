"""The values that `auto` stands for, and why: rates, ranks and lengths follow the base, and rates what is learned.

The shape of an adapter to start from comes before that. What can be said only of loaded rows is left `auto` here:
`run/start/loading.py` decides it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ci_llm.config.schema import AllKeys

AUTO: Final = "auto"
EMBEDDED: Final = "embedded"
#: The keys that decide what auto stands for.
FOLLOWED: Final = ("model_name", "dataset_name")
#: Objectives with a head, which is new and has to be learned.
_HEADS: Final = ("reward", "classification", "regression")


def settled(c: AllKeys) -> dict[str, tuple[Any, str]]:
    """The keys that say auto for all agents, each with what it stands for, and why."""
    given = c.model_fields_set.union(*c.agents)
    return {key: found for key, found in stands_for(c).items() if getattr(c, key) == AUTO or key not in given}


def stands_for(c: AllKeys) -> dict[str, tuple[Any, str]]:
    """What auto stands for, and why, by key; a reason that is empty need not be told."""
    return {key: (value, why) for key, value, why in (*_rules(c), *_of_adapters(c))}


def _of_adapters(c: AllKeys) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why) of the shape that the adapters of `init_from` have in common; nothing without a plain one."""
    folder = Path(c.init_from or "")
    files = [folder / "adapter_config.json"] if c.init_from else []
    files = files if not files or files[0].is_file() else sorted(folder.glob("agent*/adapter_config.json"))
    shapes = [*map(_shape_of, files)]
    if shapes and all(shape == shapes[0] for shape in shapes):
        for key, value in shapes[0].items():
            yield key, value, "of the adapters in init_from"


def _shape_of(file: Path) -> dict[str, Any]:
    """The keys of a shape that an adapter says in the words of a configuration; one that cannot be is refused later."""
    shape: dict[str, Any] = {}
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        for key, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
            if float(said[name]).is_integer():
                shape[key] = int(said[name])
        shape["use_rslora"] = bool(said.get("use_rslora"))
        for key, name in (("lora_target_modules", "target_modules"), ("agent_layers", "layers_to_transform")):
            if isinstance(said.get(name), list) and said[name]:
                shape[key] = tuple(sorted(said[name]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # who loads the adapters says so, with the place
        return {}
    return shape


def _rules(c: AllKeys) -> Iterator[tuple[str, Any, str]]:
    """(key, value, why) of every key that may say auto."""
    on_embedded = c.model_name == EMBEDDED
    why = "usual for LoRA; a small base often takes a higher rate, which a sweep finds"
    # Ten times TRL's rates, which are for all weights of a model; that of grpo was measured (benchmarks/README.md).
    rate = {AUTO: 2e-4, "sft": 2e-4, "grpo": 1e-4, **dict.fromkeys(_HEADS, 1e-3)}.get(c.objective, 1e-5)
    if on_embedded:
        why = "measured on the embedded base"
        rate = 8e-3 if c.objective in (AUTO, "sft") else 1e-3
    yield "learning_rate", rate, why
    yield "lora_rank", 8 if on_embedded else 16, why
    yield "lora_alpha", 16 if on_embedded else 32, why
    yield "max_seq_length", 256 if on_embedded else AUTO, why if on_embedded else "the longest row"
    counted = "at most, as far as there are rows: evaluations read a third of what training does, or 50 rows"
    yield "eval_samples", 400 if on_embedded else AUTO, why if on_embedded else counted
    yield "beta", 0.0 if c.objective == "grpo" else 0.1, ""
    yield "max_completion_length", AUTO, ""  # by the prompts
    yield "objective", AUTO, ""  # by the columns
    yield "max_new_tokens_eval", AUTO, ""  # by the references that are asked for
