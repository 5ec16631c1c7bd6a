"""The `Config` of a run: sound values for all keys, also for auto, as YAML, compared with another, and in words."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pydantic.fields import FieldInfo

from ci_llm.config.agents import OwnEntries, own_values, take_own_entries
from ci_llm.config.auto import FOLLOWED, settled, stands_for
from ci_llm.config.foreign import FIELDS, NO_EFFECT, read_without_effect
from ci_llm.config.own_keys import OWN_KEYS, KeysOfEach, overriding
from ci_llm.config.parsing import Entry, Items, Mapped, Raw, Scalar, Unusable
from ci_llm.config.problems import Problem, by_key, clashing, error_of, find_clashes, find_notices, sound_values
from ci_llm.config.schema import FOUND, AllKeys, ChangeKind, Keys, meaning_of
from ci_llm.config.yaml_file import dump_value, dump_yaml
from ci_llm.core.imports import allow_import
from ci_llm.errors import ConfigError

WIDTH = 110
COLUMN = 45  # of the text beside a key


def groups() -> dict[str, list[str]]:
    """The keys below the title of their group, in order."""
    classes = [base for base in reversed(AllKeys.__mro__) if issubclass(base, Keys) and base is not Keys]
    return {str(base.__doc__): [key for key in FIELDS if key in base.__annotations__] for base in classes}


def given_groups() -> dict[str, list[str]]:
    """`groups` without what the run itself finds."""
    return {title: keys for title, keys in groups().items() if FOUND[0] not in keys}


def describe_keys(chosen: Sequence[str] = ()) -> str:
    """These keys of a run for `--help`; without a choice all, group by group."""
    parts = [f"{title}\n{describe(AllKeys, keys)}" for title, keys in given_groups().items()]
    return describe(AllKeys, chosen) if chosen else "\n\n".join(parts)


def with_default(key: str, field: FieldInfo) -> str:
    """The key with its default, as on a command line."""
    return f"{key}={dump_value(field.default)}".replace('"', "")


def describe(keys: type[Keys], chosen: Iterable[str]) -> str:
    """These of the keys for `--help`: key, default, what it is and in which unit."""
    lines = []
    for key in chosen:
        field = keys.model_fields[key]
        begin = f"  {with_default(key, field):<{COLUMN - 3}} "
        lines += textwrap.wrap(str(field.description), WIDTH, initial_indent=begin, subsequent_indent=" " * COLUMN)
    return "\n".join(lines)


#: Keys of which a run that begins decides by its machine, if they say auto.
BY_MACHINE: Final = ("mixed_precision", "model_dtype", "kernels", "pass_per_agent", "use_gradient_checkpointing")


@dataclass(frozen=True)
class Change:
    """A key that differs between two configurations, and what that means for resuming one with the other.

    `kind`: free (logging, saving, paths), schedule (how long the run is) or sample-exact (other samples,
    maths or order). `keeps_bits` is false where the resumed run can at best be sample-exact, not bitwise.
    """

    key: str
    old: object
    new: object
    kind: ChangeKind
    keeps_bits: bool


class Config(KeysOfEach, defer_build=False):  # its signature is there from the start
    """All keys of a run, read-only; names and values are read as everywhere: `Config(lr=1e-3, max_runtime="1h")`.

    Raises:
        ConfigError: everything that is wrong with the values, at once.

    Examples:
        >>> config = ci_llm.Config(lr=1e-3, max_runtime="1h")
        >>> config.learning_rate, config.max_runtime
        (0.001, 3600.0)
    """

    def __init__(self, **values: Any) -> None:
        problems: list[Problem] = []
        given = by_key(entries_of(values, "Config(...)"), problems, last_wins=False)
        self.__setstate__(self.of_entries(given, take_own_entries([given], problems), problems).__getstate__())
        self.allow_imports()

    @classmethod
    def of_entries(
        cls,
        given: Mapping[str, Entry],
        own: OwnEntries,
        problems: list[Problem],
        check: Callable[[Self], Iterable[Problem]] = lambda _: (),
    ) -> Self:
        """The configuration of what was given; clashes are sought among sound values only.

        Raises:
            ConfigError: everything that is wrong, with the `problems` found before and what `check` finds.
        """
        values = sound_values(given, problems) | own_values(own, problems)
        config = cls.model_construct({*values}, **values, _without_effect=read_without_effect(given))
        config.settle_auto()
        unsound = {*given} - {*values, *NO_EFFECT}
        problems += [clashing(clash, given) for clash in find_clashes(config) if not unsound & {*clash.keys}]
        problems += check(config)
        if problems:
            raise error_of(problems)
        return config

    def __setattr__(self, name: str, value: object) -> None:
        what = f"{name} cannot be set: a configuration is read-only"
        raise ConfigError(what, where="Config", hint=f"config.model_copy(update={{{name!r}: ...}}) is a changed copy")

    def __eq__(self, other: object) -> bool:
        """True if all values are equal, and what was given without effect; wherever they are from."""
        if not isinstance(other, Config):
            return NotImplemented
        return self.__dict__ == other.__dict__ and self._without_effect == other._without_effect

    def allow_imports(self) -> None:
        """Let the functions be imported that somebody named who typed this configuration, or wrote its file."""
        for name in (self.objective, *(self.rewards or ())):
            allow_import(name)

    def settle_auto(self) -> None:
        """Put a value in place of auto, before anybody reads the configuration; what agents say stays as it is."""
        found = settled(self)
        self.__dict__.update({key: value for key, (value, _) in found.items()})
        self.__pydantic_fields_set__.difference_update(found)  # nobody gave them
        super().__setattr__("_reasons", {key: why for key, (_, why) in found.items()})

    def with_objective(self, objective: str) -> dict[str, Any]:
        """The changed values, once the rows have decided that auto stands for this objective."""
        changes: dict[str, Any] = {"objective": objective}
        if "learning_rate" in self._reasons:
            changes["learning_rate"], _ = stands_for(self.model_copy(update=changes))["learning_rate"]
        return changes

    def with_settled(self, values: Mapping[str, Any]) -> Config:
        """This configuration with the values that the loaded rows have decided, in which no agent says auto."""
        found = self.model_copy(update=values)
        return found.model_copy(update=found.settled_agents(found))

    def usual(self) -> Config:
        """The defaults of a run on the same base and data, with the same optimizer: what auto follows."""
        return Config(**{key: getattr(self, key) for key in FOLLOWED})

    def settled_as(self, before: Config | None) -> Config:
        """This configuration, in which keys that say auto have the values with which the run began, in `before`.

        `max_seq_length` stays open where the rows decide it: they are found again as they were tokenised before.
        """
        if before is None:
            return self
        decided = [key for key in self._reasons if key != "max_seq_length" or not self.is_open(key)]
        by_machine = [key for key in BY_MACHINE if self.is_open(key) and not before.is_open(key)]
        kept = {key: getattr(before, key) for key in (*decided, *by_machine, "chat_date")}
        kept |= self.settled_agents(before)
        found = self.model_copy(update=kept)
        told = (*filter(self._reasons.get, self._reasons), *by_machine)
        super(Config, found).__setattr__("_reasons", dict.fromkeys(told, "as this run began"))
        return found

    def of_trials(self, steps: int, changes: Mapping[str, Any]) -> Config:
        """The changed configuration, in which the agents are trials of a sweep with `steps` optimizer steps each.

        A learning rate follows the schedule of `steps`, wherever this run ends. A trial that stays nonfinite takes no
        further steps, while the others continue.
        """
        found = self.model_copy(update=changes)
        super(Config, found).__setattr__("_trial_steps", steps)
        return found

    @property
    def run_folder(self) -> Path:
        """`output_dir`, or its sub-folder `experiment_name`."""
        return Path(self.output_dir, self.experiment_name or "")

    @property
    def names_of_inputs(self) -> tuple[str, ...]:
        """The base model and all data sets: each a path, or a name on the hub."""
        return (self.model_name, *self.all_dataset_names, *self.eval_dataset_names)

    def rows_per_step(self, num_processes: int) -> int:
        """Rows of one optimizer step, of all processes together: the effective batch of a run that begins."""
        return self.global_batch_size or self.batch_size * num_processes * self.gradient_accumulation_steps

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint of the best evaluation so far is kept, however many newer ones there are."""
        return self.early_stopping_patience is not None or self.load_best_model_at_end

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps of a schedule of `total_steps` in which the learning rate rises."""
        given = self.num_warmup_steps
        return round(self.num_warmup_steps_ratio * total_steps) if given is None else given

    def answer_tokens(self, longest: int) -> int:
        """The most tokens of a generated answer, where the longest reference has `longest`."""
        if self.max_new_tokens_eval != "auto":
            return self.max_new_tokens_eval
        return 256 if self.model_name == "embedded" else max(16, 2 * longest)

    def told_auto(self) -> list[str]:
        """Lines for people: the values that auto stands for, by their reasons."""
        by_reason: dict[str, list[str]] = {}
        for key, why in self._reasons.items():
            if why:
                by_reason.setdefault(why, []).append(f"{key} {dump_value(getattr(self, key))}")
        return [f"{', '.join(values)}: {why}" for why, values in by_reason.items()]

    def notices(self) -> list[str]:
        """Lines to log once at the start: settings without effect, and doubtful ones."""
        return find_notices(self)

    def dump(self) -> str:
        """YAML of all values, in groups; `load_config` reads it back to the same values."""
        values = self.model_dump()
        return dump_yaml({title: {key: values[key] for key in keys} for title, keys in groups().items()})

    def diff(self, other: Config) -> list[Change]:
        """The changes from this configuration to `other`, in the order of the keys.

        A key that differs between agents has a list of values, one for each.
        """
        changes = []
        for key, field in Config.model_fields.items():
            old, new = (each._common_or_list(key, self, other) for each in (self, other))
            if old != new and key != "agents":
                meaning = meaning_of(field)
                changes.append(Change(key, old, new, meaning["kind"], meaning["keeps_bits"]))
        return changes

    def _common_or_list(self, key: str, *both: Config) -> object:
        """The value of a key, or the list of all agents' values if any of `both` lets them differ."""
        if key not in OWN_KEYS or not any(key in own for each in both for own in map(overriding, each.agents)):
            return getattr(self, key)
        if key == "seed":  # the common one orders the rows as well, and an agent's own may equal it
            alike = len({each.seed for each in both}) == 1
            return [own.get("seed") for own in self.agents or [{}] * self.num_agents] if alike else self.seed
        return [getattr(own, key) for own in self.each_agent]


def entries_of(values: Mapping[str, Any], where: str) -> list[Entry]:
    """Python values as if they had been written in a file."""
    return [Entry(name, _raw(value), where) for name, value in values.items()]


def _raw(value: Any) -> Raw:
    """A Python value as it would be written in a file."""
    if any((kind.__module__, kind.__name__) == ("numpy", "generic") for kind in type(value).__mro__):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return Mapped(tuple(entries_of(value, where="")))
    if isinstance(value, list | tuple):
        return Items(tuple(map(_raw, value)))
    if isinstance(value, bool) or value is None:
        return Scalar({True: "true", False: "false", None: "null"}[value])
    return Scalar(str(value)) if isinstance(value, str | int | float) else Unusable(f"a {type(value).__name__}")
