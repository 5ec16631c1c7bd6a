"""The mirror of one run: it fills an empty disk, follows the checkpoints, and has the last seconds of the grace.

It works on the main process only. On the others, and without the key `mirror`, every method does nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.launch import Launch
from ci_llm.cluster.slurm import read_job
from ci_llm.config import Config
from ci_llm.core.run_folder import BEGINNING, CROWD_CHANGES, PUSH_RECORD, RECOVERY, SKIPPED_BATCHES
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.mirror.filling import fill
from ci_llm.mirror.head import Found
from ci_llm.mirror.objects import open_objects
from ci_llm.mirror.sender import Mirror, MirrorState
from ci_llm.run.end.shutdown import expected_kill

logger = logging.getLogger(__name__)

#: What follows beside the checkpoints: what a run leaves for people and for its next attempt.
RUN_FILES: Final = (
    *(
        BEGINNING,
        CROWD_CHANGES,
        RECOVERY,
        SKIPPED_BATCHES,
        "status.json",
        "training.log",
        "metrics.jsonl",
        "loss_log.csv",
    ),
    *("evaluation.json", "gpu_stats.json", "report.html", PUSH_RECORD, "attempts/*/*.json"),
    *("tensorboard/*", "tensorboard/*/*", "tensorboard/*/*/*"),
)
#: How long a run that nobody kills waits for its mirror, and then, or after a failure, for its last files.
AT_THE_END_S: Final = 600.0
LAST_FILES_S: Final = 30.0
MARGIN_S: Final = 1.0
#: The request to requeue a SLURM job comes after the last file, and must not come too late.
REQUEUE_S: Final = 4.0
#: Of the grace: the status of an interrupted run must be written in any case, even if the store does not answer.
SHARE_BEFORE_STATUS: Final = 0.6


def require_store(config: Config) -> None:
    """Refuse a mirror whose store this installation cannot speak to, before anything is loaded. Raises BadInput."""
    if config.mirror is not None:
        open_objects(config.mirror)


class RunMirror:
    """The mirror of one run, if it has one."""

    def __init__(
        self,
        config: Config,
        manager: CheckpointManager,
        processes: Processes,
        interrupts: Interrupts,
    ) -> None:
        self._config, self._manager, self._interrupts = config, manager, interrupts
        self._launch: Launch = processes.launch
        self._mirror: Mirror | None = None
        self._found = Found()
        self.on_change: Callable[[dict[str, Any]], object] = lambda state: None
        if config.mirror is not None and processes.is_main_process:
            self._mirror = Mirror(
                config.mirror,
                config.run_folder,
                keep=config.save_total_limit,
                files=RUN_FILES,
                max_mb_per_s=config.mirror_max_mb_per_s,
                compression=config.mirror_compression,
                on_change=self._tell,
            )

    def _tell(self, state: MirrorState) -> None:
        self.on_change(asdict(state))

    def fill_disk(self) -> None:
        """Bring the newest step that verifies onto the disk, if only the mirror has it; before anything is decided.

        Raises:
            CheckpointError: the mirror holds another run, or does not answer while the disk is empty.
        """
        if self._mirror is not None:
            self._found = fill(self._mirror.reader, self._manager, RUN_FILES)

    def begin(self, going_on_from: int, attempt: int) -> None:
        """Claim the mirror for this attempt, whose folder is leased, and send from here on.

        Args:
            going_on_from: newer steps leave the line there; -1: all of them do.

        Raises:
            WriterBusy: the mirror holds another run, or another attempt has claimed it since `fill_disk`.
        """
        if (mirror := self._mirror) is not None:
            mirror.begin(going_on_from, attempt, self._found)
            self._manager.after_save = lambda result: mirror.wake()
            logger.info(f"mirror    {mirror.state.url}")

    @property
    def sending(self) -> frozenset[int]:
        """The step that is being sent, which must not be pruned meanwhile."""
        return frozenset() if self._mirror is None else self._mirror.sending

    def metrics(self) -> dict[str, float]:
        """How far behind it is, for a line of metrics."""
        return {} if self._mirror is None else self._mirror.metrics()

    def settle(self, stop: str | None) -> None:
        """Send what the run has saved last, before its status says how it ended.

        Args:
            stop: why it was asked to stop; None if it is complete.
        """
        if stop is None:
            self.flush(AT_THE_END_S)
        else:
            self.flush_before_kill(SHARE_BEFORE_STATUS)

    def flush_before_kill(self, share: float = 1.0) -> None:
        """Send what the run has saved last, for a share of the time that the process may be expected to live."""
        margin = MARGIN_S if read_job() is None else MARGIN_S + REQUEUE_S
        killed_at = expected_kill(self._interrupts, self._config.grace_s, self._launch, None)
        self.flush(min(share * (killed_at - margin - time.monotonic()), AT_THE_END_S))

    def flush(self, seconds: float) -> None:
        """Send all that is there, the newest step first, for so many seconds at most."""
        if self._mirror is None or self._mirror.flush(max(seconds, 0.0)):
            return
        state = self._mirror.state
        logger.warning(
            f"mirror    step {state.step} is the newest in {state.url}: {state.error or 'there was no time for more'};"
            f" ci-llm checkpoints push {self._config.run_folder} {state.url} sends the rest from this disk"
        )

    def end(self, status: str | None, error: BaseException | None) -> None:
        """The last flush of an attempt, when all its files are written; then the thread ends.

        Args:
            status: completed or interrupted; None: neither.
            error: that ended it. If it is a KeyboardInterrupt, nothing waits.
        """
        if self._mirror is None:
            return
        try:
            if status == "interrupted":
                self.flush_before_kill()
            elif status == "completed" or isinstance(error, Exception):
                self.flush(LAST_FILES_S)
        finally:
            self._mirror.close()
