"""The files of a nested state, safetensors for its tensors and JSON for the rest, from which it comes back the same.

The top-level keys of a state name its files:

    bytes                                    <key> itself, verbatim            form "bytes"
    a dict of tensors only, keys strings     <key>.safetensors, flat           form "tensors"
    plain values only                        <key>.json                        form "plain"
    anything else                            <key>.json, in which {"$tensor": name} stands for a tensor
                                             of <key>.safetensors              form "tree"

Objects with `state_dict` are asked for it, wherever they stand. No pickle is written or read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ci_llm.checkpoints.manifest import FileImage, check_name
from ci_llm.core.typed_json import Json, decode, encode, load_json, parse_json, reject
from ci_llm.errors import CheckpointError, DamagedCheckpoint

State: TypeAlias = Mapping[str, Any]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# Writing


@dataclass(frozen=True)
class StateEntry:
    """One key of a state at one moment: all of it but the contents of its tensors.

    Attributes:
        key: names its files.
        form: how they are written, see above.
        value: containers of its own, with copies of the arrays of the state and its very tensors.
        tensors: the tensors and arrays in `value`, in the order in which its file holds them.
    """

    key: str
    form: str
    value: Any
    tensors: Sequence[Tensor] = ()

    @property
    def file_names(self) -> list[str]:
        if self.form == "bytes":
            return [self.key]
        plain, tensors = f"{self.key}.json", f"{self.key}.safetensors"
        return {"tensors": [tensors], "plain": [plain], "tree": [plain, tensors]}[self.form]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def flat(cls, key: str, tensors: dict[str, Tensor]) -> StateEntry:
        """The entry of a dict of tensors."""
        return cls(key, "tensors", tensors, sorted(tensors.values(), key=_widest_first))

    def images(self, body: memoryview | None) -> dict[str, FileImage]:
        """Its files, with the bytes of its tensors as they are now, or with those in `body`."""
        if self.form == "bytes":
            return {self.key: FileImage((self.value,))}
        if self.form == "tensors":
            return {f"{self.key}.safetensors": write_safetensors(self.value, body)}
        text, tensors = self.text_and_tensors()
        files = {f"{self.key}.json": FileImage((text,))}
        return files | {f"{self.key}.safetensors": write_safetensors(tensors, body)} if tensors else files

    def text_and_tensors(self) -> tuple[bytes, dict[str, Tensor]]:
        """A tree as JSON in which names stand for tensors, and the tensors by these names."""
        tensors: dict[str, Tensor] = {}
        tree = encode(self.value, _Collector(tensors))
        text = json.dumps(tree, indent=None if tensors else 2, allow_nan=False) + "\n"
        return text.encode(), tensors


def entries_of(state: State) -> list[StateEntry]:
    """The present content of `state`, except for the contents of its tensors.

    Raises:
        CheckpointError: a value that is neither tensor nor plain, a name that no file may have, or two keys
            that would share a file; the message has the address.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise CheckpointError("a state is a dict, and its keys are strings: they name the files")
    entries: list[StateEntry] = []
    for key, value in state.items():
        try:
            entries.append(_entry(key, value))
            for name in entries[-1].file_names:
                check_name(name)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state cannot be saved: {error}", where=f"key {key!r}") from error
    require_own_files(entries)
    return entries


def require_own_files(entries: Iterable[StateEntry]) -> None:
    """Raises CheckpointError: two entries share a file."""
    names: set[str] = set()
    for entry in entries:
        for name in entry.file_names:
            if name in names:
                what, where = f"two keys of the state are both written as {name}", f"key {entry.key!r}"
                raise CheckpointError(what, where=where, hint="rename one of them")
            names.add(name)


def files_of(entries: Sequence[StateEntry], bodies: Sequence[memoryview | None] | None = None) -> dict[str, FileImage]:
    """The files of the entries of a state. Tensors on the CPU are viewed, not copied.

    Args:
        bodies: the bytes of each entry's tensors; where there are none, they are looked up in the tensors.
    """
    files: dict[str, FileImage] = {}
    for entry, body in zip(entries, bodies or [None] * len(entries), strict=True):
        files |= entry.images(body)
    return files


def _entry(key: str, value: object) -> StateEntry:
    if isinstance(value, bytes):
        return StateEntry(key, "bytes", value)
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    tensors: list[Tensor] = []
    try:
        own = _own_containers(value, tensors)
    except TypeError:
        encode(value, _Collector({}))  # slower, and its error has the address
        raise
    tensors.sort(key=_widest_first)
    if _is_flat(own):
        return StateEntry(key, "tensors", own, tensors)
    return StateEntry(key, "tree" if tensors else "plain", own, tensors)


def _own_containers(value: Any, tensors: list[Tensor]) -> Any:
    """`value` in containers of its own; its tensors and copies of its arrays are added to `tensors`."""
    if isinstance(value, Tensor):
        _require_plain_bytes(value)
        tensors.append(value)
        return value
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_own_containers(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: _own_containers(item, tensors) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.array(value, order="C")))
        return tensors[-1].numpy()
    if hasattr(value, "state_dict"):
        return _own_containers(value.state_dict(), tensors)
    raise TypeError(f"a {type(value).__name__} has no plain form")


def _is_flat(value: object) -> TypeGuard[dict[str, Tensor]]:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and "__metadata__" not in value
        and all(isinstance(name, str) and isinstance(item, Tensor) for name, item in value.items())
    )


class _Collector:
    """The leaf of `encode` that takes tensors out of a tree and leaves their names."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __call__(self, value: object, where: str) -> Json:
        if isinstance(value, Tensor):
            return {"$tensor": self._keep(value, where)}
        if isinstance(value, np.ndarray):
            return {"$array": self._keep(torch.from_numpy(np.asarray(value, order="C")), where)}
        if hasattr(value, "state_dict"):
            return encode(value.state_dict(), self, where)
        return reject(value, where)

    def _keep(self, tensor: Tensor, where: str) -> str:
        _require_plain_bytes(tensor, where)
        name = where or "value"
        while name in self.tensors or name == "__metadata__":
            name += "'"
        self.tensors[name] = tensor
        return name


def _widest_first(tensor: Tensor) -> int:
    """Sorts tensors as a file holds them, so that each starts at a multiple of its item size."""
    return -tensor.element_size()


def write_safetensors(tensors: Mapping[str, Tensor], body: memoryview | None = None) -> FileImage:
    """The safetensors file of `tensors`: 8 bytes of header length, the header as JSON, the raw bytes.

    Bytes of wider types come first, as the format wants it (https://github.com/huggingface/safetensors#format); the
    header keeps the order of `tensors`. The library's own writer makes a copy of its own; here the digests are of the
    very bytes that go to disk.

    Args:
        body: all raw bytes, in the order of the file; read from the tensors if None.

    Raises:
        TypeError: a type or layout that the format does not know.
    """
    order = sorted(tensors, key=lambda name: _widest_first(tensors[name]))
    entries: dict[str, object] = {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        kind = DTYPES[tensors[name].dtype]
        entries[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    header = {"__metadata__": {"format": "pt"}} | {name: entries[name] for name in tensors}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return FileImage((head, *([_raw_bytes(tensors[name]) for name in order] if body is None else [body])))


def _require_plain_bytes(tensor: Tensor, where: str = "") -> None:
    if type(tensor) not in (Tensor, torch.nn.Parameter) and (
        hasattr(tensor, "to_local") or hasattr(tensor, "local_shards")
    ):
        raise TypeError(
            f"tensor {where!r} is one shard of a distributed tensor: give the whole one on every process,"
            " by full_tensor() or get_state_dict(..., options=StateDictOptions(full_state_dict=True))"
        )
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"tensor {where!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) has no plain bytes")


def _raw_bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")  # an empty array has a stride of 0, and so no view as bytes
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


# Reading


def read_state(forms: Mapping[str, str], files: Mapping[str, bytes]) -> dict[str, Any]:
    """The state that was written as these files, its tensors on the CPU.

    Args:
        forms: the form of each entry, by its key.

    Raises:
        DamagedCheckpoint: the files do not have the form that the manifest says.
    """
    state: dict[str, Any] = {}
    for key, form in forms.items():
        try:
            state[key] = _read(key, form, files)
        except (KeyError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"{key!r} cannot be read: {error}", where=f"key {key!r}") from error
    return state


def _read(key: str, form: str, files: Mapping[str, bytes]) -> object:
    match form:
        case "bytes":
            return files[key]
        case "plain":
            return load_json(files[f"{key}.json"])
        case "tensors":
            return read_safetensors(files[f"{key}.safetensors"])
        case "tree":
            tensors = _tensors_of(key, files)
            tags = {
                "$tensor": lambda name: tensors[str(name)],
                "$array": lambda name: tensors[str(name)].numpy(),
            }
            return decode(parse_json(files[f"{key}.json"]), tags)
    raise ValueError(f"unknown form {form!r}")


def index_name(key: str) -> str:
    """The file that says in which file each tensor of a key lies if there are several (see backends/distributed.py)."""
    return f"{key}.safetensors.index.json"


def _tensors_of(key: str, files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The tensors of a tree, from its one file or from all that its index names."""
    if index_name(key) not in files:
        return read_safetensors(files[f"{key}.safetensors"])
    match parse_json(files[index_name(key)]):
        case {"weight_map": dict(where)}:
            shards = {str(name): read_safetensors(files[str(name)]) for name in where.values()}
            return {tensor: shards[str(name)][tensor] for tensor, name in where.items()}
    raise ValueError("the index does not say where its tensors are")


def read_safetensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read by the library, in the order of its header.

    Raises:
        ValueError: it is not such a file, or its header is longer than the format allows.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    header: Any = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: tensors[name] for name in header if name != "__metadata__"}


# Messages


def to_bytes(value: Any) -> bytes:
    """A nested value of tensors and plain values as one message; `from_bytes` gives it back.

    Raises:
        CheckpointError: it holds a value that cannot be saved.
    """
    images = files_of(entries_of({"value": {"content": value}}))
    parts = {name: b"".join(image.parts) for name, image in images.items()}
    text = parts.get("value.json", b"")
    return len(text).to_bytes(8, "little") + text + parts.get("value.safetensors", b"")


def from_bytes(message: bytes) -> Any:
    """The value of a message. Raises DamagedCheckpoint: `to_bytes` has not made it."""
    end = 8 + int.from_bytes(message[:8], "little")
    files = {"value.json": message[8:end], "value.safetensors": message[end:]}
    form = "tree" if message[end:] and end > 8 else "tensors" if message[end:] else "plain"
    return read_state({"value": form}, files)["value"]["content"]
