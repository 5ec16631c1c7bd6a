"""The mirror of one run: it fills an empty disk, follows the checkpoints, and sends the last files within the grace.

It works on the main process only. On other processes, and without the key `mirror`, its methods do nothing.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import expected_kill
from ci_llm.cluster.launch import Launch
from ci_llm.cluster.slurm import read_job
from ci_llm.config import Config
from ci_llm.core.run_folder import BEGINNING, CROWD_CHANGES, EVALUATION, PUSH_RECORD, RECOVERY, SKIPPED_BATCHES
from ci_llm.interrupts import Interrupts
from ci_llm.mirror.filling import fill
from ci_llm.mirror.head import Found
from ci_llm.mirror.sender import Mirror

logger = logging.getLogger(__name__)

#: The files that are sent beside the checkpoints: those for people, and those for the next attempt.
RUN_FILES: Final = (
    *(BEGINNING, CROWD_CHANGES, RECOVERY, SKIPPED_BATCHES, "status.json", "training.log"),
    "metrics.jsonl",
    *(EVALUATION, "gpu_stats.json", "report.html", PUSH_RECORD, "attempts/*/*.json"),
    *("tensorboard/*", "tensorboard/*/*", "tensorboard/*/*/*"),
)
#: How long a run that nobody kills waits until its mirror has the checkpoints.
AT_THE_END_S: Final = 600.0
#: How long a run that is complete or has failed waits until its mirror has the last files.
LAST_FILES_S: Final = 30.0
MARGIN_S: Final = 1.0
#: Time kept for the request to requeue a SLURM job, which comes after the last file.
REQUEUE_S: Final = 4.0
#: The share of the grace for checkpoints; the rest is for the status, which is written even if the store is silent.
SHARE_BEFORE_STATUS: Final = 0.6


class RunMirror:
    """The mirror of one run, if it has one; a context manager around the attempt that writes the run.

    Args:
        on_change: called with the state of the mirror, as status.json shows it, in the thread of the mirror.
    """

    def __init__(
        self,
        config: Config,
        manager: CheckpointManager,
        launch: Launch,
        interrupts: Interrupts,
        on_change: Callable[[dict[str, Any]], object],
    ) -> None:
        self._config, self._manager, self._launch, self._interrupts = config, manager, launch, interrupts
        self._mirror: Mirror | None = None
        self._found = Found()
        self._stop: str | None = None
        if config.mirror is not None and launch.is_main_process:
            self._mirror = Mirror(
                config.mirror,
                config.run_folder,
                keep=config.save_total_limit,
                files=RUN_FILES,
                max_mb_per_s=config.mirror_max_mb_per_s,
                on_change=lambda state: on_change(asdict(state)),
            )

    def fill_disk(self) -> None:
        """Copy the newest step that verifies to the disk, if only the mirror has it, before anything is decided.

        Raises:
            CheckpointError: the mirror holds another run, or does not answer while the disk is empty.
        """
        if self._mirror is not None:
            self._found = fill(self._mirror.reader, self._manager, RUN_FILES)

    def begin(self, keeps: int, attempt: int) -> None:
        """Claim the mirror for this attempt, whose folder is leased, and send from here on.

        Args:
            keeps: the mirror's checkpoints after this step are superseded; -1: all of them.

        Raises:
            WriterBusy: the mirror holds another run, or another attempt has claimed it since `fill_disk`.
        """
        if (mirror := self._mirror) is not None:
            mirror.begin(keeps, attempt, self._found)
            self._manager.saver.after_save = lambda result: mirror.wake()
            logger.info(f"mirror    {mirror.state.url}")

    @property
    def sending(self) -> frozenset[int]:
        """The step that is being sent, which must not be pruned meanwhile."""
        return frozenset() if self._mirror is None else self._mirror.sending

    def metrics(self) -> dict[str, float]:
        """How far the mirror is behind, for a line of metrics."""
        return {} if self._mirror is None else self._mirror.metrics()

    def send_last_save(self, stop: str | None) -> None:
        """Send the last checkpoint, before the status says how the run ended.

        Args:
            stop: why the run was asked to stop; None if it is complete.
        """
        self._stop = stop
        if stop is None:
            self.flush(AT_THE_END_S)
        else:
            self.flush_before_kill(SHARE_BEFORE_STATUS)

    def flush_before_kill(self, share: float = 1.0) -> None:
        """Send the last checkpoint, for a share of the time that is left until the process is killed."""
        margin = MARGIN_S if read_job() is None else MARGIN_S + REQUEUE_S
        killed_at = expected_kill(self._interrupts, self._config.grace_s, self._launch, None)
        self.flush(min(share * (killed_at - margin - time.monotonic()), AT_THE_END_S))

    def flush(self, seconds: float) -> None:
        """Send everything, the newest step first, for at most this many seconds."""
        if self._mirror is None or self._mirror.flush(max(seconds, 0.0)):
            return
        state = self._mirror.state
        again = shlex.join(["ci-llm", "checkpoints", "push", str(self._config.run_folder), state.url])
        logger.warning(
            f"mirror    step {state.step} is the newest in {state.url}: {state.error or 'there was no time for more'};"
            f" {again} sends the rest from this disk"
        )

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Send the last files of an attempt, unless a KeyboardInterrupt ended it, and end the thread of the mirror."""
        if self._mirror is None:
            return
        try:
            if error is None and self._stop is not None:
                self.flush_before_kill()
            elif error is None or isinstance(error, Exception):
                self.flush(LAST_FILES_S)
        finally:
            self._mirror.stop()
