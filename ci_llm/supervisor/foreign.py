"""Another training script: how it gets its configuration, what can be adjusted in it, and what its end means."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from ci_llm.errors import ConfigError
from ci_llm.interrupts import SAVE_SIGNALS
from ci_llm.launch import SUPERVISED, outside_of_a_step
from ci_llm.slurm import put_back
from ci_llm.supervisor.attempt import Ending, Order
from ci_llm.supervisor.call import Call
from ci_llm.supervisor.configs import ConfigText, TemporaryConfigs, in_yaml, read_config
from ci_llm.supervisor.decide import Decision, Outcome
from ci_llm.supervisor.evidence import Evidence
from ci_llm.supervisor.hydra_groups import group_values
from ci_llm.supervisor.overrides import overrides, rewritten, same_key, value_of
from ci_llm.supervisor.verdict import judge_by_output

GRACE_S: Final = 10.0
MAX_REQUEUES: Final = 100
LEARNING_RATE_KEYS: Final = ("training.learning_rate", "learning_rate")
BATCH_SIZE_KEYS: Final = ("training.meta_batch_size", "training.batch_size", "batch_size")
SCALED_KEY: Final = ("training.", ".constant_product")


class ForeignScript:
    """A script that knows nothing of us. Its configuration is handed on as contract A3b of the documentation says.

    Raises:
        ConfigError: script or configuration cannot be found, or a key that was named is in neither.
    """

    starts_anew = True

    def __init__(self, call: Call) -> None:
        self._call = call
        self.grace_s = GRACE_S if call.grace_s is None else call.grace_s
        self._words = list(call.words)
        self._command = list(call.command)
        if not self._command and not call.script.is_file():
            raise ConfigError(
                "there is no such training script",
                where=str(call.script),
                cure="name one by --train-script FILE, or give the whole command after --",
            )
        self._original = _find_config(call)
        self._config = read_config(self._original) if self._original else ConfigText("", {})
        self._digest = _digest(self._original)
        self._temporary = TemporaryConfigs(self._original) if self._original else None
        self._in_use = self._original
        self._from_groups = self._group_values()
        self._adjusted: dict[str, str] = {}
        self._lr_key = self._find_key(call.lr_key, "--lr-key", LEARNING_RATE_KEYS)
        self._batch_key = self._find_key(call.batch_size_key, "--batch-size-key", BATCH_SIZE_KEYS)
        self._scaled_keys = self._find_scaled_keys()

    # What is run

    def begin(self) -> list[str]:
        """Remove the temporary configurations of a supervisor that was killed; returns what is supervised."""
        lines = outside_of_a_step(os.environ)
        if self._original is not None:
            lines.append(f"configuration: {self._original}, which stays as it is")
        if self._lr_key is None:
            lines.append("no learning rate found: NaN cannot be helped (name its key by --lr-key)")
        if self._batch_key is None:
            lines.append("no batch size found: out of memory cannot be helped (name its key by --batch-size-key)")
        leftovers = self._temporary.sweep() if self._temporary else []
        return lines + [f"removed {path}, left by a supervisor that was killed" for path in leftovers]

    def command(self) -> list[str]:
        """The script with its configuration as the last adjustment left it."""
        if self._command:
            return self._command + self._words
        start = [sys.executable, str(self._call.script)]
        if self._in_use is None:
            return start + self._words
        if self._call.config_flag:
            return [*start, self._call.config_flag, str(self._in_use), *self._words]
        folder = self._hydra_folder()
        name = self._in_use.relative_to(folder).with_suffix("").as_posix()
        return [*start, "--config-path", str(folder.absolute()), "--config-name", name, *self._words]

    def environment(self) -> Mapping[str, str]:
        """Ours; only a trainer of this project would take notice of the addition."""
        return {SUPERVISED: f"{self.grace_s:g}", **os.environ}

    def orders(self, evidence: Evidence) -> tuple[Order, str] | None:
        """A script whose loss is NaN is ended: whatever it still computes is lost."""
        return ("end", "nonfinite") if evidence.nonfinite else None

    def save_now(self) -> str:
        """Nobody knows what another script would make of it."""
        return f"{SAVE_SIGNALS[0]} is for the training: send it to its own process"

    def verdict(self, ending: Ending) -> Outcome:
        """What exit code, signal and output say."""
        return judge_by_output(
            ending,
            learning_rate=_number(self._value(self._lr_key)),
            batch_size=_integer(self._value(self._batch_key)),
            lasting_s=self._call.policy.lasting_s,
        )

    # What is adjusted

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Put new values where the script will find them: on its command line, and in a copy of its configuration."""
        new: dict[str, str] = {}
        if decision.learning_rate is not None and self._lr_key is not None:
            new[self._lr_key] = in_yaml(decision.learning_rate)
        if decision.batch_size is not None and self._batch_key is not None:
            new[self._batch_key] = str(decision.batch_size)
            new |= self._scaled()
        lines = [f"{key}: {self._value(key)} -> {value}" for key, value in new.items()]
        self._adjusted |= new
        if new:
            self._hand_on(retry)
        return lines

    def put_back(self, stop_reason: str | None) -> str | None:
        """Ask SLURM to run this job again. Whether the script goes on or begins anew then is its own business."""
        return put_back("auto", stop_reason or "", max_requeues=MAX_REQUEUES, in_vain=0)

    def close(self) -> list[str]:
        """Remove the temporary configuration and see that the original is what it was."""
        if self._temporary is None:
            return []
        self._temporary.close()
        if _digest(self._original) == self._digest:
            return [f"original unchanged: {self._original}"]
        return [f"original changed meanwhile, but not by this program: {self._original}"]

    def _hand_on(self, retry: int) -> None:
        on_line = {one.key for one in overrides(self._command + self._words)}
        self._command = rewritten(self._command, self._adjusted)
        self._words = rewritten(self._words, self._adjusted)
        in_file = {} if self._command else {k: v for k, v in self._adjusted.items() if k in self._config.leaves}
        for key, value in self._adjusted.items():
            if key not in in_file and not any(same_key(key, known) for known in on_line):
                self._words.append(f"{key}={value}")
        if in_file and self._temporary is not None:
            self._in_use = self._temporary.create(retry, self._config.replaced(in_file))

    def _scaled(self) -> dict[str, str]:
        values = {key: _integer(self._value(key)) for key in self._scaled_keys}
        reduction = self._call.policy.reduction
        return {key: str(max(1, int(value / reduction))) for key, value in values.items() if value is not None}

    # Where values are

    def _value(self, key: str | None) -> str | None:
        """The value in force of a dotted key, as text."""
        if key is None:
            return None
        on_line = value_of(self._command + self._words, key)
        leaf = self._config.leaves.get(key)
        in_files = leaf.text if leaf else self._from_groups.get(key)
        return self._adjusted.get(key) or on_line or in_files

    def _find_key(self, named: str | None, option: str, usual: Iterable[str]) -> str | None:
        if named is None:
            return next((key for key in usual if _number(self._value(key)) is not None), None)
        return self._require(named, option)

    def _require(self, key: str, option: str) -> str:
        """A key that was named must have a value to start from."""
        if _number(self._value(key)) is None:
            raise ConfigError(
                f"{key} has no value that is a number",
                where=f"{option} {key}",
                cure=f"{key}=VALUE on the command line, or in the configuration, says where to start from",
            )
        return key

    def _find_scaled_keys(self) -> list[str]:
        if self._call.scale_with_batch:
            return [self._require(key, "--scale-with-batch") for key in self._call.scale_with_batch]
        on_line = [one.key for one in overrides(self._command + self._words)]
        known = dict.fromkeys([*self._config.leaves, *self._from_groups, *on_line])
        return [key for key in known if key.startswith(SCALED_KEY[0]) and key.endswith(SCALED_KEY[1])]

    def _group_values(self) -> dict[str, str]:
        if self._original is None or self._command or self._call.config_flag:
            return {}
        return group_values(self._hydra_folder(), self._config, self._words)

    def _hydra_folder(self) -> Path:
        """The folder that Hydra searches: as given, or where the file lies."""
        assert self._original is not None
        return self._call.config_path or self._original.parent


def _find_config(call: Call) -> Path | None:
    """The original configuration; None for a command that stands on its own."""
    if call.config is not None:
        path = call.config
    elif call.config_path is not None and call.config_name is not None:
        path = _with_suffix(call.config_path / call.config_name)
    elif call.command:
        return None
    else:
        path = Path("configs", "config.yaml")
    if not path.is_file():
        raise ConfigError(
            f"the configuration of {call.script} cannot be found",
            where=str(path),
            cure="--config-path DIR --config-name NAME, or --config FILE; a command without one: -- python fit.py ...",
        )
    return path


def _with_suffix(path: Path) -> Path:
    return path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")


def _digest(path: Path | None) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest() if path else None
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 < value < float("inf") else None


def _integer(text: str | None) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value == int(value) else None
