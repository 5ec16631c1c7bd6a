"""Frozen linear layers in 4 or 8 bits: bitsandbytes quantises and stores them, and this module computes the products.

The forward passes of bitsandbytes are not used. On a CPU its 4-bit layer packs its weight for inference at the first
pass in evaluation mode, and later training passes have the right loss and wrong gradients. Here one dequantisation also
serves all K agents.

NF4 and double quantisation: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023. Row-wise int8:
Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022; without its outliers, since
the weights are dequantised before each product.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_bitsandbytes_available

from ci_llm.errors import ConfigError, ModelError

Quantization = Literal["nf4", "int8"]

#: The classes of bitsandbytes that are replaced, by name: the library is imported only where a base needs it.
_STORED_BY: Final = {"Linear4bit": "nf4", "Linear8bitLt": "int8"}

_STORED: Final = ("nf4", "fp4", "int8")

BITS: Final[dict[Quantization, int]] = {"nf4": 4, "int8": 8}

_DENSE_PARAMETERS: Final = ("Parameter", "FakeTensor", "DTensor")


def quantized_loading(
    wanted: Quantization | None, stored: str | None, model_name: str, device: torch.device | str
) -> dict[str, Any]:
    """The arguments with which Transformers' `from_pretrained` loads a quantised base; none for a dense one.

    Args:
        wanted: the key `quantization`.
        stored: the quantisation of the checkpoint, see `stored_quantization`.

    Raises:
        ConfigError: bitsandbytes is missing, or the checkpoint is quantised in another way.
    """
    if stored not in (None, *_STORED):
        raise _unknown_storage(model_name, f"the base is quantised by {stored}")
    if wanted and stored and wanted != stored:
        raise ConfigError(
            f"the checkpoint is quantised already, as {stored}",
            where=f"quantization: {wanted}",
            hint="leave quantization out, or take the dense checkpoint",
        )
    if not wanted and not stored:
        return {}
    if not is_bitsandbytes_available():
        raise ConfigError(
            "a quantised base needs bitsandbytes, which is not installed",
            where=f"quantization: {wanted or stored}",
            hint="pip install 'ci-llm[quantization]'",
        )
    if stored:
        return {"device_map": {"": device}}
    config = BitsAndBytesConfig(
        load_in_4bit=wanted == "nf4",
        load_in_8bit=wanted == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
    )
    return {"device_map": {"": device}, "quantization_config": config}


def stored_quantization(config: PreTrainedConfig) -> str | None:
    """The quantisation of a checkpoint: nf4, fp4, int8, the name of another method, or None for dense weights."""
    found: Any = getattr(config, "quantization_config", None)
    if not found:
        return None
    values: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if not method.startswith("bitsandbytes"):
        return method
    return "int8" if values.get("load_in_8bit") else str(values.get("bnb_4bit_quant_type", "fp4"))


def stored_bytes(quantization: Quantization, out_features: int, in_features: int) -> int:
    """Bytes of a quantised weight with its scales."""
    if quantization == "int8":
        return out_features * (in_features + 4)
    # 64 numbers share a scale of one byte, and 256 of these scales share one of four bytes.
    numbers = out_features * in_features
    return numbers // 2 + -(-numbers // 64) + 4 * -(-numbers // (64 * 256))


class QuantizedLinear(nn.Module):
    """y = x Wᵀ + b with W frozen and stored in 4 or 8 bits.

    Args:
        layer: a quantised layer of bitsandbytes, which this one replaces and takes the storage from.

    Attributes:
        stored: the numbers in the form of bitsandbytes; a sharded layer has all of them only during a pass.
        stored_rows: how many rows the whole `stored` has.
        quant_state: scales and code of 4 bits; None for int8.
    """

    scale: Tensor  # of int8: the largest absolute value of each row, [out]

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.in_features: int = layer.in_features
        self.out_features: int = layer.out_features
        self.stored: Any = layer.weight
        self.stored.requires_grad_(False)
        self.stored_rows: int = getattr(layer, "stored_rows", len(self.stored))
        self._own_state: Any = None
        self.bias = layer.bias
        self._is_int8 = _STORED_BY[type(layer).__name__] == "int8"
        if self._is_int8:
            moved = self.stored.SCB is None  # the first pass through the layer moves it
            self.register_buffer("scale", layer.state.SCB if moved else self.stored.SCB)

    @property
    def quant_state(self) -> Any:
        return self._own_state or getattr(self.stored, "quant_state", None)

    def release_codes(self) -> Tensor:
        """Remove and return the numbers, so that shards of them can take their place; the scales stay."""
        self._own_state, numbers = self.quant_state, self.stored.data
        shape = (self.stored_rows, *numbers.shape[1:])
        self.stored = nn.Parameter(torch.empty(shape, dtype=numbers.dtype, device="meta"), requires_grad=False)
        return numbers  # type: ignore[no-any-return]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`, computed at each call."""
        if self._is_int8:
            weight: Tensor = self.stored.data * (self.scale[:, None] / 127)  # the largest value is stored as 127
            return weight.to(dtype)
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(self.stored.data, self.quant_state)
        return weight.to(dtype)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] in its precision before quantisation, for code that reads it directly.

        A sharded layer has numbers during a pass only, and otherwise returns NaN with the right dtype and device.
        """
        dtype: torch.dtype = self.scale.dtype if self._is_int8 else self.quant_state.dtype
        if hasattr(self.stored, "full_tensor"):
            nan = torch.full((), float("nan"), dtype=dtype, device=self.stored.device)
            return nan.expand(self.out_features, self.in_features)
        return self.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x.to(dtype), self)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """x Wᵀ + b for a layer without agents; the backward pass dequantises W again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return nn.functional.linear(x, layer.dequantize(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantize(ctx.dtype), None


def keep_part(layer: nn.Module, index: int, count: int) -> None:
    """Make an empty layer of bitsandbytes keep only part `index` of `count` of its weight; others are left alone.

    Loading assigns a whole quantised weight, which is cut here at once, so that no process ever holds all of them.
    """
    from torch.distributed.tensor import Shard  # slow to import

    kind = type(layer)
    if not _is_of_bitsandbytes(layer):
        return

    def assign(self: Any, name: str, value: Any) -> None:
        if name == "weight" and (getattr(value, "quant_state", None) or getattr(value, "SCB", None) is not None):
            size, start = Shard.local_shard_size_and_offset(len(value), count, index)
            self.stored_rows, value.CB = len(value), None
            value.data = value.data.narrow(0, start, size).clone()
        kind.__setattr__(self, name, value)

    layer.__class__ = type(kind.__name__, (kind,), {"__setattr__": assign, "__module__": kind.__module__})


def _is_of_bitsandbytes(layer: nn.Module) -> bool:
    return type(layer).__name__ in _STORED_BY and type(layer).__module__.startswith("bitsandbytes.")


def replace_quantized_layers(model: PreTrainedModel) -> None:
    """Replace every quantised layer of bitsandbytes in `model` by a `QuantizedLinear` on the same storage.

    Raises:
        ModelError: some weights of the base are stored in a form whose gradient would be wrong or missing.
    """
    _refuse_offloaded(model)
    stored = stored_quantization(model.config)
    if stored not in (None, *_STORED):
        raise _unknown_storage(model.name_or_path, f"the base is quantised by {stored}")
    for name, layer in list(model.named_modules()):
        if _is_of_bitsandbytes(layer):
            model.set_submodule(name, QuantizedLinear(layer))
    _refuse_unknown_storage(model)


def _refuse_offloaded(model: PreTrainedModel) -> None:
    """Refuse offloaded weights: Accelerate's hooks load them in the layer's own forward, which agents do not call."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    offloaded = {"disk"} & places or (len(places) > 1 and {"cpu"} & places)
    if offloaded or any(p.is_meta for p in model.parameters()):
        raise ModelError(
            "parts of the base lie on the CPU or the disk and are loaded for each pass (device_map)",
            where=f"model_name: {model.name_or_path}",
            hint="load the base on one device; quantization=nf4 makes it about seven times smaller",
        )


def _refuse_unknown_storage(model: PreTrainedModel) -> None:
    """Refuse layers of unknown storage, which may compute the right loss and a wrong gradient or none."""
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | Conv1D):
            continue
        weight = layer.weight
        if type(weight).__name__ not in _DENSE_PARAMETERS or not weight.is_floating_point():
            raise _unknown_storage(
                model.name_or_path, f"the weight of {name} is stored as {type(weight).__name__} ({weight.dtype})"
            )
    head: Any = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        raise _unknown_storage(model.name_or_path, "the output layer of the base is quantised")


def _unknown_storage(model_name: str, what: str) -> ModelError:
    return ModelError(
        f"{what}: agents would learn from wrong gradients",
        where=f"model_name: {model_name}",
        hint="take the dense checkpoint of this model, with quantization=nf4 or int8 if it must be small",
    )
