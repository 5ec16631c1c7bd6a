"""torch.cuda on the simulated device: streams, events, memory, generators, attention, and collectives by gloo.

Each function does what PyTorch's own of that name does, as far as a program can see it. Import it before torch.

Legend: B rows, H heads, G key/value heads, T tokens of a row, N tokens of all rows end to end, D width of a head.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

from tools.testbed.accelerator import library
from tools.testbed.accelerator.trace import Trace

DEVICE: Final = library.load()

import torch  # noqa: E402  after the device
import torch.distributed as dist  # noqa: E402
import torch.nn.attention.varlen as varlen  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

TRACE: Final = Trace()
HOPPER: Final = (9, 0)
TOTAL_BYTES: Final = 80 << 30  # of which other processes may have taken a part: the limit is what is left
_SDPA: Final = torch.nn.functional.scaled_dot_product_attention
_ON_DEVICES: Final = ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor")


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(DEVICE.current_device() if index is None else index)


class Stream:
    """A queue of work; only copies into pinned memory lie in it, everything else is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None) -> None:
        self.device = torch.device("cuda", _index(device))
        self.device_index, self.device_type = self.device.index, 1
        self.stream_id = self.cuda_stream = DEVICE.new_stream() if stream_id is None else stream_id

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        TRACE.note("wait", "stream.synchronize", 0)
        DEVICE.finish(self.stream_id)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        self._context = stream_context(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


class Event:
    """A mark in a stream, after what was launched on it so far."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id, self.number = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream_id = (stream or current_stream()).stream_id
        self.number = DEVICE.mark(self.stream_id)

    def wait(self, stream: Stream | None = None) -> None:
        DEVICE.wait_for((stream or current_stream()).stream_id, self.stream_id, self.number)

    def synchronize(self) -> None:
        TRACE.note("wait", "event.synchronize", 0)
        DEVICE.finish(self.stream_id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Event) -> float:
        return 0.0


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(index, stream_id=DEVICE.current_stream(index))


def set_stream(stream: Stream) -> None:
    """As `THCPModule_setStream_wrap`: the device of the stream becomes the current one, by cudaSetDevice."""
    DEVICE.set_device(stream.device_index)
    DEVICE.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """As `torch.cuda.StreamContext`, line by line."""
    if stream is None:
        yield
        return
    before, on_its_device = current_stream(), None
    if before.device != stream.device:
        with DeviceContext(stream.device):
            on_its_device = current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        if on_its_device is not None:
            set_stream(on_its_device)
        set_stream(before)


class DeviceContext:
    """As `torch.cuda.device`: the way back makes no context."""

    def __init__(self, device: Any) -> None:
        self.index, self.before = _index(device), -1

    def __enter__(self) -> None:
        self.before = DEVICE.current_device()
        DEVICE.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        DEVICE.set_device_without_context(self.before)


# Attention


def kernel_of(query: Tensor, key: Tensor, mask: Tensor | None, capability: tuple[int, int]) -> str:
    """The kernel that `scaled_dot_product_attention` of torch 2.13 takes of those that are allowed, by `sdp_utils.cpp`.

    Raises:
        RuntimeError: there is none, as torch says it.
    """
    half, cuda = query.dtype in (torch.bfloat16, torch.float16), torch.backends.cuda
    takes = {
        "cudnn": half and capability[0] in (9, 10) and cuda.cudnn_sdp_enabled(),
        "flash": half and mask is None and capability[0] >= 8 and cuda.flash_sdp_enabled(),
        "efficient": query.shape[1] == key.shape[1]
        and query.dtype != torch.float64
        and cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    for kernel, is_taken in takes.items():
        if is_taken:
            return kernel
    raise RuntimeError("No available kernel. Aborting execution.")


class _Attention(torch.autograd.Function):
    """One kernel forward, and three backward, as flash attention has them; the numbers are those of the CPU."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        DEVICE.launch("attention forward")
        ctx.attend = attend
        ctx.save_for_backward(query, key, value)
        with torch.no_grad():
            result: Tensor = DEVICE.take(attend(*map(_lent, (query, key, value))), query.device.index)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for _ in range(3):
            DEVICE.launch("attention backward")
        inputs = [_lent(each).clone().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attend(*inputs)
        found = torch.autograd.grad(out, inputs, _lent(grad))
        return None, *(DEVICE.take(each, grad.device.index) for each in found)


def _lent(tensor: Tensor) -> Tensor:
    lent: Tensor = DEVICE.lend(tensor.detach())
    return lent


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of [B, H, T, D] and [B, G, T, D]."""
    more: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if not query.is_cuda:
        return _SDPA(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **more)
    capability = torch.cuda.get_device_capability()
    kernel = kernel_of(query, key, attn_mask, capability)
    if isinstance(query, FakeTensor):
        if attn_mask is None and kernel in ("cudnn", "flash"):
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            result: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return result
        return _SDPA(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **more)
    TRACE.attended(kernel, str(query.dtype), attn_mask is not None)
    mask = None if attn_mask is None else _lent(attn_mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _SDPA(q, k, v, attn_mask=mask, enable_gqa=enable_gqa, **more)

    found: Tensor = _Attention.apply(attend, query, key, value)
    return found


_VARLEN: Final = varlen.varlen_attn


def attention_of_rows(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, **how: Any
) -> Tensor:
    """`varlen_attn` of [N, H, D] and [N, G, D]: half precision on Ampere and newer, else the error of its kernel."""
    if isinstance(query, FakeTensor):
        faked: Any = _VARLEN(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how)
        return faked
    if torch.cuda.get_device_capability() < (8, 0) or not query.is_cuda:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if query.shape[-1] > 256 or query.shape[-1] % 8:
        raise RuntimeError("FlashAttention needs a head dimension of at most 256, which 8 divides")
    if cu_seq_q.dtype != torch.int32 or not cu_seq_q.is_cuda:
        raise RuntimeError("cu_seqlens_q must have dtype int32 and be on the device")
    TRACE.attended("varlen", str(query.dtype), masked=False)
    asked, read = (pairwise(_lent(ends).tolist()) for ends in (cu_seq_q, cu_seq_k))
    rows = [*zip(asked, read, strict=True)]
    left = how.get("window_size", (-1, -1))[0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat(
            [
                _row_of(
                    q[a:b].transpose(0, 1), *(x[c:d].transpose(0, 1) for x in (k, v)), left, how.get("scale")
                ).transpose(0, 1)
                for (a, b), (c, d) in rows
            ]
        )

    found: Tensor = _Attention.apply(attend, query, key, value)
    return found


def _row_of(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float | None) -> Tensor:
    behind = key.shape[1] - query.shape[1]  # the last query stands at the last key
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(behind)
    seen = seen if left < 0 else seen.triu(behind - left)
    return _SDPA(query, key, value, attn_mask=seen, scale=scale, enable_gqa=query.shape[0] != key.shape[0])


# The face


def install(devices: int = 1, limit: int = TOTAL_BYTES, capability: tuple[int, int] = HOPPER) -> None:
    """Let torch find this many devices, each with this much memory for this process, in bytes."""
    if not DEVICE.install(devices, limit):
        raise RuntimeError("torch has made its hooks before the simulated device was loaded")
    DEVICE.observe(TRACE.note)
    properties = types.SimpleNamespace(
        name="Simulated GPU",
        major=capability[0],
        minor=capability[1],
        total_memory=TOTAL_BYTES,
        uuid="simulated",
        multi_processor_count=132,
    )
    functions = _of_devices(devices, capability, properties) | _of_memory() | _of_generators(devices) | _of_streams()
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_getCurrentRawStream = DEVICE.current_stream
    torch.nn.functional.scaled_dot_product_attention = attention
    varlen.varlen_attn = attention_of_rows
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache = lambda: None
    _resize_storages()
    for name in _ON_DEVICES:
        if hasattr(dist, name):
            _lend_to_gloo(name)


def _of_devices(devices: int, capability: tuple[int, int], properties: Any) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": DEVICE.current_device,
        "set_device": lambda device: DEVICE.set_device(_index(device)),
        "device": DeviceContext,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "is_bf16_supported": lambda including_emulation=True: capability[0] >= 8,
    }


def _of_memory() -> dict[str, Any]:
    def live(device: Any = None) -> int:
        return int(DEVICE.live(_index(device)))

    def peak(device: Any = None) -> int:
        return int(DEVICE.peak(_index(device)))

    return {
        "mem_get_info": lambda device=None: (DEVICE.limit() - live(device), TOTAL_BYTES),
        "memory_allocated": live,
        "memory_reserved": live,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: DEVICE.reset_peak(_index(device)),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _of_generators(devices: int) -> dict[str, Any]:
    def each() -> list[torch.Generator]:
        return [DEVICE.default_generator(index) for index in range(devices)]

    def seed_all(seed: int) -> None:
        for generator in each():
            generator.manual_seed(seed)

    def set_all(states: list[Tensor]) -> None:
        for generator, state in zip(each(), states, strict=True):
            generator.set_state(state)

    return {
        "get_rng_state": lambda device="cuda": DEVICE.default_generator(_index(device)).get_state(),
        "set_rng_state": lambda state, device="cuda": DEVICE.default_generator(_index(device)).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in each()],
        "set_rng_state_all": set_all,
        "manual_seed": lambda seed: DEVICE.default_generator(_index()).manual_seed(seed),
        "manual_seed_all": seed_all,
    }


def _of_streams() -> dict[str, Any]:
    def synchronize(device: Any = None) -> None:
        TRACE.note("wait", "torch.cuda.synchronize", 0)
        DEVICE.finish(0)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream_context,
        "current_stream": current_stream,
        "set_stream": set_stream,
        "default_stream": lambda device=None: Stream(_index(device), stream_id=0),
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
    }


def _resize_storages() -> None:
    """A storage of this device changes its size, as sharded layers let it."""
    own = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            own(self, size)
        else:
            DEVICE.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_


def _lend_to_gloo(name: str) -> None:
    """NCCL's collectives over gloo: it adds the lent memory of every process."""
    own = getattr(dist, name)

    def lent(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_cuda:
            DEVICE.launch("collective")
            return _lent(value)
        return value

    def collective(*args: Any, **kwargs: Any) -> Any:
        return own(*map(lent, args), **{key: lent(value) for key, value in kwargs.items()})

    setattr(dist, name, collective)
    setattr(dist.distributed_c10d, name, collective)
