"""The `distributed` backend: each process writes its part of a state that all hold, and process 0 commits the whole.

A save is a sequence of exchanges between all processes, on a `SideChannel` of its own, so that it can run in a thread
while the processes train:

    1. each sends the sizes and digests of the files that it will write: now process 0 knows the manifest;
    2. process 0 sends the path of the draft in its work folder; each writes its files there, syncs and verifies them;
    3. each sends that it has, or its error. Process 0 writes the manifest and commits, or removes the draft;
    4. process 0 sends the result, after 1 or 2 already if it could not go on.

A process that fails sends that at its next exchange, and so the others never wait for one that has given up. A process
that has died is an error on all others; what they have written is removed with the draft, or with the attempt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from ci_llm.checkpoints import backends
from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.manifest import FileImage, FileRecord, digest
from ci_llm.checkpoints.state_files import StateEntry, index_name, require_own_files
from ci_llm.checkpoints.store import CheckpointStore, OtherWriters, SaveResult
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel
from ci_llm.errors import CheckpointError, DamagedCheckpoint, PeerLost

#: What one process writes.
Part: TypeAlias = "list[StateEntry]"


@dataclass(frozen=True)
class _Piece:
    """Tensors that stay together: all of an entry, or a single one of a tree that is split."""

    key: str
    nbytes: int
    name: str = ""
    tensor: Tensor | None = None


def deal(entries: Sequence[StateEntry], count: int) -> list[Part]:
    """The parts of `count` processes: a pure function of names and shapes, so that each process knows all of them.

    Process 0 writes text. Files of tensors are dealt out, the largest first, each to the process with the fewest bytes
    so far (Graham, "Bounds on multiprocessing timing anomalies", 1969: the largest part is at most 4/3 of the best). A
    tree with more bytes than a fair share is split over several files, tensor by tensor, with the index format of
    Hugging Face's libraries:

        <key>.json                              the tree, as without shards
        <key>-00001-of-00003.safetensors        the tensors of one process
        <key>.safetensors.index.json            {"metadata": {"total_size": n}, "weight_map": {tensor: file}}

    A flat dict of tensors stays one file, because other programs open it. No tensor is cut in two.

    Raises:
        CheckpointError: two keys of the state would share a file.
    """
    if count == 1:
        return [list(entries)]
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
    parts = [[whole[piece.key] for piece in share if piece.tensor is None] for share in shares]
    parts[0] += texts
    for key in spread:
        _spread(key, shares, parts)
    require_own_files(entry for part in parts for entry in part)
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
        part.append(shard)
        where |= dict.fromkeys(sorted(tensors), *shard.file_names)
    total = sum(tensor.nbytes for _, tensors in held for tensor in tensors.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n"
    parts[0].append(StateEntry(index_name(key), "bytes", index.encode()))


def outline(parts: Sequence[Part]) -> str:
    """A digest of which process writes which tensors, of which shapes, under which names."""
    files = [sorted((entry.key, entry.form, _shapes(entry)) for entry in part) for part in parts]
    return digest([repr(files).encode()])


def _shapes(entry: StateEntry) -> list[str]:
    names = sorted(entry.value) if entry.form == "tensors" else []
    return [*names, *(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in entry.tensors)]


def contents(entries: Sequence[StateEntry]) -> dict[str, str]:
    """The form of each key and a digest of its tensors: their names, types, shapes and bytes."""
    return {entry.key: " ".join([entry.form, *_digests(entry)]) for entry in entries}


def _digests(entry: StateEntry) -> list[str]:
    images = entry.images(None) if entry.tensors else {}
    return [image.record().digest for name, image in images.items() if name.endswith(".safetensors")]


Message: TypeAlias = "dict[str, Any]"
GAVE_UP: Message = {"gave_up": True}
ONE_STATE = "gather what each process has of its own into one dict that all of them give, a key for each process"


def _require_one_state(channel: SideChannel, entries: Sequence[StateEntry]) -> None:
    received = channel.exchange_result_of(lambda: dump_json(contents(entries)))
    states: list[Any] = [load_json(message) for message in received]
    for index, theirs in enumerate(states):
        odd = sorted(key for key in {**states[0], **theirs} if states[0].get(key) != theirs.get(key))
        if odd:
            raise CheckpointError(
                f"process {index} does not hold the state of process 0: {', '.join(odd)}",
                where="checkpoint_backend: distributed",
                hint=ONE_STATE,
            )


@dataclass(frozen=True)
class _JointSave:
    """One save, as one of the processes that write it together sees it.

    Attributes:
        parts: what each process writes, by index.
    """

    channel: SideChannel
    request: backends.SaveRequest
    parts: Sequence[Part]

    def save(self, finish_copy: Callable[[], Mapping[str, FileImage]]) -> SaveResult:
        """Write this process's part; on process 0 commit the whole as well. A collective.

        Args:
            finish_copy: returns the files of this process, ready to be written.

        Returns:
            what became of the checkpoint, the same on every process.

        Raises:
            CheckpointError: what went wrong here; on process 0 also what went wrong elsewhere. A disk that fails is
                a result, not an error.
            PeerLost: a process has ended.
        """
        message = GAVE_UP
        try:
            part = finish_copy()
            records = {name: image.record() for name, image in part.items()}
            described = {name: asdict(record) for name, record in records.items()}
            message = {"outline": outline(self.parts), "records": described}
        finally:
            received = _exchange(self.channel, message)
        who = _who_gave_up(received)
        if who is not None:
            return self._given_up(f"process {who} could not copy its part")
        if len({each["outline"] for each in received}) > 1:
            return self._given_up("the processes do not hold tensors of the same names and shapes")
        store = self.request.store
        if self.channel.index:
            return self._follow(partial(_write, store, part, records))
        return self._lead(_Followers(self.channel, store.directory, received), part)

    def _given_up(self, why: str) -> SaveResult:
        """Process 0 raises, the others return a result: one error is enough for the reader of the log."""
        step = self.request.step
        if self.channel.index == 0:
            raise CheckpointError(f"checkpoint_step_{step} is dropped: {why}", hint="see what that process says")
        return SaveResult(step, False, why)

    def _lead(self, followers: _Followers, part: Mapping[str, FileImage]) -> SaveResult:
        try:
            result = self.request.commit(part, followers)
        except PeerLost:
            raise
        except BaseException as error:
            followers.dismiss(SaveResult(self.request.step, False, f"process 0 could not commit it: {error}"))
            raise
        followers.dismiss(result)
        return result

    def _follow(self, write: Callable[[Path], Message]) -> SaveResult:
        order = _exchange(self.channel, {})[0]
        if "draft" in order:
            message = GAVE_UP
            try:
                message = write(Path(order["draft"]))
            finally:
                received = _exchange(self.channel, message)
            who = _who_gave_up(received)
            if who is not None:
                return self._given_up(f"process {who} could not write its part")
            order = _exchange(self.channel, {})[0]
        return SaveResult(**order["result"])


def _write(
    store: CheckpointStore, files: Mapping[str, FileImage], records: Mapping[str, FileRecord], draft: Path
) -> Message:
    """Write a part; the message for process 0 is empty, or the error, of which process 0 decides what it means."""
    try:
        store.write_part(draft, files, records)
    except OSError as error:
        return {"error": error.strerror or str(error), "errno": error.errno}
    except DamagedCheckpoint as damage:
        return {"error": damage.what, "errno": None}
    return {}


class _Followers(OtherWriters):
    """The other processes, as process 0 directs them: each exchange tells them what to do next."""

    def __init__(self, channel: SideChannel, root: Path, received: Sequence[Message]) -> None:
        self._channel, self._root = channel, root
        self.records = {name: FileRecord(**record) for each in received[1:] for name, record in each["records"].items()}
        self._gave_up: int | None = None

    @contextmanager
    def writing(self, draft: Path) -> Iterator[None]:
        _exchange(self._channel, {"draft": str(draft.relative_to(self._root))})
        try:
            yield
        finally:
            received = _exchange(self._channel, {})
            self._gave_up = _who_gave_up(received)
            if self._gave_up is not None:
                # This outranks an error of our own disk, which would drop the checkpoint as a result.
                raise CheckpointError(f"process {self._gave_up} could not write its part", hint="see what it says")
        for index, each in enumerate(received):
            if "error" in each:
                what = f"{each['error']} (process {index})"
                raise OSError(each["errno"], what) if each["errno"] else DamagedCheckpoint(what)

    def dismiss(self, result: SaveResult) -> None:
        if self._gave_up is None:  # otherwise they have left already
            _exchange(self._channel, {"result": asdict(replace(result, cause=None))})


def _exchange(channel: SideChannel, message: Mapping[str, Any]) -> list[Message]:
    return [load_json(received) for received in channel.exchange(dump_json(message))]  # type: ignore[misc]


def _who_gave_up(received: Sequence[Message]) -> int | None:
    return next((index for index, each in enumerate(received) if each.get("gave_up")), None)


class Backend(backends.Backend):
    """The tensors of a state that all processes hold are dealt out, and each process writes its part.

    The first state is compared between the processes, bit by bit. Later ones are not: their names and shapes are, when
    they are written.
    """

    all_write = True

    def __init__(self, _: ProcessGroup) -> None:  # the writers communicate on a channel of their own
        self._channel: SideChannel | None = None
        self._is_compared = False

    def connect(self, *, asynchronous: bool) -> None:
        del asynchronous  # the writers communicate in every save
        self._channel = self._channel or SideChannel()

    def task_of(self, request: backends.SaveRequest) -> SaveTask:
        channel = self._channel
        assert channel is not None, "connect comes first"
        parts = deal(request.entries, channel.count)
        if channel.count > 1 and not self._is_compared:
            _require_one_state(channel, request.entries)
            self._is_compared = True
        joint = _JointSave(channel, request, parts)
        return SaveTask(parts[channel.index], joint.save, lambda: _exchange(channel, GAVE_UP))
