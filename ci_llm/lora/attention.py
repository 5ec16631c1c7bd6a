"""Causal attention inside each row of a packed batch, in the fastest way for a device.

Each way is registered with Transformers' attention interface, so that no model code is changed: "varlen" is one call of
flash attention for all rows and agents, "rows" a fused call for each row, and "explicit" plain products, which hold the
scores. `choose_way` tries them on a GPU. A CPU takes "rows", with plain products for short rows.

Legend: R rows of the base's input (agents or 1), H heads, G key/value heads, N packed tokens, T tokens of one packed
row, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from transformers import PreTrainedConfig
from transformers.modeling_utils import AttentionInterface

from ci_llm.core.determinism import generator_for
from ci_llm.core.memory import is_out_of_memory
from ci_llm.errors import ModelError, first_line
from ci_llm.lora.reading import compute_dtype

Way = Literal["varlen", "rows", "explicit"]

EXPLICIT_UP_TO = 320  # on a CPU the fused kernel's backward is slower than the explicit form up to about here
EXPLICIT_IN_HALVES_UP_TO: Final = 512  # the same in bf16, with fast attention
#: How many scores of all heads a prompt and its branches may waste to be one row: about as many as take the time of
#: starting the products of two more rows.
MOST_IN_VAIN: Final = 1 << 17
HALVES: Final = (torch.bfloat16, torch.float16)
#: Not cuDNN, which takes a second to build a plan for every new length, and not the kernel that holds all scores.
FUSED: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
#: Lengths of the trial's rows in tokens: one fills several tiles of a kernel, and the plain products stay small.
TRIAL_LENGTHS: Final = (17, 160, 64)


class Segments:
    """The bounds of packed rows, with the masks and lists that attention derives from them once per pass.

    Args:
        bounds: 0 and the end of every row, in packed tokens.
        before: for every row, how many rows before it its prompt lies, whose keys it reads as well; 0 for a whole row.
            Empty if all rows are whole.
        fast: on a CPU, use plain products also for longer rows in bf16, and for a short prompt with all its branches.
    """

    def __init__(self, bounds: Sequence[int], before: Sequence[int] = (), *, fast: bool = False) -> None:
        self.lengths = [end - start for start, end in pairwise(bounds)]
        self.before = [*before] or [0] * len(self.lengths)
        self.fast = fast
        #: For each row the lengths of what it reads: itself, or a prompt and itself; of a unit prompt and branches.
        self.parts: list[tuple[int, ...]] = [
            (self.lengths[row - back], self.lengths[row]) if back else (self.lengths[row],)
            for row, back in enumerate(self.before)
        ]
        self._units: dict[int, Segments] = {}
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._ends: dict[tuple[Any, ...], Tensor] = {}

    @property
    def totals(self) -> list[int]:
        """How many tokens each row reads."""
        return [sum(parts) for parts in self.parts]

    def mask(self, parts: tuple[int, ...], length: int, window: int | None, like: Tensor) -> Tensor:
        """The additive causal mask [length, T] of the last tokens of a row that reads these parts, T tokens.

        Args:
            parts: the lengths of a prompt and of its branches, each of which attends to itself and the prompt.
            window: how many positions one attends to, itself included; None for all before it.
        """
        key = (parts, length, window, like.dtype, like.device)
        if key not in self._masks:
            seen = _seen(parts, length, window, like.device)
            self._masks[key] = torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, float("-inf"))
        return self._masks[key]

    def in_units(self, heads: int) -> Segments:
        """These segments, with a prompt and its branches joined to one row if they are short and waste few scores."""
        if heads not in self._units:
            bounds, before, parts = [0], list[int](), list[tuple[int, ...]]()
            prompts = [row for row, back in enumerate(self.before) if not back]
            for start, end in pairwise([*prompts, len(self.before)]):
                own, backs, read = self.lengths[start:end], self.before[start:end], self.parts[start:end]
                in_vain = sum(own) ** 2 - sum(length * sum(each) for length, each in zip(own, read, strict=True))
                if end - start > 1 and sum(own) <= EXPLICIT_UP_TO and heads * in_vain <= MOST_IN_VAIN:
                    own, backs, read = [sum(own)], [0], [tuple(own)]
                bounds += [bounds[-1] + each for each in accumulate(own)]
                before += backs
                parts += read
            self._units[heads] = Segments(bounds, before, fast=True)
            self._units[heads].parts = parts
        return self._units[heads]

    def with_prompts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each row's part [R, G, T, D] of keys or values, with its prompt's part before it."""
        pairs = zip(parts, self.before, strict=True)
        return [torch.cat([parts[row - back], own], 2) if back else own for row, (own, back) in enumerate(pairs)]

    def ends(self, copies: int, device: torch.device, *, read: bool = False) -> Tensor:
        """0 and the ends of all copies' rows, one after the other: [copies * rows + 1] int32.

        Args:
            read: count what each row reads, which includes its prompt.
        """
        lengths = self.totals if read else self.lengths
        key = (copies, device, sum(lengths))
        if key not in self._ends:
            ends = torch.tensor([0, *accumulate(lengths * copies)], dtype=torch.int32, pin_memory=device.type == "cuda")
            self._ends[key] = ends.to(device, non_blocking=True)
        return self._ends[key]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    s_aux: Tensor | None = None,
    way: Way = "rows",
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each row of a packed batch.

    Args:
        query: [R, H, N, D]; key and value: [R, G, N, D], G dividing H.
        segments: the packed rows; a keyword argument of the model's forward, which the layers pass on.
        scaling: the factor of the scores; None for 1/√D.
        way: "varlen" falls back to "rows" for what its kernel does not compute: fp32, a soft cap, dropout.

    Returns:
        [R, N, H, D], as the interface requires, and None for the attention weights.

    Raises:
        TypeError: the model does not pass keyword arguments on, limits attention by its mask alone, or uses attention
            sinks. The trial at the start then takes the padded route.
    """
    if segments is None or s_aux is not None:  # the result would silently be wrong
        raise TypeError("packed attention needs `segments` from the model's forward, and supports no attention sinks")
    if not sliding_window and _needs_window(module):  # the rows of the trial may be shorter than the window
        raise TypeError(f"{type(module).__name__} has its window in a mask, and packed attention makes no masks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Cast before the rows are taken apart, and not by autocast for every product of every row.
    query, key, value = (x.to(compute_dtype(x)) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        plain = not (softcap or dropout) and query.dtype in HALVES and value.shape[-1] == query.shape[-1]
        if way == "varlen" and plain:
            return _together(query, key, value, segments, sliding_window, scale), None
        if segments.fast and not query.is_cuda:
            segments = segments.in_units(query.shape[1])
        found = []
        queries, *read = (x.split(segments.lengths, dim=2) for x in (query, key, value))
        each = zip(queries, *(segments.with_prompts(x) for x in read), segments.parts, strict=True)
        for q, k, v, parts in each:
            length, total = q.shape[2], k.shape[2]
            window = sliding_window if sliding_window and sliding_window < total else None  # a longer one hides nothing
            is_unit = len(parts) > 1 and length == total
            explicit = softcap or is_unit or way == "explicit" or _is_faster_explicit(k, fast=segments.fast)
            mask = segments.mask(parts, length, window, q) if explicit or window or length < total else None
            attend = _explicit if explicit else _fused
            found.append(attend(q, k, v, mask, scale, dropout, softcap).transpose(1, 2))
        return torch.cat(found, dim=1) if len(found) > 1 else found[0], None


def _needs_window(module: torch.nn.Module) -> bool:
    """Whether this layer's configuration limits its attention to a window or a chunk."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and number is not None:
        return "sliding" in kinds[number] or "chunked" in kinds[number]
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True) is not False


def _seen(parts: tuple[int, ...], length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the T tokens of these parts each of the last `length` attends to: [length, T] bool."""
    total = sum(parts)
    if len(parts) == 1 or (len(parts) == 2 and length < total):  # one text in its own order, which may be long
        seen = torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)
        return seen if window is None else seen.triu(total - length + 1 - window)
    part = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))
    position = torch.cat([torch.arange(n) + (parts[0] if at else 0) for at, n in enumerate(parts)])
    distance = position[:, None] - position
    seen = ((part == 0) | (part == part[:, None])) & (distance >= 0) & (distance < (window or total))
    return seen.to(device)


def _is_faster_explicit(key: Tensor, *, fast: bool) -> bool:
    """Whether plain products are faster for a row, or the only way: a GPU has no fused kernel for fp64."""
    if key.is_cuda:
        return key.dtype == torch.float64
    return key.shape[2] <= (EXPLICIT_IN_HALVES_UP_TO if fast and key.dtype == torch.bfloat16 else EXPLICIT_UP_TO)


def _together(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None, scale: float
) -> Tensor:
    """Attention of all rows of all copies by one kernel: [R, H, N, D] and [R, G, N, D] -> [R, N, H, D]."""
    copies, longest, read = query.shape[0], max(segments.lengths), max(segments.totals)
    ends, ends_read = segments.ends(copies, query.device), segments.ends(copies, query.device, read=True)
    left = window - 1 if window and window < read else -1
    if any(segments.before):  # the kernel aligns the last query of a row with its last key
        key, value = (torch.cat(segments.with_prompts(x.split(segments.lengths, 2)), 2) for x in (key, value))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    more: Any = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    found: Any = varlen.varlen_attn(q, k, v, ends, ends_read, longest, read, scale=scale, window_size=(left, 0), **more)
    return found.unflatten(0, (copies, -1))  # type: ignore[no-any-return]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """Attention of one packed row by PyTorch: q [R, H, T, D], k and v [R, G, T, D] or longer -> [R, H, T, D]."""
    # Only flash attention supports grouped heads; elsewhere PyTorch would take the kernel that holds all scores.
    if q.is_cuda and not (mask is None and q.dtype in HALVES and torch.cuda.get_device_capability(q.device)[0] >= 8):
        k, v = _repeated(k, v, q.shape[1])
    with sdpa_kernel(FUSED) if q.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, softcap: float | None
) -> Tensor:
    """`_fused` by plain products, which allow a soft cap, and are faster for short rows on a CPU."""
    assert mask is not None
    rows, heads, length, _ = q.shape
    k, v = _repeated(k, v, heads)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if softcap:
        scores = softcap * torch.tanh(torch.bmm(q, k.transpose(1, 2)) * (scale / softcap)) + mask
    else:
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale)
    # softmax sums 16 bits in fp32 as well, and the backward pass needs only its result.
    weights = F.dropout(torch.softmax(scores, dim=-1), dropout)
    return torch.bmm(weights, v).view(rows, heads, length, -1)


def _repeated(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated for every head of the query."""
    times = heads // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def name_of(way: Way) -> str:
    """The name of this way of packed attention in a model's configuration."""
    return f"ci_llm_packed_{way}"


# No mask is registered beside them: Transformers then makes none, and does not ask the device where rows begin.
for _way in get_args(Way):
    AttentionInterface.register(name_of(_way), partial(packed_attention, way=_way))


def trial_inputs(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query [2, H, N, D], key and value [2, G, N, D] in the shapes of a base, in two copies as for two agents.

    They hold the same numbers at every call.
    """
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    shapes = [(2, count, sum(TRIAL_LENGTHS), width) for count in (heads, groups, groups)]
    drawn = [torch.randn(shape, generator=generator_for(n, "attention")) for n, shape in enumerate(shapes)]
    return tuple(each.to(device, dtype) for each in drawn)


def trial_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """No window, and that of a base if it has one; a row of the trial is longer."""
    window = getattr(config, "sliding_window", None)
    return (None,) if window is None else (None, min(int(window), max(TRIAL_LENGTHS) // 2))


def with_gradients(way: Way, inputs: Sequence[Tensor], window: int | None) -> list[Tensor]:
    """The output of attention over the rows of the trial, and the gradients of its inputs."""
    segments = Segments([0, *accumulate(TRIAL_LENGTHS)])
    q, k, v = leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.autocast(inputs[0].device.type, enabled=False), torch.enable_grad():
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, segments=segments, way=way)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def distance(way: Way, inputs: Sequence[Tensor], window: int | None) -> float:
    """The largest relative distance of output or gradients from plain products in fp32; NaN if one holds NaN."""
    found = with_gradients(way, inputs, window)
    wanted = with_gradients("explicit", [each.float() for each in inputs], window)
    gaps = [(one.double() - other).norm() / other.norm() for one, other in zip(found, wanted, strict=True)]
    return float(torch.stack(gaps).max())


def choose_way(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> tuple[Way, str]:
    """Try the ways on a GPU in the shapes of a base, and take the first that is right.

    Args:
        config: the configuration of the text part of the base.
        dtype: the dtype of attention.

    Returns:
        the way, and one line about it.

    Raises:
        ModelError: no way is right.
    """
    inputs = trial_inputs(config, device, dtype)
    reasons = []
    limit = max(1e-3, torch.finfo(dtype).eps ** 0.5)  # half the digits, and more than TF32 rounds
    ways: tuple[Way, ...] = ("varlen", "rows", "explicit") if dtype in HALVES else ("rows", "explicit")
    for way in ways:
        try:
            gaps = [distance(way, inputs, window) for window in trial_windows(config)]
        except (RuntimeError, TypeError, ValueError) as error:  # kernels raise nothing narrower for what they cannot do
            if is_out_of_memory(error):
                raise
            reasons.append(f"{way}: {first_line(error)}")
            continue
        wrong = [gap for gap in gaps if not gap <= limit]
        if not wrong:
            return way, "; ".join([f"{way}, within {max(gaps):.1e} of plain products", *reasons])
        reasons.append(f"{way} differs from plain products by {wrong[0]:.1e}")
    raise ModelError(
        f"attention is wrong on this device: {'; '.join(reasons)}", where=str(device), hint="run `ci-llm check`"
    )
