"""Rewards: the functions that judge completions, those of this package by name and a user's own.

A function has TRL's signature: `f(prompts=, completions=, completion_ids=, **columns)`, lists with an entry for each
completion, and returns a number or None for each. Completions are messages where prompts are, and else text. It is
called with the completions of one prompt by one agent. So what it returns does not depend on company, and an error says
the row.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ci_llm.core.answers import last_number
from ci_llm.core.imports import import_named
from ci_llm.errors import ConfigError, DataError, RewardFailed, first_line

#: Columns of the right answer, of which the first is taken that is there.
ANSWERS: Final = ("answer", "completion", "response", "output", "solution", "target")
_REGEX: Final = "regex:"
#: The keys of a message, or of its parts, that hold its text.
_TEXT_OF_MESSAGE: Final = ("content", "value", "text")
_SHOWN: Final = 200  # characters of a completion in an error

Given = Mapping[str, Sequence[Any]]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Reward:
    """A function that judges completions.

    Attributes:
        name: its name in metrics.
        reads_answer: whether it reads the right answer: then it takes `rows=`, whole ones, in place of `**columns`.
    """

    name: str
    function: Function
    reads_answer: bool = False


def rewards_of(names: Sequence[str], answer: str | None, longest: int) -> tuple[Reward, ...]:
    """The functions of these names; of equal names the later ones are numbered.

    Args:
        answer: the column of the right answer, if it is named.
        longest: the most tokens of a completion.

    Raises:
        ConfigError: there is no such function, or only a checkpoint names it.
    """
    found = list[Reward]()
    for name in names:
        reward = _of_name(name, answer, longest)
        same = sum(reward.name in (other.name, other.name.rpartition("#")[0]) for other in found)
        found.append(replace(reward, name=f"{reward.name}#{same + 1}") if same else reward)
    return tuple(found)


def require_answers(
    rewards: Sequence[Reward], column_sets: Iterable[Sequence[str]], named: str | None, where: str
) -> None:
    """Refuse rows without the column of the right answer, if a reward reads it.

    Args:
        column_sets: the columns of each data set.

    Raises:
        DataError: there is no such column.
    """
    readers = [reward.name for reward in rewards if reward.reads_answer]
    lacking = [columns for columns in column_sets if _answer_column(columns, named) is None]
    if readers and lacking:
        raise DataError(
            f"reward {readers[0]} compares with the right answer, and no column holds it: {', '.join(lacking[0])}",
            where=where,
            hint=f"name the column answer, or by answer_column=; known are {', '.join(ANSWERS)}",
        )


def _answer_column(columns: Iterable[str], named: str | None) -> str | None:
    return named or next((column for known in ANSWERS for column in columns if column.strip().lower() == known), None)


def _answers(rows: Sequence[Mapping[str, Any]], named: str | None) -> list[Any]:
    column = _answer_column(rows[0], named)
    assert column is not None, "rows were looked at"
    return [row[column] for row in rows]


def _of_name(name: str, answer: str | None, longest: int) -> Reward:
    if name in _BUILT_IN:
        return Reward(name, _compared(answer, _BUILT_IN[name]), reads_answer=True)
    if name == "length":
        return Reward(name, _length(longest))
    if name.startswith(_REGEX):
        try:
            return Reward("regex", _regex(re.compile(name.removeprefix(_REGEX))))
        except re.error as error:
            raise ConfigError(
                f"this is no regular expression: {error}", where=f"rewards: {name}", hint="repair it"
            ) from (error)
    if ":" not in name:
        known = f"{', '.join(_BUILT_IN)}, length, regex:PATTERN or module:function"
        raise ConfigError(f"there is no reward {name!r}", where="rewards", hint=f"use {known}")
    function = import_named(name, "rewards")
    return Reward(getattr(function, "__name__", name.rpartition(":")[2]), function)


def text_of(said: Any) -> str:
    """A completion, or a right answer, as text: that of its messages and of their parts, if it has any."""
    if isinstance(said, Mapping):
        return text_of(next((said[key] for key in _TEXT_OF_MESSAGE if said.get(key) is not None), ""))
    if isinstance(said, list) and all(isinstance(part, Mapping) for part in said):
        return "".join(map(text_of, said))
    return str(said)


# Their settings are closed over: an argument could be replaced by a column of the same name.


def _compared(named: str | None, read: Callable[[str], str | None]) -> Function:
    """1 where `read` finds the same in a completion as in the right answer, else 0; None if it finds nothing there."""

    def reward(completions: Sequence[Any], rows: Sequence[Mapping[str, Any]], **_: Any) -> list[float | None]:
        wanted = [None if want is None else read(text_of(want)) for want in _answers(rows, named)]
        pairs = zip(completions, wanted, strict=True)
        return [None if want is None else float(read(text_of(own)) == want) for own, want in pairs]

    return reward


def _regex(found_in: re.Pattern[str]) -> Function:
    return lambda completions, **_: [float(found_in.search(text_of(own)) is not None) for own in completions]


def _length(most: int) -> Function:
    return lambda completion_ids, **_: [1 - len(ids) / most for ids in completion_ids]


#: Those that compare a completion with the right answer: what they read of both.
_BUILT_IN: Final[Mapping[str, Callable[[str], str | None]]] = {"exact_match": str.strip, "final_number": last_number}


def compute_rewards(reward: Reward, given: Given, where: str, timeout: float | None = None) -> list[float]:
    """What a function gives for the completions of one prompt; NaN for None.

    Args:
        given: its arguments by name: lists with an entry for each completion.
        where: the row, in words.
        timeout: seconds that it may take; None: any number.

    Raises:
        RewardFailed: it raises, takes longer, or returns something else than a finite number or None for each.
    """
    count = len(given["completions"])
    values, error = _called(reward, given, timeout)
    if error is not None:
        culprit = "" if isinstance(error, TimeoutError) else _culprit(reward, given, timeout)
        raise _failed(reward, error, culprit, where) from error
    try:
        listed = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError) as odd:
        raise _failed(reward, odd, "", where) from odd
    if len(listed) != count:
        raise _failed(reward, ValueError(f"it returned {len(listed)} values for {count} completions"), "", where)
    if math.inf in map(abs, listed):
        at = [math.isinf(value) for value in listed].index(True)
        raise _failed(reward, ValueError("it returned an infinite value"), _shown(given, at), where)
    return listed


def _called(reward: Reward, given: Given, timeout: float | None) -> tuple[Any, Exception | None]:
    """What the function returns, or its error."""
    if timeout is not None:
        return _in_thread(lambda: _ended(reward.function(**given)), timeout)
    value, error = _tried(partial(reward.function, **given))
    # In a thread, because this one may be in a loop already, as in a notebook.
    return _in_thread(partial(_ended, value)) if inspect.iscoroutine(value) else (value, error)


def _in_thread(work: Callable[[], Any], timeout: float | None = None) -> tuple[Any, Exception | None]:
    """What `work` returns, or its error; a thread that takes too long is left behind."""
    done: list[tuple[Any, Exception | None]] = []
    thread = threading.Thread(target=lambda: done.append(_tried(work)), name="ci_llm reward", daemon=True)
    thread.start()
    thread.join(timeout)
    return done[0] if done else (None, TimeoutError(f"it took longer than reward_timeout, {timeout:g} s"))


def _tried(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - a user's function raises whatever it raises
        return None, error


def _ended(value: Any) -> Any:
    """What an async function returns, or the value of another one."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _culprit(reward: Reward, given: Given, timeout: float | None) -> str:
    """The completion with which alone the function raises as well."""
    for at in range(len(given["completions"])):
        if _called(reward, {name: values[at : at + 1] for name, values in given.items()}, timeout)[1] is not None:
            return _shown(given, at)
    return ""


def _shown(given: Given, at: int) -> str:
    return f", completion {at}: {text_of(given['completions'][at])[:_SHOWN]!r}"


def failed_elsewhere(where: str) -> RewardFailed:
    """The error of the processes whose own rewards did not fail."""
    what = "a reward failed on another process, whose log says which"
    return RewardFailed(what, where=where, hint="repair the function, and call the same again: the run resumes")


def _failed(reward: Reward, error: Exception, completion: str, where: str) -> RewardFailed:
    return RewardFailed(
        f"reward {reward.name} failed: {type(error).__name__}: {first_line(error)}",
        where=f"{where}{completion}",
        hint="repair the function, and call the same again: the run resumes at this step; None rewards nothing",
    )
