"""distributed: the tensors of a state that all processes hold are dealt out, and each process writes its part."""

from __future__ import annotations

from ci_llm.checkpoints.async_saver import SaveTask
from ci_llm.checkpoints.backends import SaveRequest
from ci_llm.checkpoints.commit import OtherWriters
from ci_llm.checkpoints.distributed import PartWriter
from ci_llm.checkpoints.state_files import Snapshot
from ci_llm.checkpoints.store import SaveResult
from ci_llm.distributed.side_channel import ProcessGroup


class Backend:
    """The tensors of a state that all processes hold are dealt out, and each process writes its part."""

    all_write = True

    def __init__(self, processes: ProcessGroup) -> None:
        del processes  # the writers communicate on a channel of their own
        self._writer: PartWriter | None = None

    def prepare(self, request: SaveRequest) -> SaveTask:
        self._writer = writer = self._writer or PartWriter()
        own_entries = writer.share(request.entries)
        forms = {entry.key: entry.form for entry in request.entries}

        def commit(part: Snapshot, others: OtherWriters) -> SaveResult:
            return request.store.save(
                request.step, part.files, forms=forms, info=request.info, keep=request.keep, others=others
            )

        return SaveTask(
            own_entries, lambda take: writer.save(request.store, request.step, take, commit), writer.give_up
        )
