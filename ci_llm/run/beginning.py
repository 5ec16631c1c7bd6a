"""Where a run begins, said once: beginning.json remembers it, and every later attempt goes on from the run's newest.

`resume_from_checkpoint`, `restart_from` and `overwrite_output_dir` are words about the run and not about an attempt:
a supervisor, a queue and a person call the same command again and again. So each of them acts when it is first said,
and the record says that it has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.folders import FINAL, folders_of, is_named_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.shelves import QUARANTINE, SUPERSEDED
from ci_llm.config import Config
from ci_llm.core.durable import read_json, write_json
from ci_llm.errors import CheckpointError, ConfigError
from ci_llm.run.resume import Source, newest_source, open_source

NAME: Final = "beginning.json"
LATEST: Final = "latest"
#: What a run leaves in its folder: what is not of it stays where it is when the run is moved aside.
OF_A_RUN: Final = (
    *("checkpoint_step_*", FINAL, QUARANTINE, SUPERSEDED, "attempts", NAME, "recovery.json", "skipped_batches.json"),
    *("status.json", "training.log", "metrics.jsonl", "evaluation.json", "gpu_stats.json", "report.html"),
    *("tensorboard", "profile"),
)


@dataclass(frozen=True)
class Beginning:
    """The record of a run.

    Attributes:
        source: the checkpoint, or folder of another run, from which it began; None: at step 0.
        said: values of `resume_from_checkpoint` with which it goes on, beside latest.
        restarted_from: the `restart_from` that has acted, as long as every call repeats it.
        overwrote: the settings for which `overwrite_output_dir` has acted: with others it is another run's word.
    """

    source: str | None = None
    said: tuple[str | None, ...] = ()
    restarted_from: str | None = None
    overwrote: Mapping[str, Any] | None = None

    def also_said(self, value: str | None) -> Beginning:
        return self if value in self.said else replace(self, said=(*self.said, value))


@dataclass(frozen=True)
class Start:
    """Where an attempt begins, and what its folder has to become.

    Attributes:
        source: None: step 0.
        beginning: to be recorded.
        keeps: own checkpoints after this step leave the line of the run; -1: all.
        sets_aside: what is in the folder is another run, and moves aside.
        note: a line for people.
    """

    source: Source | None
    beginning: Beginning
    keeps: int = -1
    sets_aside: bool = False
    note: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the source lies in the run's own line."""
        return self.keeps >= 0


def read_beginning(run_folder: Path) -> Beginning | None:
    """The record; None where no attempt has written one.

    Raises:
        CheckpointError: the file is not of this program.
    """
    path = run_folder / NAME
    try:
        value = read_json(path)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return Beginning(**{each.name: value[each.name] for each in fields(Beginning) if each.name in value})
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the record of how the run began cannot be read: {error}",
            where=str(path),
            hint="move it away, and go on with resume_from_checkpoint=latest",
        ) from error


def prepare(manager: CheckpointManager, start: Start) -> list[str]:
    """Make the claimed folder what `start` says, and record it; returns what moved, for people.

    Raises:
        CheckpointError: the disk refuses it.
    """
    folder = manager.directory
    lines = []
    try:
        if start.sets_aside and (entries := _entries(folder)):
            lines.append(f"what was here moved to {manager.set_aside(entries)}")
        lines += [f"newer than the resumed step, moved to {path}" for path in manager.supersede(start.keeps)]
        if read_beginning(folder) != start.beginning:
            write_json(folder / NAME, asdict(start.beginning), staging=manager.staging)
    except OSError as error:
        raise CheckpointError(
            f"the run cannot begin here: {error.strerror}",
            where=str(folder),
            hint="make space there, and call it again",
        ) from error
    return lines


def _entries(folder: Path) -> list[Path]:
    return sorted({path for pattern in OF_A_RUN for path in folder.glob(pattern)})


# ------------------------------------------------------------------------------------------------ where to begin


def find_start(
    manager: CheckpointManager, config: Config, known: Beginning | None, at_most: int | None = None
) -> Start:
    """What the configuration, and what was said before it, mean for this attempt.

    Args:
        known: the record of the folder.
        at_most: no own checkpoint after this step is trusted; None: all are.

    Raises:
        ConfigError: the folder holds a run that began otherwise; or a path holds no checkpoint of a run.
        DamagedCheckpoint: the path is damaged; only in its own folder a run falls back to an older step.
    """
    wanted = _wanted(config)
    if config.overwrite_output_dir and not _has_overwritten(known, config, wanted):
        return _anew(config, wanted)
    if (back := _restart(config)) is not None and (known is None or known.restarted_from != back):
        return _go_back(manager, back, (known or Beginning()).also_said(wanted))
    known = replace(known, restarted_from=back) if known else None
    steps = manager.all_steps()
    if not steps:
        return _from_the_beginning(known if known and wanted in (LATEST, *known.said) else _first(wanted, known))
    if known is None and wanted not in (LATEST, None):
        return _taken(manager, open_source(Path(wanted), _said(wanted)), Beginning(said=(wanted,)), wanted)
    known = _require_same_beginning(manager, steps, known, wanted)
    source = newest_source(manager, at_most)
    return _from_the_beginning(known) if source is None else _of_own_line(source, known)


def _wanted(config: Config) -> str | None:
    """`resume_from_checkpoint`, a path as it is from everywhere; that of the run's own folder means latest."""
    value = config.resume_from_checkpoint
    if value is None or value == LATEST:
        return value
    return LATEST if _same_place(Path(value), config.run_folder) else os.path.abspath(value)


def _restart(config: Config) -> str | None:
    value = config.restart_from
    return value if value is None or value.isdecimal() else os.path.abspath(value)


def _same_place(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _said(wanted: str | None) -> str:
    return f"resume_from_checkpoint: {'null' if wanted is None else wanted}"


def _first(wanted: str | None, known: Beginning | None = None) -> Beginning:
    """The record of a run that has come to no checkpoint of its own: what was said last holds."""
    source = None if wanted == LATEST else wanted
    return replace(known or Beginning(), source=source, said=(wanted,))


def _from_the_beginning(record: Beginning) -> Start:
    return Start(open_source(Path(record.source), _said(record.source)) if record.source else None, record)


def _of_own_line(source: Source, record: Beginning, note: str = "") -> Start:
    return Start(source, record, keeps=source.step, note=note)


def _taken(manager: CheckpointManager, source: Source, record: Beginning, given: str, note: str = "") -> Start:
    """From a checkpoint that somebody named: one of the run's own line, or one from which another line begins."""
    own = is_named_checkpoint(source.folder) and _same_place(source.folder.parent, manager.directory)
    return _of_own_line(source, record, note) if own else Start(source, replace(record, source=given), note=note)


# -------------------------------------------------------------------------------------- the words that act once


def _has_overwritten(known: Beginning | None, config: Config, wanted: str | None) -> bool:
    """Whether the run in the folder is the very one for which the word was said."""
    return known is not None and known.overwrote == _settings(config) and wanted in (LATEST, *known.said)


def _settings(config: Config) -> dict[str, Any]:
    """What makes the run this one: every key, off its default, whose change would make it another."""
    return {one.key: one.new for one in Config().diff(config) if one.kind == "sample-exact"}


def _anew(config: Config, wanted: str | None) -> Start:
    given = Path(wanted or LATEST).resolve()
    if any(entry.resolve() in (given, *given.parents) for entry in _entries(config.run_folder)):
        raise ConfigError(
            "the run cannot begin from what overwrite_output_dir moves aside",
            where=_said(wanted),
            hint=f"restart_from={config.resume_from_checkpoint} goes back to it; experiment_name=NAME begins elsewhere",
        )
    record = replace(_first(wanted), overwrote=_settings(config))
    return replace(_from_the_beginning(record), sets_aside=True)


def _go_back(manager: CheckpointManager, back: str, record: Beginning) -> Start:
    record, where = replace(record, restarted_from=back), f"restart_from: {back}"
    if not back.isdecimal():
        source = open_source(Path(back), where)
    elif int(back) in (steps := manager.all_steps()):
        source = open_source(manager.path(int(back)), where)
    else:
        raise ConfigError(
            f"this run has no step {int(back)}: it holds {_listed(steps)}",
            where=f"{where}, output_dir: {manager.directory}",
            hint="give one of these steps, or the path of a checkpoint",
        )
    note = f"going back on purpose (restart_from={back}): later calls with these words go on from the newest"
    return _taken(manager, source, record, back, note)


def _require_same_beginning(
    manager: CheckpointManager, steps: list[int], known: Beginning | None, wanted: str | None
) -> Beginning:
    """The record, if `wanted` may go on with a run that has checkpoints; it learns a path that is its own newest."""
    if known is not None and wanted in known.said:
        return known
    if wanted == LATEST:
        return known or Beginning(said=(LATEST,))
    folder = manager.directory
    newest = folders_of(folder, steps[-1])
    if wanted is not None and known is not None and any(_same_place(Path(wanted), each) for each in newest):
        return known.also_said(wanted)
    if wanted is None:
        what, back = "a fresh start is wanted, but", "restart_from=STEP goes back"
    else:
        open_source(Path(wanted), _said(wanted))  # what is no checkpoint at all is told first
        began = known.source if known and known.source else "a fresh start"
        what, back = f"the run that is here began from {began}, and", f"restart_from={wanted} takes this run there"
    raise ConfigError(
        f"{what} this folder holds checkpoints of steps {_listed(steps)}",
        where=f"{_said(wanted)}, output_dir: {folder}",
        hint=f"resume_from_checkpoint=latest goes on from them; experiment_name=NAME begins beside them;"
        f" overwrite_output_dir=true begins here and moves them aside; {back}",
    )


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
