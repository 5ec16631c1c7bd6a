"""Another training script: how it gets its configuration, what can be adjusted in it, and what its end means."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ci_llm.cluster.launch import SUPERVISED, step_notes
from ci_llm.cluster.slurm import requeue
from ci_llm.errors import ConfigError
from ci_llm.interrupts import SAVE_SIGNALS, signal_number
from ci_llm.supervisor.attempt import AttemptResult
from ci_llm.supervisor.classify import classify_by_output
from ci_llm.supervisor.config_words import with_file, with_name
from ci_llm.supervisor.options import Options
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision, Outcome
from ci_llm.supervisor.printed_rate import CutWatch
from ci_llm.supervisor.resumption import Resumption
from ci_llm.supervisor.script_config import (
    ConfigText,
    TemporaryConfigs,
    group_values,
    in_yaml,
    overrides,
    read_config,
    rewritten,
    same_key,
)
from ci_llm.supervisor.settings import BATCH_SIZE_KEYS, LEARNING_RATE_KEYS, Settings, integer, number

GRACE_S: Final = 10.0
MAX_REQUEUES: Final = 100
_HINT: Final = "another key may set the rate (--lr-key names it), or a checkpoint that the script resumes from"


class ExternalScript:
    """A script that knows nothing of us. Its configuration is handed on as contract A3b of the documentation says.

    Raises:
        ConfigError: script or configuration cannot be found, or a key that was named is in neither.
    """

    def __init__(self, call: Options) -> None:
        self._call = call
        self.starts_anew = not (call.on_retry or call.goes_on_from)
        self.grace_s = GRACE_S if call.grace_s is None else call.grace_s
        self.own_patterns = call.own_patterns
        if call.stop_signal is not None:
            signal_number(call.stop_signal)
        if not call.command and not call.script.is_file():
            raise ConfigError(
                "there is no such training script",
                where=str(call.script),
                hint="name one by --train-script FILE, or give the whole command after --",
            )
        self._original = _find_config(call)
        self._config = read_config(self._original) if self._original else ConfigText("", {})
        self._digest = _digest(self._original)
        self._temporary = TemporaryConfigs(self._original) if self._original else None
        self._in_use = self._original
        self._resumption = Resumption(call.on_retry, call.goes_on_from)
        self._checkpoint_before = self._resumption.newest()
        self._line = self._given_line()
        self._adjusted: dict[str, str] = {}
        self._from_groups = self._group_values()
        settings = self._settings()
        self._lr_key = settings.find_key(call.lr_key, "--lr-key", LEARNING_RATE_KEYS)
        self._batch_key = settings.find_key(call.batch_size_key, "--batch-size-key", BATCH_SIZE_KEYS)
        self._scaled_keys = settings.find_scaled_keys(call.scale_with_batch)
        self._cuts = CutWatch(number(self._value(self._lr_key)))
        self._doubt: str | None = None
        self._hint: str | None = _HINT

    # What is run

    def begin(self) -> list[str]:
        """Remove the temporary configurations of a supervisor that was killed; returns what is supervised."""
        lines = step_notes(os.environ)
        if self._original is not None:
            lines.append(f"configuration: {self._original}, which stays as it is")
        if self._lr_key is None:
            lines.append("no learning rate found: NaN cannot be helped (name its key by --lr-key)")
        if self._batch_key is None:
            lines.append("no batch size found: out of memory cannot be helped (name its key by --batch-size-key)")
        if resuming := self._resumption.words():
            lines.append(f"the script goes on: {shlex.join(resuming)} (to begin anew, move its checkpoints away)")
        leftovers = self._temporary.sweep() if self._temporary else []
        return lines + [f"removed {path}, left by a supervisor that was killed" for path in leftovers]

    def environment(self) -> Mapping[str, str]:
        """Ours; only a trainer of this project would take notice of the addition."""
        self._line = self._given_line()
        self._checkpoint_before = self._resumption.newest()
        return {SUPERVISED: f"{self.grace_s:g}", **os.environ}

    def command(self) -> list[str]:
        """The script with its configuration as the last adjustment left it."""
        line = rewritten(self._line, self._adjusted) + self._appended()
        if self._in_use is None or self._original is None:
            return self._start() + line
        if self._call.command:
            return self._with_configuration(line, self._original, self._in_use)
        if self._call.config_flag:
            return [*self._start(), self._call.config_flag, str(self._in_use), *line]
        folder = str(self._hydra_folder().absolute())
        return [*self._start(), "--config-path", folder, "--config-name", self._hydra_name(self._in_use), *line]

    def orders(self, evidence: Evidence) -> tuple[str, str] | None:
        """A script whose loss is NaN is ended: whatever it still computes is lost."""
        return ("SIGTERM", "nonfinite") if evidence.nonfinite else None

    def stop_signal(self, stop_reason: str) -> str:
        """The signal that came: many scripts save at Ctrl-C, and others at TERM."""
        return self._call.stop_signal or stop_reason.removeprefix("signal:")

    def save_now(self) -> str:
        """Nobody knows what another script would make of it."""
        return f"{SAVE_SIGNALS[0]} is for the training: send it to its own process"

    def verdict(self, ending: AttemptResult) -> Outcome:
        """What exit code, signal, output and its own checkpoints say."""
        rate = number(self._value(self._lr_key))
        outcome = classify_by_output(
            ending,
            learning_rate=rate,
            batch_size=integer(self._value(self._batch_key)),
            lasting_s=self._call.policy.lasting_s,
        )
        doubt = self._doubt = self._cuts.doubt(rate, ending.evidence.learning_rate)
        return replace(
            outcome,
            progress=outcome.progress or (outcome.kind != "nonfinite" and self._has_saved()),
            detail="; ".join(filter(None, (outcome.detail, doubt and f"the cut is not believed: {doubt}"))),
        )

    def _has_saved(self) -> bool:
        return self._resumption.newest() != self._checkpoint_before

    # What is adjusted

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Put new values where the script will find them: on its command line, and in a copy of its configuration."""
        self._resumption.note_retry()
        new: dict[str, str] = {}
        if decision.learning_rate is not None and self._lr_key is not None:
            new[self._lr_key] = in_yaml(decision.learning_rate)
        if decision.batch_size is not None and self._batch_key is not None:
            new[self._batch_key] = str(decision.batch_size)
            new |= self._scaled()
        lines = [f"{key}: {self._value(key)} -> {value}" for key, value in new.items()]
        if self._doubt and self._hint:
            lines.append(self._hint)
            self._hint = None  # once is enough
        self._adjusted |= new
        in_copy = {key: value for key, value in self._adjusted.items() if self._goes_into_copy(key)}
        if new and in_copy and self._temporary is not None:
            self._in_use = self._temporary.create(retry, self._config.replaced(in_copy))
        return lines

    @property
    def called_again(self) -> str:
        """Whether the script goes on or begins anew next time."""
        return self._resumption.called_again

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask SLURM to run this job again."""
        return requeue("auto", stop_reason or "", max_requeues=MAX_REQUEUES, without_progress=0)

    def close(self) -> list[str]:
        """Remove the temporary configuration and see that the original is what it was."""
        if self._temporary is None:
            return []
        self._temporary.close()
        if _digest(self._original) == self._digest:
            return [f"original unchanged: {self._original}"]
        return [f"original changed meanwhile, but not by this program: {self._original}"]

    def _scaled(self) -> dict[str, str]:
        values = {key: integer(self._value(key)) for key in self._scaled_keys}
        reduction = self._call.policy.reduction
        return {key: str(max(1, int(value / reduction))) for key, value in values.items() if value is not None}

    # Its command line and its values

    def _given_line(self) -> list[str]:
        return [*self._call.command, *self._call.words, *self._resumption.words()]

    def _start(self) -> list[str]:
        return [] if self._call.command else [sys.executable, str(self._call.script)]

    def _appended(self) -> list[str]:
        """Adjusted keys that stand neither on the command line nor in the copy of the configuration."""
        on_line = [one.key for one in overrides(self._line)]
        dashes = "--" if self._call.override_style == "argparse" else ""
        return [
            f"{dashes}{key}={value}"
            for key, value in self._adjusted.items()
            if not self._goes_into_copy(key) and not any(same_key(key, known) for known in on_line)
        ]

    def _goes_into_copy(self, key: str) -> bool:
        """Whether the script reads the key from the file that we hand to it, and nothing there overrules it."""
        return key in self._config.leaves and self._hands_on_config() and self._settings().swept(key) is None

    def _hands_on_config(self) -> bool:
        if self._original is None or not self._call.command:
            return self._original is not None
        elsewhere = self._original.with_name(f"other_{self._original.name}")
        return self._with_configuration(self._line, self._original, elsewhere) != self._line

    def _with_configuration(self, line: list[str], original: Path, other: Path) -> list[str]:
        """A command that names its configuration, with another one."""
        line = with_file(line, original, other)
        if self._call.folder_and_name is None:
            return line
        return with_name(line, self._hydra_name(original), self._hydra_name(other))

    def _value(self, key: str | None) -> str | None:
        return self._adjusted.get(key or "") or self._settings().value(key)

    def _settings(self) -> Settings:
        in_file = {key: leaf.text for key, leaf in self._config.leaves.items()}
        return Settings(self._line, in_file, self._from_groups)

    def _group_values(self) -> dict[str, str]:
        is_hydra = not self._call.config_flag and (not self._call.command or self._call.folder_and_name is not None)
        if self._original is None or not is_hydra:
            return {}
        return group_values(self._hydra_folder(), self._config, self._line)

    def _hydra_folder(self) -> Path:
        """The folder that Hydra searches: as given, or where the file lies."""
        assert self._original is not None
        given = self._call.folder_and_name
        return given[0] if given else self._original.parent

    def _hydra_name(self, path: Path) -> str:
        return path.relative_to(self._hydra_folder()).with_suffix("").as_posix()


def _find_config(call: Options) -> Path | None:
    """The original configuration; None for a command that stands on its own."""
    if call.config is not None:
        path = call.config
    elif call.folder_and_name is not None:
        path = _with_suffix(Path(*call.folder_and_name))
    elif call.command:
        return None
    else:
        path = Path("configs", "config.yaml")
    if not path.is_file():
        raise ConfigError(
            f"the configuration of {call.script} cannot be found",
            where=str(path),
            hint="--config-path DIR --config-name NAME, or --config FILE; a command without one: -- python fit.py ...",
        )
    return path


def _with_suffix(path: Path) -> Path:
    return path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")


def _digest(path: Path | None) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest() if path else None
    except OSError:
        return None
