"""A nested state becomes named files, safetensors for tensors and JSON for the rest, and comes back the same.

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
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ci_llm.checkpoints.manifest import FileImage, check_name, tensor_spans
from ci_llm.errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from ci_llm.typed_json import Json, decode, encode, load_json, parse_json, refuse

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


@dataclass(frozen=True)
class Snapshot:
    """A state as files in memory, and the form of each of its keys."""

    files: dict[str, FileImage]
    forms: dict[str, str]

    def copied(self) -> Snapshot:
        """The same with bytes of its own: what was taken from still may change."""
        return Snapshot({name: _copy(image) for name, image in self.files.items()}, self.forms)


def _copy(image: FileImage) -> FileImage:
    copies = {id(part): bytes(part) for part in image.parts}
    tensors = {name: copies[id(part)] for name, part in image.tensors.items()}
    return FileImage(tuple(copies[id(part)] for part in image.parts), tensors)


# Writing


def take_snapshot(state: State) -> Snapshot:
    """The files of `state`. Tensors on the CPU are viewed, not copied.

    Raises:
        CheckpointError: a value that is neither tensor nor plain, a name that no file may have, or two keys
            that would share a file; the message has the address.
    """
    files: dict[str, FileImage] = {}
    forms: dict[str, str] = {}
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise CheckpointError("a state is a dict, and its keys are strings: they name the files")
    for key, value in state.items():
        try:
            forms[key], images = _files_of(key, value)
            for name in images:
                check_name(name)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the state cannot be saved: {error}", where=f"key {key!r}") from error
        if clash := sorted(files.keys() & images.keys()):
            raise CheckpointError(f"two keys of the state are both written as {clash[0]}", where=f"key {key!r}")
        files |= images
    return Snapshot(files, forms)


def _files_of(key: str, value: object) -> tuple[str, dict[str, FileImage]]:
    if isinstance(value, bytes):
        return "bytes", {key: FileImage((value,))}
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if _is_flat(value):
        return "tensors", {f"{key}.safetensors": write_safetensors(value)}
    tensors: dict[str, Tensor] = {}
    tree = encode(value, _Collector(tensors))
    indent = None if tensors else 2
    files = {f"{key}.json": FileImage(((json.dumps(tree, indent=indent, allow_nan=False) + "\n").encode(),))}
    if not tensors:
        return "plain", files
    return "tree", files | {f"{key}.safetensors": write_safetensors(tensors)}


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
            return {"$array": self._keep(torch.from_numpy(np.ascontiguousarray(value)), where)}
        if hasattr(value, "state_dict"):
            return encode(value.state_dict(), self, where)
        return refuse(value, where)

    def _keep(self, tensor: Tensor, where: str) -> str:
        name = where or "value"
        while name in self.tensors or name == "__metadata__":
            name += "'"
        self.tensors[name] = tensor
        return name


def write_safetensors(tensors: Mapping[str, Tensor]) -> FileImage:
    """The safetensors file of `tensors`: 8 bytes of header length, the header as JSON, the raw bytes.

    Wider types come first, so that every tensor starts at a multiple of its item size
    (https://github.com/huggingface/safetensors#format). The library's own writer makes a copy of its own;
    here the digests are of the very bytes that go to disk.

    Raises:
        TypeError: a type or layout that the format does not know.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    views = {name: _raw_bytes(tensors[name], name) for name in order}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, view in views.items():
        begin, end = end, end + view.nbytes
        kind = DTYPES[tensors[name].dtype]
        header[name] = {"dtype": kind, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FileImage((len(text).to_bytes(8, "little") + text, *views.values()), views)


def _raw_bytes(tensor: Tensor, name: str) -> memoryview:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) has no plain bytes")
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


# Reading


def read_snapshot(forms: Mapping[str, str], files: Mapping[str, bytes]) -> dict[str, Any]:
    """The state that `take_snapshot` wrote, its tensors on the CPU.

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
            tensors = read_safetensors(files[f"{key}.safetensors"])
            tags = {
                "$tensor": lambda name: tensors[str(name)],
                "$array": lambda name: tensors[str(name)].numpy(),
            }
            return decode(parse_json(files[f"{key}.json"]), tags)
    raise ValueError(f"unknown form {form!r}")


def read_safetensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read by the library.

    Raises:
        ValueError: it is no such file, or its header is longer than the format allows.
    """
    tensor_spans(data)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error
    return tensors


def load_into(objects: MutableMapping[str, Any], state: State) -> None:
    """Put a state back where it came from, strictly: all of it or an error before anything is touched.

    Tensors are copied in place, objects get `load_state_dict`, plain values are replaced in their container.
    Only files kept verbatim may stay unused.

    Raises:
        ForeignCheckpoint: a key, shape or type on one side has no counterpart on the other.
    """
    unused = {key for key, value in state.items() if not isinstance(value, bytes)} - objects.keys()
    if unused:
        raise ForeignCheckpoint(
            f"the checkpoint holds {sorted(unused)}, which nothing here takes up",
            cure="restore without `into` to get all of it as plain values",
        )
    taken = {key: state[key] for key in objects if key in state}
    if missing := sorted(objects.keys() - taken.keys()):
        raise ForeignCheckpoint(f"the checkpoint does not hold {missing}")
    for key, target in objects.items():
        _check_fit(target, taken[key], key)
    objects.update({key: _put(target, taken[key]) for key, target in objects.items()})


def _check_fit(target: object, saved: object, where: str) -> None:
    if isinstance(target, Tensor):
        same = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (target.shape, target.dtype)
        if not same:
            raise _misfit(where, _describe(target), _describe(saved))
    elif not _holds_objects(target):
        if isinstance(target, (dict, list, tuple)) and type(saved) is not type(target):
            raise _misfit(where, _describe(target), _describe(saved))
    elif isinstance(target, MutableMapping):
        if not isinstance(saved, dict) or saved.keys() != target.keys():
            raise _misfit(where, _describe(target), _describe(saved))
        for key, item in target.items():
            _check_fit(item, saved[key], f"{where}.{key}")
    elif isinstance(target, (list, tuple)):
        if type(saved) is not type(target) or len(saved) != len(target):
            raise _misfit(where, _describe(target), _describe(saved))
        for i, item in enumerate(target):
            _check_fit(item, saved[i], f"{where}[{i}]")


def _holds_objects(value: object) -> bool:
    """Whether anything in `value` has to be filled in place; otherwise it is plain, and replaced as a whole."""
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_objects, value))
    return isinstance(value, Tensor) or hasattr(value, "load_state_dict")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _misfit(where: str, here: str, there: str) -> ForeignCheckpoint:
    return ForeignCheckpoint(f"here is {here}, the checkpoint holds {there}", where=where)


def _put(target: Any, saved: Any) -> Any:
    """Load `saved` into `target` where that can be done in place; returns what belongs in its container."""
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(saved)
        return target
    if isinstance(target, Tensor):
        with torch.no_grad():
            return target.copy_(saved)
    if not _holds_objects(target):
        return saved
    if isinstance(target, MutableMapping):
        target.update({key: _put(item, saved[key]) for key, item in target.items()})
        return target
    filled = [_put(item, value) for item, value in zip(target, saved, strict=True)]
    if isinstance(target, tuple):
        return tuple(filled)
    target[:] = filled
    return target
