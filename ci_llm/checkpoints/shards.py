"""Which process writes what when every process writes its part, and how one key is split over several files.

All processes hold the same state, so a part is a choice of its files. Process 0 writes text. Files of tensors are dealt
out, the largest first, each to the process with the fewest bytes so far (Graham, "Bounds on multiprocessing timing
anomalies", 1969: the largest part is at most 4/3 of the best). A tree with more bytes than a fair share is split over
several files, tensor by tensor, with the index format of Hugging Face's libraries:

    <key>.json                              the tree, as without shards
    <key>-00001-of-00003.safetensors        the tensors of one process
    <key>.safetensors.index.json            {"metadata": {"total_size": n}, "weight_map": {tensor: file}}

A flat dict of tensors stays one file, because other programs open it. No tensor is cut in two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ci_llm.checkpoints.manifest import check_name, digest
from ci_llm.checkpoints.state_files import StateEntry, index_name
from ci_llm.errors import CheckpointError


@dataclass
class Part:
    """What one process writes, and how many bytes of tensors that is."""

    entries: list[StateEntry] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True)
class _Piece:
    """Tensors that stay together: those of an entry, or a single one of a tree that is split."""

    key: str
    nbytes: int
    name: str = ""
    tensor: Tensor | None = None


def deal(entries: Sequence[StateEntry], count: int) -> list[Part]:
    """The parts of `count` processes: a pure function of names and shapes, so that each process knows all of them.

    Raises:
        CheckpointError: two keys of the state would share a file.
    """
    if count == 1:
        return [Part(list(entries), sum(entry.nbytes for entry in entries))]
    fair = sum(entry.nbytes for entry in entries) / count
    texts = [entry for entry in entries if not entry.tensors]
    whole = {entry.key: entry for entry in entries if entry.form == "tensors"}
    spread: dict[str, dict[str, Tensor]] = {}
    for entry in (entry for entry in entries if entry.form == "tree"):
        text, tensors = entry.text_and_tensors()
        texts.append(StateEntry(f"{entry.key}.json", "bytes", text))
        if entry.nbytes > fair:
            spread[entry.key] = tensors
        else:
            whole[entry.key] = StateEntry.flat(entry.key, tensors)
    pieces = [_Piece(key, entry.nbytes) for key, entry in whole.items()]
    pieces += [_Piece(key, t.nbytes, name, t) for key, tensors in spread.items() for name, t in tensors.items()]

    shares = _deal_out(pieces, count)
    parts = [
        Part([whole[piece.key] for piece in share if piece.tensor is None], sum(piece.nbytes for piece in share))
        for share in shares
    ]
    parts[0].entries += texts
    for key in spread:
        _spread(key, shares, parts)
    _require_own_files([entry for part in parts for entry in part.entries])
    return parts


def _deal_out(pieces: Sequence[_Piece], count: int) -> list[list[_Piece]]:
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, piece.key, piece.name)):
        least = loads.index(min(loads))
        loads[least] += piece.nbytes
        shares[least].append(piece)
    return shares


def _spread(key: str, shares: Sequence[Sequence[_Piece]], parts: Sequence[Part]) -> None:
    """Add the files of one tree's tensors to `parts`: a shard for each process with some, the index for process 0."""
    shards = [{p.name: p.tensor for p in share if p.key == key and p.tensor is not None} for share in shares]
    held = [(part, tensors) for part, tensors in zip(parts, shards, strict=True) if tensors]
    where: dict[str, str] = {}
    for number, (part, tensors) in enumerate(held, start=1):
        shard = StateEntry.flat(f"{key}-{number:05d}-of-{len(held):05d}", tensors)
        part.entries.append(shard)
        where |= dict.fromkeys(sorted(tensors), *shard.file_names)
    total = sum(tensor.nbytes for _, tensors in held for tensor in tensors.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
    parts[0].entries.append(StateEntry(index_name(key), "bytes", index.encode()))


def _require_own_files(entries: Sequence[StateEntry]) -> None:
    names: set[str] = set()
    for name in (check_name(name) for entry in entries for name in entry.file_names):
        if name in names:
            raise CheckpointError(f"two keys of the state are both written as {name}", hint="rename one of them")
        names.add(name)


def outline(parts: Sequence[Part]) -> str:
    """A digest of which process writes which tensors, of which shapes, under which names."""
    files = [sorted((entry.key, entry.form, _shapes(entry)) for entry in part.entries) for part in parts]
    return digest([repr(files).encode()])


def _shapes(entry: StateEntry) -> list[str]:
    names = sorted(entry.value) if entry.form == "tensors" else []
    return [*names, *(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in entry.tensors)]


def contents(entries: Sequence[StateEntry]) -> dict[str, str]:
    """For each key its form and a digest of its tensors: their names, types, shapes and bytes."""
    return {entry.key: " ".join([entry.form, *_digests(entry)]) for entry in entries}


def _digests(entry: StateEntry) -> list[str]:
    images = entry.images(None).values() if entry.tensors else ()
    return [image.record().digest for image in images if image.tensors]
