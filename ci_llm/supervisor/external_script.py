"""An external training script as a target: its command, how it resumes, and its end as told by its output."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from ci_llm.cluster.launch import SUPERVISED, step_notes
from ci_llm.cluster.slurm import read_job, requeue
from ci_llm.errors import ConfigError
from ci_llm.interrupts import SAVE_SIGNALS, signal_number
from ci_llm.supervisor.child import AttemptResult, StopOrder
from ci_llm.supervisor.options import Options
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision, Outcome, classify_by_output
from ci_llm.supervisor.script_settings import BATCH_SIZE_KEYS, LEARNING_RATE_KEYS, ScriptCommand, integer, number, shown

_NEWEST: Final = "{checkpoint}"


class Resumption:
    """The words of --on-retry, and the attempts that get them.

    Without --goes-on-from every attempt but the first gets them; the first one of a job that SLURM has requeued is a
    second one too. With --goes-on-from every attempt gets them for which a file or folder matches: the first attempt of
    a call then resumes from what an earlier call left.

    Args:
        on_retry: the words as typed; `{checkpoint}` in them stands for the newest match.
        goes_on_from: a glob pattern that the script's checkpoints match.

    Attributes:
        is_retry: an attempt has run already: the next one is a retry.

    Raises:
        ConfigError: the words cannot be split, or name a checkpoint without a pattern that finds it.
    """

    def __init__(self, on_retry: str | None, goes_on_from: str | None, environ: Mapping[str, str] = os.environ) -> None:
        try:
            self._words, self._pattern = shlex.split(on_retry or ""), goes_on_from
        except ValueError as error:
            raise ConfigError(f"the words cannot be told apart: {error}", where=f"--on-retry {on_retry}") from error
        if goes_on_from is None and any(_NEWEST in word for word in self._words):
            raise ConfigError(
                f"{_NEWEST} stands for nothing",
                where=f"--on-retry {on_retry}",
                hint="say what the script's checkpoints look like: --goes-on-from 'out/checkpoint-*'",
            )
        job = read_job(environ)
        self.is_retry = job is not None and job.restarts > 0

    def words(self) -> list[str]:
        """Return what the next attempt gets in addition."""
        newest = self.newest()
        if self._pattern is None:
            return self._words if self.is_retry else []
        return [word.replace(_NEWEST, newest[0]) for word in self._words] if newest else []

    def newest(self) -> tuple[str, int] | None:
        """Return the path of the newest checkpoint and its time in ns; None without any."""
        # By time and not by name: "checkpoint-900" sorts after "checkpoint-1000".
        found = glob.glob(self._pattern, recursive=True) if self._pattern else []
        return max(((path, _newest_ns(Path(path))) for path in found), key=lambda one: one[1], default=None)

    @property
    def rerun_effect(self) -> str:
        """The effect of the same call after an interruption; the end of a sentence."""
        if words := self.words():
            return f"the same command resumes, with {shown(words)}"
        if not self._words:
            return "the script begins again next time, unless it resumes by itself (--on-retry can tell it to)"
        return f"the same command begins again; with {shown(self._words)} it would resume"


def _newest_ns(path: Path) -> int:
    """The time of the last write of a file, or of anything in a folder: some scripts write over their checkpoint."""
    # os.walk leaves out a folder that is removed meanwhile, where rglob would raise.
    inside = [Path(folder, name) for folder, *names in os.walk(path) for name in chain(*names)]
    return max(_modified_ns(one) for one in [path, *inside])


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # the script has just deleted it
        return 0


GRACE_S: Final = 10.0


class ExternalScript:
    """A target that is some other training script. See `OwnRun` for the attributes.

    Raises:
        ConfigError: the script or its configuration cannot be found, or a named key is in neither.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.restarts_from_scratch = not (options.on_retry or options.goes_on_from)
        self.grace_s = GRACE_S if options.grace_s is None else options.grace_s
        self.stop_signal = options.stop_signal  # many scripts save at Ctrl-C, others at TERM
        if options.stop_signal is not None:
            signal_number(options.stop_signal)  # raises for a signal that does not exist
        self._resumption = Resumption(options.on_retry, options.goes_on_from)
        self._checkpoint_before = self._resumption.newest()
        self._command = ScriptCommand(options, self._resumption.words())
        self._lr_key = self._command.find_key(options.lr_key, "--lr-key", LEARNING_RATE_KEYS)
        self._batch_key = self._command.find_key(options.batch_size_key, "--batch-size-key", BATCH_SIZE_KEYS)
        self._scaled_keys = self._command.find_scaled_keys(options.scale_with_batch)

    def prepare(self) -> list[str]:
        """The configuration, the keys that are unknown, and how the script resumes."""
        lines, config = step_notes(os.environ), self._command.config
        if config is not None:
            lines.append(f"configuration: {config.path}, which stays as it is")
        if self._lr_key is None:
            lines.append("no learning rate found: NaN cannot be helped (name its key by --lr-key)")
        if self._batch_key is None:
            lines.append("no batch size found: out of memory cannot be helped (name its key by --batch-size-key)")
        if resume_words := self._resumption.words():
            lines.append(f"the script resumes: {shown(resume_words)} (to begin again, move its checkpoints away)")
        return lines

    def begin_attempt(self) -> tuple[list[str], Mapping[str, str]]:
        """The script with its configuration as the last adjustment left it, in the environment of this process."""
        # Looked up for every attempt: the last one may have written a checkpoint.
        self._checkpoint_before = self._resumption.newest()
        self._command.resume_words = self._resumption.words()
        return self._command.words(), {SUPERVISED: f"{self.grace_s:g}", **os.environ}

    def stop_order(self, evidence: Evidence) -> StopOrder | None:
        """End a script whose loss is NaN: everything that it computes from then on is lost."""
        return StopOrder("SIGTERM", "nonfinite") if evidence.nonfinite else None

    def request_save(self) -> str:
        """Pass nothing on: most scripts would die of the signal."""
        return f"{SAVE_SIGNALS[0]} is for the training: send it to its own process"

    def classify(self, result: AttemptResult) -> Outcome:
        """Classify by exit code, signal, output, and the checkpoints that `--goes-on-from` finds."""
        kind, detail = classify_by_output(result)
        has_saved = self._resumption.newest() != self._checkpoint_before
        return Outcome(
            kind,
            detail,
            progress=has_saved or result.duration_s >= self._options.policy.progress_after_s,
            learning_rate=number(self._command.value(self._lr_key)),
            batch_size=integer(self._command.value(self._batch_key)),
            duration_s=result.duration_s,
        )

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Put new values on the command line of the script, or into a copy of its configuration."""
        self._resumption.is_retry = True
        new: dict[str, float] = {}
        if decision.learning_rate is not None and self._lr_key is not None:
            new[self._lr_key] = float(f"{decision.learning_rate:.8g}")
        if decision.batch_size is not None and self._batch_key is not None:
            new[self._batch_key] = decision.batch_size
            for key in self._scaled_keys:
                if (value := integer(self._command.value(key))) is not None:
                    new[key] = max(1, int(value / self._options.policy.reduction))
        before = {key: self._command.value(key) for key in new}
        self._command.adjust(new, retry)
        return [f"{key}: {value} -> {self._command.value(key)}" for key, value in before.items()]

    @property
    def rerun_effect(self) -> str:
        """See `Resumption.rerun_effect`."""
        return self._resumption.rerun_effect

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask SLURM to run this job again."""
        return requeue("auto", stop_reason or "", without_progress=0)

    def clean_up(self) -> list[str]:
        """Remove the temporary configuration."""
        if self._command.config is not None:
            self._command.config.remove_copy()
        return []
