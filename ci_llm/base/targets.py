"""The choice of the modules that carry agents, by PEFT's rules, without those whose weight the base's code reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, Literal, NoReturn

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.config.parsing import nearest
from ci_llm.errors import ModelError

#: A choice of layers of the base: all, the upper half, or numbers from 0 on.
Layers = Literal["all", "upper_half"] | tuple[int, ...]


def text_model(model: nn.Module) -> nn.Module:
    """The base without its head; for a multimodal base its language model alone."""
    whole = getattr(model, "base_model", model)
    found: nn.Module = getattr(whole, "language_model", whole)
    return found


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by name; for a multimodal base its head and the modules of its language model."""
    modules, part = dict(model.named_modules()), text_model(model)
    if part is getattr(model, "base_model", model):
        return modules
    (name,) = (name for name, each in modules.items() if each is part)
    head = model.get_output_embeddings()  # type: ignore[operator]
    return {n: m for n, m in modules.items() if n.startswith(f"{name}.") or m is head}


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every linear layer by name that can carry an adapter, and the head, which cannot."""
    linear = {n: m for n, m in _modules(model).items() if isinstance(m, nn.Linear | Conv1D | QuantizedLinear)}
    parents = {n: model.get_submodule(n.rpartition(".")[0]) for n in linear}
    return {n: m for n, m in linear.items() if _is_product(m) and not _passed_by(parents[n], n)}


def _is_product(layer: nn.Module) -> bool:
    """True if the layer returns the product with its weight and nothing else.

    Some families derive their routers from nn.Linear, and these return more.
    """
    if not type(layer).forward.__module__.startswith("transformers.models."):
        return True
    weight = layer.weight
    assert isinstance(weight, Tensor)
    try:
        found = layer(weight.new_zeros(1, 7, weight.shape[1]))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, 7, weight.shape[0])


def _passed_by(parent: nn.Module, name: str) -> bool:
    """True if the family's code reads the weight of this layer itself, on some device at least.

    The source code is examined, because a forward pass may take another path on a GPU. The agents would then be on
    other layers there, and could not resume from a checkpoint made on a CPU. Reads of a slice do not count: they are
    Bloom's tensor parallelism, which is off.
    """
    child = re.escape(name.rpartition(".")[2])
    kind: Any = type(parent)
    return re.search(rf"\bself\.{child}\.weight\b(?!\[|\.(dtype|device|shape)\b)", _code(kind)) is not None


@cache
def _code(kind: Any) -> str:
    own = [ancestor for ancestor in kind.__mro__ if ancestor.__module__.startswith("transformers.models.")]
    return "".join(map(inspect.getsource, own))


def find_targets(model: PreTrainedModel, wanted: str | tuple[str, ...], layers: Layers = "all") -> list[str]:
    """The names of the modules to adapt.

    Args:
        wanted: by PEFT's rules a list of suffixes, a regular expression, or "all-linear".
        layers: adapt only modules in these layers, as with PEFT's `layers_to_transform`.

    Raises:
        ModelError: nothing matches, or a module matches that cannot carry an adapter.
    """
    found = _matching(model, wanted)
    return found if layers == "all" else _within(model, found, layers)


def _within(model: PreTrainedModel, names: Collection[str], layers: Layers) -> list[str]:
    """The names of those modules that are in these layers."""
    count = len(layer_list(model)[1])
    chosen = range(count // 2, count) if layers == "upper_half" else layers
    numbers = layer_numbers(model, names)
    found = [name for name, number in numbers.items() if number in chosen]
    absent = sorted({*chosen} - {*range(count)})
    if absent or not found:
        there = f"has layers 0 to {count - 1}, and no layer {absent[0]}" if absent else "has no adapter in these layers"
        raise ModelError(
            f"{type(model).__name__} {there if count else 'has no list of layers'}",
            where=f"agent_layers: {layers if isinstance(layers, str) else list(layers)}",
            hint="agent_layers=all, or layers that lora_target_modules names something in",
        )
    return found


def _matching(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> list[str]:
    linear = linear_layers(model)
    head = model.get_output_embeddings()
    matches: Callable[[str], bool]
    if wanted == "all-linear":
        everything = [n for n, m in linear.items() if m is not head]
        if not everything:
            raise ModelError(
                f"{type(model).__name__} has no layer that could carry an adapter",
                where="lora_target_modules: all-linear",
                hint="choose another base",
            )
        return everything
    if isinstance(wanted, str):
        pattern = re.compile(wanted)
        matches = lambda name: pattern.fullmatch(name) is not None  # noqa: E731
    else:
        matches = lambda name: any(name == w or name.endswith(f".{w}") for w in wanted)  # noqa: E731
    found = [n for n in _modules(model) if matches(n)]
    odd = [n for n in found if n not in linear or linear[n] is head]
    if odd or not found:
        offered = sorted({n.rpartition(".")[2] for n, m in linear.items() if m is not head})
        problem = f"matches {odd[0]}, which cannot carry an adapter" if odd else "matches nothing in this model"
        raise ModelError(
            f"lora_target_modules {problem}",
            where=f"lora_target_modules: {wanted if isinstance(wanted, str) else list(wanted)}",
            hint=f"choose from {', '.join(offered)}, or all-linear",
        )
    return found


def absent_targets(model: nn.Module, wanted: str | tuple[str, ...]) -> str:
    """The wanted suffixes that no module of the model has, for people; empty if each has one.

    PEFT passes over them, and a list for several families may hold some; but one may be a slip.
    """
    names = [name for name, _ in model.named_modules()]
    ends = {name.rpartition(".")[2] for name in names}
    absent = [] if isinstance(wanted, str) else [w for w in wanted if not any(f".{n}".endswith(f".{w}") for n in names)]
    meant = [f"{name} (did you mean {near}?)" if (near := nearest(name, ends)) else name for name in absent]
    return f"this model has no {', no '.join(meant)}; no agent adapts it" if absent else ""


def layer_list(model: nn.Module) -> tuple[str, Sequence[nn.Module]]:
    """The name and the layers of the base: its list of modules with the most parameters."""
    lists = {name: each for name, each in _modules(model).items() if isinstance(each, nn.ModuleList)}
    sizes = {name: sum(parameter.numel() for parameter in each.parameters()) for name, each in lists.items()}
    if not any(sizes.values()):
        return "", ()
    name = max(sizes, key=sizes.__getitem__)
    return name, [*lists[name]]


def layer_numbers(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """The number of the layer of each module; modules outside of the layers are left out."""
    number = re.compile(rf"{re.escape(layer_list(model)[0])}\.(\d+)\.")
    found = {name: number.match(name) for name in names}
    return {name: int(match[1]) for name, match in found.items() if match}


def peft_targets(model: nn.Module, wanted: Collection[str]) -> dict[str, Any]:
    """The shortest entries of a PEFT configuration that mean exactly these modules.

    `target_modules` is a list of suffixes, because some readers of PEFT's files know neither "all-linear" nor patterns.
    If the suffixes alone would mean more, `layers_to_transform` and `layers_pattern` limit them. If that is not enough,
    the list has whole names.
    """
    last = {name.rpartition(".")[2] for name in wanted}
    reached = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    if reached == {*wanted}:
        return {"target_modules": sorted(last)}
    layers = {*layer_numbers(model, wanted).values()}
    # PEFT knows layers by the last word of their list, which a vision tower has too.
    alike = {name for name, number in layer_numbers(model, reached).items() if number in layers}
    if reached <= {*_modules(model)} and alike == {*wanted}:
        pattern = layer_list(model)[0].rpartition(".")[2]
        return {"target_modules": sorted(last), "layers_to_transform": sorted(layers), "layers_pattern": pattern}
    return {"target_modules": sorted(wanted)}


class WeightMetadata:
    """A stand-in for the weight of an adapted layer: a base may read its dtype, device and shape, and nothing else.

    Some bases multiply by a layer's weight themselves, and agents on that layer would then have no effect. So any other
    access raises an error.
    """

    def __init__(self, weight: Tensor, name: str) -> None:
        self.dtype, self.device, self.shape, self._name = weight.dtype, weight.device, weight.shape, name

    def _refuse(self, *_: Any) -> NoReturn:
        raise ModelError(
            f"the base reads the weight of {self._name} itself, past the agents on that layer",
            where="lora_target_modules",
            hint=f"name the layers to adapt, and leave {self._name.rpartition('.')[2]} out",
        )

    __getattr__ = __getitem__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._refuse()
