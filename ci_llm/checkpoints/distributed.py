"""One checkpoint, written by all processes: each writes its part, process 0 commits the whole, or nobody does.

Every process comes to these meetings, which may be held behind the training, on a `SideChannel` of their own:

    1. each says what it will write: sizes and digests of its files. Now process 0 knows the manifest;
    2. process 0 names the draft in its attempt's folder; each writes its files there, syncs them, reads them back;
    3. each says that it has, or why not. Process 0 writes the manifest and commits, or takes everything back;
    4. process 0 says what became of it. On a full disk it may go back to 2.

Whatever fails in one process is said at its next meeting, so that nobody waits for one that has given up. A process
that has died is an error of all others; what they have written goes with the draft, or with the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ci_llm.checkpoints.commit import Others
from ci_llm.checkpoints.manifest import FileImage, FileRecord
from ci_llm.checkpoints.shards import Part, contents, deal, outline
from ci_llm.checkpoints.state_files import Snapshot, State, StateEntry, hand_off
from ci_llm.checkpoints.store import CheckpointStore, SaveResult
from ci_llm.core.typed_json import dump_json, load_json
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, run_collectively
from ci_llm.errors import CheckpointError, DamagedCheckpoint, PeerLost

Said: TypeAlias = "dict[str, Any]"
Commit: TypeAlias = Callable[[Snapshot, Others], SaveResult]
GAVE_UP: Said = {"gave_up": True}
ONE_STATE = "gather what each process has of its own into one dict that all of them give, a key for each process"


class PartWriter:
    """The processes of a run as writers of its checkpoints. Building it and each of its methods are collectives.

    Args:
        processes: for what is said in the thread of the training.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes, self._line = processes, SideChannel()
        self._compared = self._line.count == 1
        self._parts: Sequence[Part] = ()

    def share(self, state: State, be_ready: Callable[[], None]) -> tuple[dict[str, str], Sequence[StateEntry]]:
        """The forms of a state, and what this process is to write of it, before anything is begun.

        The first state is compared between the processes, bit by bit.

        Args:
            be_ready: called first; raises what has to end this save.

        Raises:
            CheckpointError: the state cannot be saved here, or on another process, or is not the same on all.
        """
        entries: list[StateEntry] = []
        own: dict[str, str] = {}

        def take() -> list[int]:
            be_ready()
            entries.extend(hand_off(state))
            self._parts = deal(entries, self._line.count)
            if not self._compared:
                own.update(contents(entries))
            return []

        run_collectively(self._processes, take)
        if not self._compared:
            self._require_one_state(own)
            self._compared = True
        return {entry.key: entry.form for entry in entries}, self._parts[self._line.index].entries

    def _require_one_state(self, own: Mapping[str, str]) -> None:
        told = _meet(self._line, own)
        for index, theirs in enumerate(told):
            if odd := sorted(key for key in {**told[0], **theirs} if told[0].get(key) != theirs.get(key)):
                raise CheckpointError(
                    f"process {index} does not hold the state of process 0: {', '.join(odd)}",
                    where="checkpoint_backend: distributed",
                    hint=ONE_STATE,
                )

    def give_up(self) -> None:
        """Instead of `save`: it cannot be run here, and the others must not wait for it."""
        _meet(self._line, GAVE_UP)

    def save(self, store: CheckpointStore, step: int, take: Callable[[], Snapshot], commit: Commit) -> SaveResult:
        """Write this process's part; on process 0 commit the whole as well.

        Args:
            store: of the same folder on every process; only process 0 claims it.
            take: the files of this process, ready to be written.
            commit: saves them in the store, together with others; called on process 0 only.

        Returns:
            what became of the checkpoint, the same on every process.

        Raises:
            CheckpointError: what went wrong here; on process 0 also what went wrong elsewhere. A disk that fails is
                no error but a result.
            PeerLost: a process has ended.
        """
        said = GAVE_UP
        try:
            part = take()
            records = {name: image.record() for name, image in part.files.items()}
            told_of = {name: asdict(record) for name, record in records.items()}
            said = {"outline": outline(self._parts), "records": told_of}
        finally:
            told = _meet(self._line, said)
        if (who := _who_gave_up(told)) is not None:
            return self._given_up(step, f"process {who} could not copy its part")
        if len({each["outline"] for each in told}) > 1:
            return self._given_up(step, "the processes do not hold tensors of the same names and shapes")
        if self._line.index:
            write = partial(_write, store, part.files, records)
            return self._follow(step, write)
        return self._lead(step, _Followers(self._line, store.directory, told), partial(commit, part))

    def _given_up(self, step: int, why: str) -> SaveResult:
        """One error for people is enough: process 0 raises, the others end quietly."""
        if self._line.index == 0:
            raise CheckpointError(f"checkpoint_step_{step} is dropped: {why}", hint="see what that process says")
        return SaveResult(step, False, why)

    def _lead(self, step: int, followers: _Followers, commit: Callable[[Others], SaveResult]) -> SaveResult:
        try:
            result = commit(followers)
        except PeerLost:
            raise
        except BaseException as error:
            followers.dismiss(SaveResult(step, False, f"process 0 could not commit it: {error}"))
            raise
        followers.dismiss(result)
        return result

    def _follow(self, step: int, write: Callable[[Path], Said]) -> SaveResult:
        while "draft" in (order := _meet(self._line, {})[0]):
            said = GAVE_UP
            try:
                said = write(Path(order["draft"]))
            finally:
                told = _meet(self._line, said)
            if (who := _who_gave_up(told)) is not None:
                return self._given_up(step, f"process {who} could not write its part")
        return SaveResult(**order["result"])


def _write(
    store: CheckpointStore, files: Mapping[str, FileImage], records: Mapping[str, FileRecord], draft: Path
) -> Said:
    """What to say about it: nothing, if all is well; a disk that fails is for process 0 to judge."""
    try:
        store.write_part(draft, files, records)
    except OSError as error:
        return {"error": error.strerror or str(error), "errno": error.errno}
    except DamagedCheckpoint as damage:
        return {"error": damage.what, "errno": None}
    return {}


class _Followers(Others):
    """The other processes as process 0 sees them: told what to do at each meeting."""

    def __init__(self, line: SideChannel, root: Path, told: Sequence[Said]) -> None:
        self._line, self._root = line, root
        self.records = {name: FileRecord(**record) for each in told[1:] for name, record in each["records"].items()}
        self._gave_up: int | None = None

    @contextmanager
    def writing(self, draft: Path) -> Iterator[None]:
        _meet(self._line, {"draft": str(draft.relative_to(self._root))})
        try:
            yield
        finally:
            told = _meet(self._line, {})
            self._gave_up = _who_gave_up(told)
            if self._gave_up is not None:  # before an error of our own disk: it would be tried again, without them
                raise CheckpointError(f"process {self._gave_up} could not write its part", hint="see what it says")
        for index, each in enumerate(told):
            if "error" in each:
                what = f"{each['error']} (process {index})"
                raise OSError(each["errno"], what) if each["errno"] else DamagedCheckpoint(what)

    def dismiss(self, result: SaveResult) -> None:
        if self._gave_up is None:  # else they know, and have gone
            _meet(self._line, {"result": asdict(replace(result, cause=None))})


def _meet(line: SideChannel, said: Mapping[str, Any]) -> list[Said]:
    return [load_json(told) for told in line.exchange(dump_json(said))]  # type: ignore[misc]


def _who_gave_up(told: Sequence[Said]) -> int | None:
    return next((index for index, each in enumerate(told) if each.get("gave_up")), None)
