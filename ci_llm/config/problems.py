"""The problems of a configuration: for each the place, what is wrong, and what to write instead.

The entries of one source become values here, because an entry becomes either a sound value or a problem. Sound values
may exclude one another (clashes), or probably mean something else (notices).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ci_llm.config import foreign
from ci_llm.config.own_keys import OWN_KEYS, KeysOfEach
from ci_llm.config.parsing import (
    COMMAND_LINE,
    UNREADABLE,
    Entry,
    Items,
    Mapped,
    Raw,
    Scalar,
    expected,
    hint,
    nearest,
    read_value,
    takes_list,
)
from ci_llm.config.schema import AllKeys, Keys
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.measures import METRICS, measures_of
from ci_llm.core.remote import is_url, why_no_mirror
from ci_llm.core.run_folder import is_reserved
from ci_llm.errors import ConfigError

ALL_KEYS = "all keys: --help all"
#: Signs that look like the dashes before a key, as text programs make them out of `--`.
_DASHES = re.compile("^[\u2010-\u2015\u2212\uff0d]+")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration."""

    where: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.hint}"


def error_of(problems: Collection[Problem]) -> ConfigError:
    """One error that lists all problems."""
    first, *others = problems
    if not others:
        return ConfigError(first.what, where=first.where, hint=first.hint)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}", hint=ALL_KEYS)


def misfit(key: str, field: FieldInfo, entry: Entry) -> Problem:
    """The key does not take this value."""
    name = key if key == foreign.normalized(entry.name) else f"{key} (written {entry.name})"
    what = f"{name} is {entry.raw}, but takes {expected(field)}"
    removed = foreign.REMOVED_VALUES.get(key, {}).get(entry.text)
    instead = removed or hint(field, entry.raw) or f"the default is {dump_value(field.default)}"
    if str(entry.raw).strip("'").startswith("[") and not takes_list(field) and key not in OWN_KEYS:
        instead = "give one value: it cannot differ between agents"
    if key == "num_warmup_steps" and re.fullmatch(r"0?\.[0-9]+", entry.text):  # a share, as in Transformers 5
        instead = f"write num_warmup_steps_ratio={entry.text}"
    return Problem(entry.where, what, instead)


def given_twice(key: str, first: Entry, second: Entry) -> Problem:
    """Two entries of one source set the same key."""
    names = key if first.name == second.name else f"{key} (as {first.name} and {second.name})"
    place = second.where if first.where == second.where else f"{first.where} and {second.where}"
    return Problem(place, f"{names} is given twice", "keep one of them")


def unknown(entry: Entry) -> Problem:
    """The name is not a key, or no key has this value of it."""
    name = foreign.normalized(entry.name)
    if name in foreign.UNSUPPORTED:
        is_there, instead = foreign.UNSUPPORTED[name]
        value = f" with the value {entry.raw}" if name in foreign.TRANSLATIONS else ""
        return Problem(entry.where, f"{entry.name} is not a key here{value}; it is {is_there}", instead)
    if name in foreign.TRANSLATIONS:
        values = foreign.TRANSLATIONS[name]
        means = "; ".join(f"{value} means {meaning}" for value, meaning in values.items() if meaning != foreign.ALWAYS)
        return Problem(entry.where, f"{entry.name} is {entry.raw}, but takes {' | '.join(values)}", means)
    if isinstance(entry.raw, Mapped):
        return Problem(
            entry.where,
            f"{entry.name} is not a key, but a group of keys",
            f"keys are flat: remove `{entry.name}:`, and write the keys below it without indentation",
        )
    near = _nearest(name)
    return Problem(entry.where, f"{entry.name} is not a key", f"did you mean {near}?" if near else ALL_KEYS)


#: What a file of this ending is when it stands alone on a command line.
_FILES = {
    **dict.fromkeys((".yaml", ".yml"), "--config "),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt"), "dataset_name="),
    ".gguf": "model_name=",
}


#: `${NAME}`, a variable of the environment; or anything else of this form, which is none.
_REFERENCE = re.compile(r"\$\{(\w+)\}|\$\{[^}]*\}?")


def expanded(entries: Iterable[Entry], problems: list[Problem]) -> list[Entry]:
    """What a person wrote, with the variables of the environment that it names; any other `${...}` is a problem."""
    found = []
    for entry in entries:
        unknown: list[str] = []
        raw = _with_variables(entry.raw, unknown, problems)
        if unknown:
            what = f"{entry.name} has {unknown[0]}, which is no variable of the environment"
            problems.append(Problem(entry.where, what, "export it and write ${NAME}, or write the value itself"))
        else:
            found.append(replace(entry, raw=raw))
    return found


def _with_variables(raw: Raw, unknown: list[str], problems: list[Problem]) -> Raw:
    """The value with the variables in it; references to others are added to `unknown`."""
    if isinstance(raw, Items):
        return Items(tuple(_with_variables(value, unknown, problems) for value in raw.values))
    if isinstance(raw, Mapped):
        return Mapped(tuple(expanded(raw.entries, problems)))
    if not isinstance(raw, Scalar) or "{{" in raw.text or "{%" in raw.text:  # the text of a chat template
        return raw
    found = {each[0]: os.environ.get(each[1] or "") for each in _REFERENCE.finditer(raw.text)}
    unknown += [reference for reference, value in found.items() if value is None]
    return replace(raw, text=_REFERENCE.sub(lambda each: found[each[0]] or "", raw.text))


def strays_of(words: Sequence[str]) -> list[Problem]:
    """The words of a command line that are neither a key nor a value, in order; `key = value` is one problem."""
    at = words.index("=") if "=" in words else 0
    if 0 < at < len(words) - 1:
        key, value = words[at - 1], words[at + 1]
        spaced = Problem(COMMAND_LINE, f"there are spaces around = in {key} = {value}", f"write {key}={value}")
        return [*strays_of(words[: at - 1]), spaced, *strays_of(words[at + 2 :])]
    return [_stray(word) for word in words]


def _stray(word: str) -> Problem:
    if means := _FILES.get(PurePath(word).suffix):
        return Problem(COMMAND_LINE, f"{word!r} stands alone", f"write {means}{word}")
    if word in ("...", "\u2026"):
        return Problem(COMMAND_LINE, f"{word!r} stands for words that an example leaves out", "leave it out as well")
    if word.endswith(".py"):
        instead = f"write key=value; another script is supervised by safe_train.py --train-script {word}"
        return Problem(COMMAND_LINE, f"{word!r} is neither a key nor a value", instead)
    plain = _DASHES.sub("--", word).replace("\uff1d", "=")
    instead = "write key=value, --key value or --flag" if plain == word else f"write {plain}, with plain - and ="
    return Problem(COMMAND_LINE, f"{word!r} is neither a key nor a value", instead)


def _nearest(name: str) -> str | None:
    """The key or alias most like `name`; `training.lr` is looked up as lr, `no_compile` as compile=false."""
    last = name.rpartition(".")[2]
    switch = last.removeprefix("no_")
    key = foreign.canonical(switch)
    if switch != last and key in foreign.ACCEPTED and foreign.flag_form(switch) == "alone":
        return f"{key}=false"
    near = nearest(last, [*foreign.ACCEPTED, *foreign.ALIASES, *foreign.TRANSLATIONS])
    return f"{near}, which is {foreign.ALIASES[near]}" if near in foreign.ALIASES else near


def by_key(entries: Iterable[Entry], problems: list[Problem], *, last_wins: bool) -> dict[str, Entry]:
    """The entries of one source by their key; unknown names and doubles are problems.

    Args:
        last_wins: a repeated name is not a problem, as on a command line.
    """
    given: dict[str, Entry] = {}
    for entry in entries:
        found = foreign.resolve(entry)
        if found is None:
            problems.append(unknown(entry))
        elif found[0] != foreign.ALWAYS:
            _add(given, *found, problems, last_wins)
    return given


def _add(given: dict[str, Entry], key: str, entry: Entry, problems: list[Problem], last_wins: bool) -> None:
    first = given.get(key)
    again = first is not None and foreign.normalized(first.name) == foreign.normalized(entry.name)
    if first is None or (last_wins and again) or _yields(first, entry, key):
        given[key] = entry
    elif not _yields(entry, first, key):
        problems.append(given_twice(key, first, entry))


def _yields(one: Entry, other: Entry, key: str) -> bool:
    """True if `one` is a switch that is off, beside another switch: `fp16: false` beside `bf16: true`."""
    return foreign.normalized(other.name) in foreign.TRANSLATIONS and foreign.is_switched_off(key, one)


def sound_values(given: Mapping[str, Entry], problems: list[Problem], keys: type[Keys] = AllKeys) -> dict[str, Any]:
    """The values of the entries that set one of `keys`; an entry that its key does not take is a problem.

    The type of a key decides what is written, and pydantic checks the range.
    """
    fields = keys.model_fields
    values = {key: read_value(fields[key], entry.raw) for key, entry in given.items() if key in fields}
    wrong = {key for key, value in values.items() if value is UNREADABLE}
    readable = {key: value for key, value in values.items() if key not in wrong}
    try:
        checked = keys.model_validate(readable)
    except ValidationError as error:
        wrong |= {str(detail["loc"][0]) for detail in error.errors()}
        checked = keys.model_validate({key: value for key, value in readable.items() if key not in wrong})
    problems += [misfit(key, fields[key], given[key]) for key in values if key in wrong]
    return {key: getattr(checked, key) for key in values if key not in wrong}


@dataclass(frozen=True)
class Clash:
    """Keys whose values exclude one another, and the way out."""

    keys: tuple[str, ...]
    what: str
    hint: str


def clashing(clash: Clash, given: Mapping[str, Entry]) -> Problem:
    """Values exclude one another."""
    places = [given[key].where for key in clash.keys if key in given]
    return Problem(" and ".join(dict.fromkeys(places)) or "defaults", clash.what, clash.hint)


def find_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Every combination that cannot work."""
    kinds = {c.lr_scheduler_type, *(own.get("lr_scheduler_type", c.lr_scheduler_type) for own in c.agents)}
    for kind in sorted(kinds & {"reduce_lr_on_plateau", "greedy"}):
        what = f"lr_scheduler_type {kind} follows the loss, not the step"
        yield Clash(("lr_scheduler_type",), what, "take cosine, linear or constant_with_warmup")
    if c.pass_per_agent is True and c.diversity != "none":
        what = f"diversity {c.diversity} has gradients through all agents, which one pass for all computes"
        yield Clash(("pass_per_agent", "diversity"), what, "set pass_per_agent to auto, or diversity to none")
    yield from _precision_clashes(c)
    yield from objective_clashes(c)
    yield from _data_clashes(c)
    yield from _mirror_clashes(c)
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if getattr(c, key) and c.eval_steps is None:
            yield Clash(
                (key, "eval_steps"), f"{key} compares evaluations, and eval_steps null makes none", "set eval_steps"
            )
    greater = METRICS[c.metric_for_best_model].greater
    if c.without_effect.get("greater_is_better") not in (None, greater):
        what = f"of {c.metric_for_best_model}, {'more' if greater else 'less'} is better"
        yield Clash(("greater_is_better", "metric_for_best_model"), what, "leave greater_is_better out")
    if c.restart_from is not None and c.overwrite_output_dir:
        yield Clash(
            ("restart_from", "overwrite_output_dir"),
            "restart_from goes back within the existing run, and overwrite_output_dir moves that run aside",
            "keep one of them; resume_from_checkpoint sets where a new run begins",
        )
    yield from _name_clashes(c.experiment_name or "")


def _name_clashes(name: str) -> Iterator[Clash]:
    """Names that no run can have: its folder stands in output_dir, where another run may have its own."""
    if "/" in name or name in (".", ".."):
        what = f"experiment_name {name!r} is a path; it names a folder inside output_dir"
        yield Clash(("experiment_name",), what, "write a plain name, and the path as output_dir")
    elif is_reserved(name):
        what = f"experiment_name {name!r} is a name that a run in output_dir gives to a part of its own"
        yield Clash(("experiment_name",), what, f"write another name, run_{name.lstrip('.')} for instance")


def _precision_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Values that model_dtype fp64 excludes."""
    if c.model_dtype == "fp64" and c.quantization:
        what = f"quantization {c.quantization} stores the weights in fewer bits than model_dtype fp64"
        yield Clash(("model_dtype", "quantization"), what, "set model_dtype to fp32, or quantization to null")
    if c.model_dtype == "fp64" and c.mixed_precision != "no":
        what = f"mixed_precision {c.mixed_precision} would undo model_dtype fp64"
        yield Clash(("model_dtype", "mixed_precision"), what, "set mixed_precision to no, or model_dtype to fp32")


def objective_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Values that only other objectives take."""
    if c.objective == "auto":
        return
    metrics = ("nll", "exact_match", *measures_of(c.objective).metrics)
    if c.metric_for_best_model not in metrics:
        what = f"an evaluation of objective {c.objective} has no {c.metric_for_best_model}"
        yield Clash(("metric_for_best_model", "objective"), what, f"take one of {', '.join(metrics)}")
    if c.num_labels is not None and c.objective in ("reward", "regression"):
        what = f"num_labels is about classes, and this is {c.objective}"
        yield Clash(("num_labels", "objective"), what, "num_labels=null")
    if c.reference == "start" and c.init_from is None:
        what = "agents begin as the base, unless init_from names adapters to start from"
        yield Clash(("reference", "init_from"), what, "reference=base, or init_from=FOLDER")
    yield from _reward_clashes(c)
    if c.objective == "sft":
        if c.text_column and c.answer_column:
            what = "answer_column beside text_column names labels, and objective sft learns none"
            yield Clash(("text_column", "answer_column"), what, "name text_column, or prompt_column with answer_column")
        return
    wrong = {
        "diversity": (c.diversity != "none", "its terms compare how agents predict the same tokens", "none"),
        "train_on_prompt": (c.train_on_prompt, "answers are compared or rated, and not prompts", "false"),
    }
    for key, (holds, why, usual) in wrong.items():
        if holds:
            what = f"{key} is for objective sft, and this is {c.objective}: {why}"
            yield Clash((key, "objective"), what, f"{key}={usual}")


def _reward_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """What the objective that draws completions lacks, and what others do not take."""
    if c.objective != "grpo":
        if any(own.beta == 0 for own in c.each_agent):
            what = f"beta 0 is for objective grpo, and this is {c.objective}"
            yield Clash(("beta", "objective"), what, "beta=0.1, or leave it out")
        return
    if c.base_sharding == "layers":
        what = "base_sharding layers takes the same passes on every process, and completions differ in length"
        hint = "base_sharding=none; model_dtype=bf16 or quantization=nf4 makes a base smaller that one device holds"
        yield Clash(("base_sharding", "objective"), what, hint)
    if not c.rewards:
        what = "objective grpo learns by rewards, and none is named"
        hint = "rewards=final_number, exact_match, regex:PATTERN, length or module:function, or a list of them"
        yield Clash(("objective", "rewards"), what, hint)
    if c.rewards and c.reward_weights and len(c.rewards) != len(c.reward_weights):
        what = f"reward_weights has {len(c.reward_weights)} for {len(c.rewards)} of rewards"
        yield Clash(("reward_weights",), what, "give each reward one weight")
    if c.reward_weights and not any(c.reward_weights):
        yield Clash(
            ("reward_weights",), "every weight is 0, so that nothing is learned", "give a reward another weight"
        )
    if c.loss_type and "bnpo" in c.loss_type:
        what = (
            "loss_type bnpo weighs tokens by the split into micro-batches and processes; over a whole step it is dapo"
        )
        yield Clash(("loss_type",), what, "loss_type=dapo, which is the default")
    if any(own.row_weights != "uniform" for own in c.each_agent):
        what = "row_weights bootstrap weighs rows to learn, and completions have advantages"
        yield Clash(("row_weights", "objective"), what, "row_weights=uniform")


def _mirror_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """A URL that does not name a mirror, or would put a secret into every log."""
    for key in ("mirror", "resume_from_checkpoint", "restart_from"):
        value = getattr(c, key)
        means_mirror = value is not None and (key == "mirror" or is_url(value))
        problem = why_no_mirror(value) if means_mirror else None
        if problem:
            yield Clash((key,), *problem)


def _data_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Keys about the data that exclude one another."""
    if c.has_own_rows and c.diversity != "none":
        what = f"diversity {c.diversity} compares agents on the same rows, and these train on different ones"
        yield Clash(("diversity",), what, "set diversity to none, or let all agents train on the same rows")
    if c.text_column and c.prompt_column:
        what = "text_column and prompt_column name two ways to read a row"
        yield Clash(("text_column", "prompt_column"), what, "name text_column, or prompt_column with answer_column")
    for key in ("eval_split", "eval_dataset_name"):
        if c.val_set_size and getattr(c, key) is not None:
            what = f"val_set_size holds out training rows, and {key} names others to evaluate on"
            yield Clash(("val_set_size", key), what, "leave one of them away")
    if c.val_set_size and c.val_set_size > 1 and not c.val_set_size.is_integer():
        what = f"val_set_size {c.val_set_size:g} is neither a share below 1 nor a number of rows"
        yield Clash(("val_set_size",), what, "write 0.05 for a twentieth of the rows, or 200 for 200 rows")


def find_notices(config: KeysOfEach) -> list[str]:
    """Lines to log once at the start: settings without effect, and those that probably mean something else."""
    ignored = [name for name in foreign.NO_EFFECT if name in config.without_effect]
    return [*(f"{name} has no effect: {foreign.NO_EFFECT[name]}" for name in ignored), *_doubtful(config)]


def _doubtful(c: KeysOfEach) -> Iterator[str]:
    given, usual = c.model_fields_set, type(c).model_fields["lambda_sw"].default
    is_meant = "lambda_sw" in given and ("diversity" not in given or c.lambda_sw != usual)
    if c.diversity == "none" and c.lambda_sw and is_meant:
        yield (
            f"lambda_sw {c.lambda_sw:g} has no effect: it is the weight of the diversity term, and diversity is none,"
            " because no tested term made a better crowd (docs/crowd.md); lambda_sw=0 silences this line"
        )
    if c.diversity == "swd" and c.swd_representation == "first_token":
        yield "swd_representation first_token is the same in all rows: a causal model has read no other token there"
    if c.global_batch_size is not None and c.batch_size > c.global_batch_size:
        yield f"batch_size {c.batch_size} is never reached: global_batch_size is {c.global_batch_size}"
    if c.num_warmup_steps and c.max_train_steps and c.num_warmup_steps >= c.max_train_steps:
        yield "num_warmup_steps is as long as the run: learning_rate is never reached"
