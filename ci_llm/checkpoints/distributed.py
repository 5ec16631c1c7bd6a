"""One checkpoint, written by all processes: each writes its part, process 0 commits the whole, or nothing is committed.

A save is a sequence of exchanges between all processes, on a `SideChannel` of its own, so that it can run in a thread
while the processes train:

    1. each sends the sizes and digests of the files that it will write: now process 0 knows the manifest;
    2. process 0 sends the path of the draft in its work folder; each writes its files there, syncs and verifies them;
    3. each sends that it has, or its error. Process 0 writes the manifest and commits, or removes the draft;
    4. process 0 sends the result. On a full disk it may go back to 2 instead.

A process that fails sends that at its next exchange, and so the others never wait for one that has given up. A process
that has died is an error on all others; what they have written is removed with the draft, or with the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ci_llm.checkpoints.commit import OtherWriters
from ci_llm.checkpoints.manifest import FileImage, FileRecord
from ci_llm.checkpoints.shards import Part, contents, deal, outline
from ci_llm.checkpoints.state_files import Snapshot, StateEntry
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.distributed.side_channel import SideChannel
from ci_llm.errors import CheckpointError, DamagedCheckpoint, PeerLost

Message: TypeAlias = "dict[str, Any]"
#: Saves files in the store, beside those of other writers.
Commit: TypeAlias = Callable[[Snapshot, OtherWriters], SaveResult]
GAVE_UP: Message = {"gave_up": True}
ONE_STATE = "gather what each process has of its own into one dict that all of them give, a key for each process"


class PartWriter:
    """One of the processes that write a checkpoint together. Building it and each of its methods are collectives."""

    def __init__(self) -> None:
        self._channel = SideChannel()
        self._is_compared = self._channel.count == 1
        self._parts: Sequence[Part] = ()

    def share(self, entries: Sequence[StateEntry]) -> Sequence[StateEntry]:
        """What this process is to write of a state, before anything is begun.

        The first state is compared between the processes, bit by bit. Later ones are not: their names and shapes are,
        when they are written.

        Args:
            entries: the whole state, the same on every process.

        Raises:
            CheckpointError: two keys would share a file; or the first state is not the same on all processes.
        """
        self._parts = deal(entries, self._channel.count)
        if not self._is_compared:
            self._require_one_state(entries)
            self._is_compared = True
        return self._parts[self._channel.index].entries

    def _require_one_state(self, entries: Sequence[StateEntry]) -> None:
        received = self._channel.exchange_result_of(lambda: dump_json(contents(entries)))
        states: list[Any] = [load_json(message) for message in received]
        for index, theirs in enumerate(states):
            if odd := sorted(key for key in {**states[0], **theirs} if states[0].get(key) != theirs.get(key)):
                raise CheckpointError(
                    f"process {index} does not hold the state of process 0: {', '.join(odd)}",
                    where="checkpoint_backend: distributed",
                    hint=ONE_STATE,
                )

    def give_up(self) -> None:
        """To be called instead of `save` if that cannot run here: the others must not wait for it."""
        _exchange(self._channel, GAVE_UP)

    def save(self, store: CheckpointStore, step: int, take: Callable[[], Snapshot], commit: Commit) -> SaveResult:
        """Write this process's part; on process 0 commit the whole as well.

        Args:
            store: of the same folder on every process; only process 0 acquires its lease.
            take: the files of this process, ready to be written.
            commit: saves them in the store, beside those of the others; called on process 0 only.

        Returns:
            what became of the checkpoint, the same on every process.

        Raises:
            CheckpointError: what went wrong here; on process 0 also what went wrong elsewhere. A disk that fails is
                no error but a result.
            PeerLost: a process has ended.
        """
        message = GAVE_UP
        try:
            part = take()
            records = {name: image.record() for name, image in part.files.items()}
            described = {name: asdict(record) for name, record in records.items()}
            message = {"outline": outline(self._parts), "records": described}
        finally:
            received = _exchange(self._channel, message)
        if (who := _who_gave_up(received)) is not None:
            return self._given_up(step, f"process {who} could not copy its part")
        if len({each["outline"] for each in received}) > 1:
            return self._given_up(step, "the processes do not hold tensors of the same names and shapes")
        if self._channel.index:
            write = partial(_write, store, part.files, records)
            return self._follow(step, write)
        return self._lead(step, _Followers(self._channel, store.directory, received), partial(commit, part))

    def _given_up(self, step: int, why: str) -> SaveResult:
        """Process 0 raises, the others return a result: one error is enough for the reader of the log."""
        if self._channel.index == 0:
            raise CheckpointError(f"checkpoint_step_{step} is dropped: {why}", hint="see what that process says")
        return SaveResult(step, False, why)

    def _lead(self, step: int, followers: _Followers, commit: Callable[[OtherWriters], SaveResult]) -> SaveResult:
        try:
            result = commit(followers)
        except PeerLost:
            raise
        except BaseException as error:
            followers.dismiss(SaveResult(step, False, f"process 0 could not commit it: {error}"))
            raise
        followers.dismiss(result)
        return result

    def _follow(self, step: int, write: Callable[[Path], Message]) -> SaveResult:
        while "draft" in (order := _exchange(self._channel, {})[0]):
            message = GAVE_UP
            try:
                message = write(Path(order["draft"]))
            finally:
                received = _exchange(self._channel, message)
            if (who := _who_gave_up(received)) is not None:
                return self._given_up(step, f"process {who} could not write its part")
        return SaveResult(**order["result"])


def _write(
    store: CheckpointStore, files: Mapping[str, FileImage], records: Mapping[str, FileRecord], draft: Path
) -> Message:
    """The message about it: empty if all is well. Process 0 decides what an error of the disk means."""
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
                # This outranks an error of our own disk, after which process 0 would try again without them.
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
