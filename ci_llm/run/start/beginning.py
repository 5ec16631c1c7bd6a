"""The beginning of an attempt: from which checkpoint it resumes, how its folder changes, what is left for it there.

The file beginning.json records how the run began. Later attempts resume from the newest step of the run. Supervisors,
queues and people repeat the same command, so `resume_from_checkpoint`, `restart_from` and `overwrite_output_dir` act
only the first time they are given, and the record says that they have acted.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.checkpoint import Checkpoint, load_checkpoint
from ci_llm.checkpoints.layout import QUARANTINE, folders_of, is_checkpoint_name
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.config import Config
from ci_llm.core import run_folder
from ci_llm.core.durable import write_json
from ci_llm.core.remote import is_url
from ci_llm.core.run_status import last_attempt
from ci_llm.crowd.given_path import require_checkpoint, require_run
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, ConfigError, DamagedCheckpoint, LaunchError, ProgressLost
from ci_llm.mirror.filling import local_copy
from ci_llm.run.mirroring import RunMirror
from ci_llm.run.step.requests import forget_after, read_record
from ci_llm.run.step.state import CrowdChange, TrainState

logger = logging.getLogger(__name__)


LATEST: Final = "latest"


@dataclass(frozen=True)
class Beginning:
    """The record of how a run began.

    Attributes:
        source: the checkpoint, or folder of another run, from which it began; None: at step 0.
        said: values of `resume_from_checkpoint`, beside latest, that mean this run.
        restarted_from: the `restart_from` that has acted, as long as every call repeats it.
        overwrote: the settings with which `overwrite_output_dir` has acted; with other settings it acts again.
    """

    source: str | None = None
    said: tuple[str | None, ...] = ()
    restarted_from: str | None = None
    overwrote: Mapping[str, Any] | None = None

    def also_meant_by(self, value: str | None) -> Beginning:
        """The record with `value` as one more `resume_from_checkpoint` that means this run."""
        return self if value in self.said else replace(self, said=(*self.said, value))


@dataclass(frozen=True)
class Start:
    """Where an attempt begins, and how its folder has to change.

    Attributes:
        source: the checkpoint to resume from; None: step 0.
        beginning: the record to write.
        keeps: the run's own checkpoints after this step are superseded; -1: all of them.
        sets_aside: the folder holds another run, which moves aside.
        note: a line for people if the call goes back on purpose; else empty.
    """

    source: Checkpoint | None
    beginning: Beginning
    keeps: int = -1
    sets_aside: bool = False
    note: str = ""

    @property
    def is_own(self) -> bool:
        """True if the source is one of the run's own checkpoints."""
        return self.keeps >= 0


def read_beginning(folder: Path) -> Beginning | None:
    """The record; None where no attempt has written one.

    Raises:
        CheckpointError: the file is not of this program.
    """
    hint = "move it away, and continue with resume_from_checkpoint=latest"
    what = "the record of how the run began cannot be read"
    return run_folder.read_known(Beginning, folder / run_folder.BEGINNING, what, hint)


def known_beginning(manager: CheckpointManager, config: Config) -> Beginning | None:
    """The record in the folder; None without one, or if it is damaged and `latest` resumes without it.

    Raises:
        CheckpointError: the record is damaged, and this call depends on it.
    """
    try:
        return read_beginning(manager.directory)
    except CheckpointError as error:
        acts = config.restart_from is not None or config.overwrite_output_dir
        if _wanted(config) != LATEST or acts or not manager.all_steps():
            raise
        logger.warning(f"{error.what} ({error.where}); the run resumes from its newest step, and writes it again")
        return None


def record_start(manager: CheckpointManager, start: Start) -> list[str]:
    """Move aside what `start` supersedes, in a leased folder, and write the record; returns lines for people.

    Raises:
        OSError: the disk refuses a change.
    """
    folder = manager.directory
    lines = []
    if start.sets_aside and (entries := _entries(folder)):
        lines.append(f"what was here moved to {manager.store.set_aside(entries)}")
    if start.note:
        forget_after(folder, start.keeps)
        if not start.is_own and (damaged := folder / QUARANTINE).exists():
            lines.append(f"damaged checkpoints moved to {manager.store.set_aside([damaged])}")
    lines += [f"newer than the resumed step, moved to {path}" for path in manager.store.supersede(start.keeps)]
    write_json(folder / run_folder.BEGINNING, asdict(start.beginning), staging=manager.store.staging)
    return lines


def _entries(folder: Path) -> list[Path]:
    found = {path for pattern in run_folder.OF_A_RUN for path in folder.glob(pattern)}
    return sorted(path for path in found if not run_folder.is_run(path))


def newest_source(manager: CheckpointManager, at_most: int | None = None) -> Checkpoint | None:
    """The newest checkpoint of a run's own folder that verifies; None if there is none.

    Args:
        at_most: the newest step that is trusted; None: any.
    """
    step = manager.latest_step(at_most=at_most)
    return None if step is None else manager.read(step)


def open_source(given: str, where: str) -> Checkpoint:
    """The checkpoint at a path or URL that a key gives; of a run's folder or mirror it is the newest one.

    Args:
        where: the key that gave the path, for the error.

    Raises:
        ConfigError: there is no checkpoint of a run.
        DamagedCheckpoint: the checkpoint is not as it was written.
    """
    folder = local_copy(given, where) if is_url(given) else require_checkpoint(Path(given), where)
    try:
        require_run(read_manifest(folder), folder, where)
        return load_checkpoint(folder)
    except DamagedCheckpoint as damage:
        listed = shlex.join(["ci-llm", "checkpoints", "list", str(folder.parent)])
        damage.hint = f"{listed} says which others are whole: give one of them"
        raise


def find_start(
    manager: CheckpointManager, config: Config, known: Beginning | None, at_most: int | None = None
) -> Start:
    """Where this attempt begins, from the configuration and the record of earlier attempts.

    Args:
        known: the record in the folder; None if there is no record.
        at_most: the newest of the run's own steps that is trusted; None: any.

    Raises:
        ConfigError: the folder holds a run that began in another way; or a path holds no checkpoint of a run.
        ProgressLost: the run had checkpoints, and none of them verifies.
        DamagedCheckpoint: the checkpoint at a path is damaged. A run falls back to an older step only in its own
            folder.
    """
    wanted = _wanted(config)
    if config.overwrite_output_dir:
        has_acted = known is not None and known.overwrote == _settings(config) and wanted in (LATEST, *known.said)
        if not has_acted:
            return _overwrite(config, wanted)
    back = config.restart_from
    if back is not None and not back.isdecimal() and not is_url(back):
        back = os.path.abspath(back)
    if back is not None and (known is None or known.restarted_from != back):
        return _go_back(manager, back, (known or Beginning()).also_meant_by(wanted))
    known = replace(known, restarted_from=back) if known else None
    steps = manager.all_steps()
    if not steps:
        if (known is not None or wanted == LATEST) and any((manager.directory / QUARANTINE).glob("*")):
            raise _progress_lost(manager)
        is_meant = known is not None and wanted in (LATEST, *known.said)
        return _from_the_beginning(known if known and is_meant else _first(wanted, known))
    if known is None and wanted not in (LATEST, None):
        return _from_given(manager, open_source(wanted, _as_given(wanted)), Beginning(said=(wanted,)), wanted)
    known = _require_same_beginning(manager, steps, known, wanted)
    if (source := newest_source(manager, at_most)) is not None:
        return _from_own(source, known)
    if any(at_most is None or step <= at_most for step in steps):
        raise _progress_lost(manager)
    if known.source is None and at_most:  # 0 asks for a fresh start
        return _from_oldest(manager, steps, known)
    return _from_the_beginning(known)


def _from_oldest(manager: CheckpointManager, steps: Sequence[int], record: Beginning) -> Start:
    """The start from the oldest of a run's own steps that verifies, where those that are trusted are pruned."""
    for step in steps:
        if (source := newest_source(manager, step)) is not None:
            logger.warning(f"no older checkpoint is left: the run goes back to its oldest one, of step {step}")
            return _from_own(source, record)
    raise _progress_lost(manager)


def _progress_lost(manager: CheckpointManager) -> ProgressLost:
    return ProgressLost(
        "every checkpoint from which this run could resume is damaged, and it does not begin again by itself",
        where=str(manager.directory / QUARANTINE),
        hint="restart_from=PATH resumes from a copy of a checkpoint;"
        " overwrite_output_dir=true begins again and moves the old run aside",
    )


def _wanted(config: Config) -> str | None:
    """`resume_from_checkpoint` with an absolute path; the path of the run's own folder means latest."""
    value = config.resume_from_checkpoint
    if value is None or value == LATEST:
        return value
    if is_url(value):
        return LATEST if config.mirror is not None and value.rstrip("/") == config.mirror.rstrip("/") else value
    return LATEST if _same_place(Path(value), config.run_folder) else os.path.abspath(value)


def _same_place(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _as_given(wanted: str | None) -> str:
    return f"resume_from_checkpoint: {'null' if wanted is None else wanted}"


def _first(wanted: str | None, known: Beginning | None = None) -> Beginning:
    """The record of a run that has no checkpoint yet: `wanted` replaces what earlier calls asked for."""
    source = None if wanted == LATEST else wanted
    return replace(known or Beginning(), source=source, said=(wanted,))


def _from_the_beginning(record: Beginning) -> Start:
    return Start(open_source(record.source, _as_given(record.source)) if record.source else None, record)


def _from_own(source: Checkpoint, record: Beginning, note: str = "") -> Start:
    return Start(source, record, keeps=source.manifest.step, note=note)


def _from_given(manager: CheckpointManager, source: Checkpoint, record: Beginning, given: str, note: str = "") -> Start:
    """The start from a checkpoint at a path: one of the run's own, or one of another run."""
    own = is_checkpoint_name(source.folder.name) and _same_place(source.folder.parent, manager.directory)
    return _from_own(source, record, note) if own else Start(source, replace(record, source=given), note=note)


def _settings(config: Config) -> dict[str, Any]:
    """The keys that are not at their defaults, and whose change would make this another run."""
    settings = {one.key: one.new for one in Config().diff(config) if one.kind == "sample-exact"}
    return json.loads(json.dumps(settings))  # type: ignore[no-any-return]  # lists for tuples, as in the record


def _overwrite(config: Config, wanted: str | None) -> Start:
    given = Path(wanted or LATEST).resolve()
    if any(entry.resolve() in (given, *given.parents) for entry in _entries(config.run_folder)):
        back = shlex.quote(f"restart_from={config.resume_from_checkpoint}")
        raise ConfigError(
            "the run cannot begin from what overwrite_output_dir moves aside",
            where=_as_given(wanted),
            hint=f"{back} goes back to it; experiment_name=NAME begins elsewhere",
        )
    record = replace(_first(wanted), overwrote=_settings(config))
    return replace(_from_the_beginning(record), sets_aside=True)


def _go_back(manager: CheckpointManager, back: str, record: Beginning) -> Start:
    record = replace(record, restarted_from=back)
    where = f"restart_from: {back}"
    if not back.isdecimal():
        source = open_source(back, where)
    elif int(back) in (steps := manager.all_steps()):
        source = open_source(str(manager.store.path(int(back))), where)
    else:
        raise ConfigError(
            f"this run has no step {int(back)}: it holds {_listed(steps)}",
            where=f"{where}, output_dir: {manager.directory}",
            hint="give one of these steps, or the path of a checkpoint",
        )
    note = f"going back on purpose (restart_from={back}): later calls with this key resume from the newest"
    return _from_given(manager, source, record, back, note)


def _require_same_beginning(
    manager: CheckpointManager, steps: list[int], known: Beginning | None, wanted: str | None
) -> Beginning:
    """The record, if `wanted` means the run that has these checkpoints.

    The path of the run's own newest step means this run as well, and is added to the record.
    """
    if known is not None and wanted in known.said:
        return known
    if wanted == LATEST:
        return known or Beginning(said=(LATEST,))
    folder = manager.directory
    newest = folders_of(folder, steps[-1])
    if wanted is not None and known is not None and any(_same_place(Path(wanted), each) for each in newest):
        return known.also_meant_by(wanted)
    if wanted is None:
        what = "a fresh start is wanted, but"
        back = "restart_from=STEP goes back"
    else:
        open_source(wanted, _as_given(wanted))  # a path without a checkpoint is refused first
        began = known.source if known and known.source else "a fresh start"
        what = f"the run that is here began from {began}, and"
        back = f"{shlex.quote(f'restart_from={wanted}')} takes this run there"
    raise ConfigError(
        f"{what} this folder holds checkpoints of steps {_listed(steps)}",
        where=f"{_as_given(wanted)}, output_dir: {folder}",
        hint=f"resume_from_checkpoint=latest continues from them; experiment_name=NAME begins beside them;"
        f" overwrite_output_dir=true begins here and moves them aside; {back}",
    )


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def require_same_step(processes: Processes, folder: Path, step: int | None) -> None:
    """Refuse folders that differ, before anything is concluded from what is in them. A collective.

    Raises:
        LaunchError: on every process alike.
    """
    found = processes.gather_object(step)
    if len({*found}) > 1:
        named = ", ".join("none" if step is None else f"step {step}" for step in found)
        raise LaunchError(
            f"the processes find different checkpoints to resume from: {named}",
            where=str(folder.absolute()),
            hint="give an output_dir on a disk that all machines share, as an absolute path",
        )


def nothing_to_train(step: int, total_steps: int, folder: Path) -> ConfigError:
    """The error of a new run that would begin where it ends: no step would be taken for its final checkpoint."""
    out_of_patience = step < total_steps
    return ConfigError(
        f"nothing is left to train: the checkpoint is of step {step}, and "
        + ("its patience with the evaluations is over" if out_of_patience else f"this run ends at step {total_steps}"),
        where=f"{folder}",
        hint="early_stopping_patience=null, or a larger one, trains on from there"
        if out_of_patience
        else f"max_train_steps={2 * step} trains on from there; without training it is ready for use as it is",
    )


@dataclass(frozen=True)
class Inherited:
    """What earlier attempts and the supervisor have left for this attempt.

    Attributes:
        recovery: the requests of the supervisor.
        at_most: the newest step from which this attempt may resume; None: any. It holds for one attempt only, because
            that one writes a status.
        bad_batches: steps that earlier attempts have skipped.
        changes: changes of the crowd that earlier attempts have accepted.
    """

    recovery: run_folder.Recovery = field(default_factory=run_folder.Recovery)
    at_most: int | None = None
    bad_batches: tuple[run_folder.BadBatch, ...] = ()
    changes: tuple[CrowdChange, ...] = ()

    def applied_to(self, state: TrainState) -> TrainState:
        """The state of a checkpoint with this on top."""
        asked = self.recovery
        recovery = state.recovery.with_requests(asked.learning_rate_factor, asked.micro_batch_size)
        return replace(state, recovery=recovery.with_batches(self.bad_batches)).with_planned(self.changes)


def read_inherited(folder: Path) -> Inherited:
    """Read what was left in the folder of the run.

    Raises:
        CheckpointError: a file is not of this program.
    """
    recovery = run_folder.read_recovery(folder)
    return Inherited(
        recovery,
        recovery.latest_step_allowed(last_attempt(folder)),
        tuple(run_folder.read_skipped_batches(folder)),
        tuple(each for each in read_record(folder) if each.refused is None),
    )


def agree_on_start(
    config: Config, processes: Processes, manager: CheckpointManager, mirror: RunMirror
) -> tuple[Start, Inherited]:
    """Where an attempt begins, and what earlier ones have left for it. A collective."""
    processes.on_main(mirror.fill_disk)
    inherited, known = processes.on_main(lambda: (read_inherited(manager.directory), known_beginning(manager, config)))
    with processes.main_process_first():
        start = find_start(manager, config, known, inherited.at_most)
    require_same_step(processes, config.run_folder, start.source.manifest.step if start.source else None)
    if start.sets_aside:  # all of it is for the run that moves aside
        inherited = Inherited()
    if start.note:  # changes that earlier attempts have made after that step are not made again
        inherited = replace(inherited, changes=())
    return start, inherited
