"""The errors of this package: what happened, where, and what the reader can do now.

CiLlmError                  exit 1
├── BadInput                exit 2: the call, the configuration or the data must change; nothing was created
│   ├── ConfigError         a key, a value, a combination, the command line
│   ├── DataError           the data set: missing, unusable columns, nothing left
│   ├── ModelError          the base model, its adapters, its precision
│   └── LaunchError         the way the processes were started
├── CheckpointError         a checkpoint cannot be written or read
│   ├── DamagedCheckpoint   verification failed: a digest, a size, a missing file
│   ├── ForeignCheckpoint   exit 2: whole, but of another run: other K, rank, base, data
│   ├── OtherFormat         exit 2: whole, but written by a program with another format of checkpoints
│   ├── MirrorUnreachable   the object store of a mirror does not answer, or refuses
│   └── WriterBusy          exit 2: another live process owns this output folder
├── PeerLost                another process of the run is gone or silent
└── GivenUp                 the run cannot recover by itself: a supervisor or a person must act
    ├── NonFinite           numbers that are not finite, again and again
    ├── OutOfMemory         one row at a time does not fit
    ├── Hang                no progress for too long
    ├── RewardFailed        a reward raises, takes too long, or gives no numbers
    └── AllTrialsFailed     exit 2: no trial of a sweep had finite numbers: its spaces must change
"""

from __future__ import annotations


class CiLlmError(Exception):
    """An error that says what happened, where, and what to do.

    Args:
        what: one sentence that says what is wrong.
        where: the file, line, key or folder it is about.
        hint: what the reader can do now.

    Attributes:
        exit_code: the exit code of a command that ends with it: 2 for bad input, else 1.

    Examples:
        >>> try:
        ...     ci_llm.Config(num_agents=0)
        ... except ci_llm.CiLlmError as error:
        ...     print(error.exit_code, error.hint)
        2 the default is 4
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.hint:
            lines.append(f"  hint:  {self.hint}")
        return "\n".join(lines)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class BadInput(CiLlmError):
    """The call, the configuration or the data must change; nothing was created or lost."""

    exit_code = 2


class ConfigError(BadInput):
    """A key, a value, a combination of both, or the command line."""


class DataError(BadInput):
    """The data set is missing, has no usable column, or holds nothing that can be trained on."""


class ModelError(BadInput):
    """The base model or its adapters do not fit what was asked for."""


class LaunchError(BadInput):
    """The way in which the processes were started cannot work."""


class CheckpointError(CiLlmError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpoint(CheckpointError):
    """A file of the checkpoint is missing, has another size, or another digest."""


class ForeignCheckpoint(CheckpointError):
    """The checkpoint is whole but belongs to another run."""

    exit_code = 2


class OtherFormat(CheckpointError):
    """The checkpoint is whole, but a program with another format of checkpoints wrote it."""

    exit_code = 2


class ProgressLost(CheckpointError):
    """Every checkpoint that a run had is damaged."""


class MirrorUnreachable(CheckpointError):
    """The object store of a mirror does not answer, or refuses."""


class WriterBusy(CheckpointError):
    """Another live process writes to this output folder."""

    exit_code = 2


class StoppedBeforeMeeting(CiLlmError):
    """The run was asked to stop before its processes had met: nothing has begun."""


class PeerLost(CiLlmError):
    """Another process of this run is gone or silent: no collective is possible any more."""


class GivenUp(CiLlmError):
    """The run cannot recover by itself, and this attempt ends.

    Args:
        step: the last step that is known to be good; None for the present step.

    Attributes:
        reason: a word for scripts, in status.json and in `attempts/<n>/process_<i>.json`.
    """

    reason = "given_up"

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, step: int | None = None
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.step = step


class NonFinite(GivenUp):
    """A loss or a gradient is not finite, again and again."""

    reason = "nonfinite"


class OutOfMemory(GivenUp):
    """A single row at a time does not fit into memory."""

    reason = "out_of_memory"


class Hang(GivenUp):
    """The run has made no progress for too long."""

    reason = "hang"


class RewardFailed(GivenUp):
    """A function that rewards completions raises, takes too long, or does not return numbers."""

    reason = "reward"


class AllTrialsFailed(GivenUp):
    """No trial of a sweep had finite numbers; the same call fails again."""

    exit_code = 2
    reason = "all_trials_failed"
