"""The settings of new trials, by a sampler: the next ones of a grid, at random, or by Optuna's TPE.

They are pure functions of plain values (the spaces, the seed, the trials so far), so that a sweep can be resumed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ci_llm.config.sweep import Choices, Range, Space
from ci_llm.core.measures import METRICS
from ci_llm.sweep.successive_halving import Trial

Settings = dict[str, Any]
#: Draws in a row that only repeat known settings, after which a space counts as exhausted.
_REPEATS: Final = 200


def new_settings(
    spaces: Mapping[str, Space], sampler: str, seed: int, trials: Sequence[Trial], count: int, metric: str
) -> list[Settings]:
    """Settings for at most `count` new trials, none of which an earlier trial has; fewer at the end of the space.

    Args:
        sampler: grid, random or tpe.
        seed: the seed of the sweep.
        trials: all trials that have begun, in order.
        metric: the metric of their scores.
    """
    if sampler == "grid":
        listed = [space.values for space in spaces.values() if isinstance(space, Choices)]
        every = (dict(zip(spaces, values, strict=True)) for values in itertools.product(*listed))
        return list(itertools.islice(every, len(trials), len(trials) + count))
    draws = _tpe(spaces, seed, trials, metric) if sampler == "tpe" else _random(spaces, seed, len(trials))
    known = [trial.settings for trial in trials]
    found: list[Settings] = []
    for settings in itertools.islice(draws, count + _REPEATS):
        if len(found) == count:
            break
        if settings not in known and settings not in found:
            found.append(settings)
    return found


def _random(spaces: Mapping[str, Space], seed: int, number: int) -> Iterator[Settings]:
    draw = random.Random(f"{seed} trial {number}")
    while True:
        yield {key: _drawn(space, draw.random()) for key, space in spaces.items()}


def _drawn(space: Space, share: float) -> Any:
    return space.at(share) if isinstance(space, Range) else space.values[int(share * len(space.values))]


def _tpe(spaces: Mapping[str, Space], seed: int, trials: Sequence[Trial], metric: str) -> Iterator[Settings]:
    """Settings by Optuna's TPE, which is told the score of every trial at the first rung, which all have reached.

    Every call makes the study again, from plain values; its seed depends on their number.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    greater = METRICS[metric].greater
    # A listed value is given by its number: Optuna takes plain values only, and ours may be lists of names.
    distributions = {key: _distribution(optuna, space) for key, space in spaces.items()}
    study = optuna.create_study(
        direction="maximize" if greater else "minimize",
        sampler=optuna.samplers.TPESampler(seed=(seed + len(trials)) % 2**32, constant_liar=True),
    )
    for trial in trials:
        params = {key: _to_optuna(spaces[key], value) for key, value in trial.settings.items()}
        failed = trial.failed and len(trial.scores) == 1
        study.add_trial(
            optuna.trial.create_trial(
                params=params,
                distributions=distributions,
                value=None if failed else trial.scores[0],
                state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
            )
        )
    while True:
        asked = study.ask(distributions)
        yield {key: _from_optuna(space, asked.params[key]) for key, space in spaces.items()}


def _distribution(optuna: Any, space: Space) -> Any:
    kinds = optuna.distributions
    if isinstance(space, Choices):
        return kinds.CategoricalDistribution(range(len(space.values)))
    if space.whole:
        return kinds.IntDistribution(int(space.low), int(space.high), log=space.log)
    return kinds.FloatDistribution(space.low, space.high, log=space.log)


def _to_optuna(space: Space, value: Any) -> Any:
    return space.values.index(value) if isinstance(space, Choices) else value


def _from_optuna(space: Space, value: Any) -> Any:
    return space.values[value] if isinstance(space, Choices) else space.rounded(value)
