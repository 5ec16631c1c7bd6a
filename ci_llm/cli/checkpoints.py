"""`ci-llm checkpoints`: list, verify, diff, prune, import, pull and push checkpoints, of folders and of mirrors."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.cli.answering import note_if_offline
from ci_llm.cli.command import add_json, parser_of, print_result
from ci_llm.core.quantities import count
from ci_llm.errors import BadInput, DamagedCheckpoint

if TYPE_CHECKING:
    from ci_llm.checkpoints.catalog import CatalogEntry


PUSH_S = 24 * 3600.0  # the longest that a push may take
LINES_SHOWN = 20  # differences that `diff` prints


def path_or_url(text: str) -> Path | str:
    """The type of an argument that may be a folder or the URL of a mirror."""
    from ci_llm.core.remote import is_url

    return text if is_url(text) else Path(text)


def entries_of(url: str, *, read_all: bool) -> list[CatalogEntry]:
    """The checkpoints of a mirror, or the one that the URL names."""
    from ci_llm.mirror.filling import open_mirror
    from ci_llm.mirror.reader import list_mirror

    reader, head, name = open_mirror(url, "URL")
    if name is not None:
        reader.entry(head, name)  # refuses a name that is not there
    found = list_mirror(reader, head, read_all=read_all)
    return [entry for entry in found if name in (None, entry.name)]


def checkpoints(words: Sequence[str]) -> int:
    """Run `ci-llm checkpoints ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong. CheckpointError: a checkpoint cannot be read or changed.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    code: int = call.run_verb(call)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("checkpoints")
    calls = [line.strip() for line in str(parser.epilog).splitlines()]
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], does: str) -> argparse.ArgumentParser:
        """The parser of a verb, with `--json`; `run` takes the parsed words and returns the exit code."""
        example = next(call for call in calls if call.split()[2:3] == [name])
        described = f"{does[0].upper()}{does[1:]}."
        found: argparse.ArgumentParser = verbs.add_parser(
            name, help=does, description=described, epilog=f"example: {example}"
        )
        add_json(found)
        found.set_defaults(run_verb=run)
        return found

    does = "list the checkpoints of a run: step, time, size, whether each verifies, its place in the line"
    listing = verb("list", _list, does)
    listing.add_argument("run", type=path_or_url, metavar="RUN", help="the output_dir of a run, or a mirror's URL")
    listing.add_argument("--quick", action="store_true", help="read the manifests alone, not every byte")
    verifying = verb("verify", _verify, "compare every byte of a checkpoint, or of all of a run, with its digest")
    verifying.add_argument(
        "path", type=path_or_url, metavar="PATH", help="a checkpoint, an output_dir, or a mirror's URL"
    )
    diff = verb("diff", _diff, "compare two checkpoints bit by bit")
    diff.add_argument("one", type=path_or_url, metavar="A", help="a checkpoint; of a run or a mirror, its newest one")
    diff.add_argument("other", type=path_or_url, metavar="B", help="another")
    prune = verb("prune", _prune, "remove all but the newest checkpoints that verify; refused while a run writes")
    prune.add_argument("run", type=Path, metavar="RUN", help="the output_dir of a run")
    prune.add_argument("--keep", type=int, required=True, metavar="N", help="how many to keep, at least 1")
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    pulling = verb(
        "pull", _pull, "bring a mirror's newest step that verifies, with logs and metrics, or the step of the URL"
    )
    pulling.add_argument("url", metavar="URL", help="a mirror, or URL/checkpoint_step_100 of one")
    pulling.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the output_dir that resumes from it")
    pushing = verb("push", _push, "send what a run's folder holds to a mirror, and heal what is damaged there")
    pushing.add_argument("run", type=Path, metavar="RUN", help="the output_dir of a run that does not run now")
    pushing.add_argument("url", metavar="URL", help="the mirror")
    importing = verb("import", _import, "make one crowd of PEFT adapters")
    importing.add_argument("sources", type=Path, nargs="+", metavar="SOURCE", help="a folder with one adapter or more")
    importing.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where; must not exist yet")
    importing.add_argument("--base-model", metavar="NAME", help="hub id or folder; default: as the adapters say")
    return parser


def _list(call: argparse.Namespace) -> int:
    from ci_llm.checkpoints.catalog import list_checkpoints

    read_all = not call.quick
    is_mirror = isinstance(call.run, str)
    entries = entries_of(call.run, read_all=read_all) if is_mirror else list_checkpoints(call.run, read_all=read_all)
    lines = [f"{'step':>8}  {'written':<19}  {'bytes':>15}  {'attempt':>7}  {'state':<9}  {'line':<10}  folder"]
    for entry in entries:
        state = "unread" if call.quick else "verified"
        state = "damaged" if entry.damage else "refused" if entry.refused else state
        written = "" if entry.wall_time is None else time.strftime("%F %T", time.localtime(entry.wall_time))
        size = "" if entry.nbytes is None else f"{entry.nbytes:,}"
        step, attempt = ("?" if value is None else value for value in (entry.step, entry.attempt))
        name = f"{entry.name} (best)" if entry.pinned else entry.name
        lines.append(f"{step:>8}  {written:<19}  {size:>15}  {attempt:>7}  {state:<9}  {entry.line:<10}  {name}")
    lines += [f"{entry.name}: {why}" for entry in entries if (why := entry.damage or entry.refused)]
    shown = lines if entries else [f"no checkpoint in {call.run}"]
    print_result(call.json, {"checkpoints": [asdict(entry) for entry in entries]}, *shown)
    return 0


def _verify(call: argparse.Namespace) -> int:
    is_mirror = isinstance(call.path, str)
    entries = entries_of(call.path, read_all=True) if is_mirror else _local_entries(call.path)
    current = [entry for entry in entries if entry.line == "current"]
    damage = {entry.name: why for entry in current if (why := entry.damage or entry.refused)}
    whole = [entry for entry in current if entry.name not in damage]
    if call.json:
        print_result(call.json, {"verified": [entry.name for entry in whole], "damaged": damage})
        return 1 if damage else 0
    for entry in whole:
        print(f"{entry.name}: verified, {entry.nbytes:,} bytes")
    if damage:
        raise DamagedCheckpoint("; ".join(damage.values()), where=", ".join(damage))
    return 0


def _local_entries(path: Path) -> list[CatalogEntry]:
    """The checkpoint at a path, or those that the run there may resume from; every byte is read.

    Raises:
        BadInput: there is none. OtherFormat: this program does not read one.
    """
    from ci_llm.checkpoints.catalog import CatalogEntry, current_line
    from ci_llm.checkpoints.layout import is_checkpoint_name
    from ci_llm.checkpoints.manifest import MANIFEST, verify_folder

    # A folder with the name of a checkpoint counts without a manifest too: it is damaged.
    lone = (path / MANIFEST).exists() or is_checkpoint_name(path.name)
    folders = [path] if lone else current_line(path)
    if not (path.is_dir() and folders):
        raise _no_checkpoint(path)
    entries = []
    for folder in folders:
        try:
            entries.append(CatalogEntry(str(folder), nbytes=verify_folder(folder).nbytes))
        except DamagedCheckpoint as error:
            entries.append(CatalogEntry(str(folder), damage=error.what))
    return entries


def _pull(call: argparse.Namespace) -> int:
    """Bring one checkpoint, or what a run needs to resume, onto this disk."""
    from ci_llm.checkpoints.manager import CheckpointManager
    from ci_llm.mirror.filling import fill, open_mirror, write_opened
    from ci_llm.run.mirroring import RUN_FILES

    reader, head, name = open_mirror(call.url, "URL")
    if name is not None:
        target = call.to / name
        if target.exists():
            raise BadInput("this folder exists", where=str(target), hint="give another one with --to")
        write_opened(reader.open(reader.entry(head, name)), target)
        told: dict[str, object] = {"folder": str(target)}
        shown = f"{target}: verified"
    else:
        with CheckpointManager(call.to) as manager:
            manager.store.acquire_lease()
            fill(reader, manager, RUN_FILES)
            step = manager.latest_step()
        if step is None:
            raise DamagedCheckpoint("no checkpoint in this mirror verifies", where=reader.url)
        told, shown = {"folder": str(call.to), "step": step}, f"{call.to}: step {step}, verified"
    print_result(call.json, told, shown)
    return 0


def _push(call: argparse.Namespace) -> int:
    """Send what a run's folder holds, and heal what is damaged there."""
    from ci_llm.checkpoints.catalog import current_line
    from ci_llm.checkpoints.manager import CheckpointManager
    from ci_llm.mirror.head import NOBODY, Found, read_token
    from ci_llm.mirror.sender import Mirror
    from ci_llm.run.mirroring import RUN_FILES

    if not current_line(call.run):
        raise BadInput("there is no checkpoint here", where=str(call.run), hint="give the output_dir of a run")
    with CheckpointManager(call.run) as manager:
        number = manager.store.acquire_lease()
        mirror = Mirror(call.url, call.run, files=RUN_FILES)
        head = mirror.reader.head()
        step = manager.latest_step() or 0
        token = read_token(call.run)
        found = Found(head.writer if head else NOBODY)
        if head is not None and token is not None and token.run == head.run:
            if head.newest is not None and head.newest.step > step:
                what = f"the mirror holds step {head.newest.step}, and this folder step {step} as its newest"
                raise BadInput(what, where=mirror.reader.url, hint="pull it, or push to another prefix")
            found = Found(head.writer, mirror.reader.damage(head))
        mirror.begin(step, number, found)
        try:
            done = mirror.flush(PUSH_S)
        finally:
            mirror.stop()
    state, healed = mirror.state, sorted(found.damage.values())
    if not done:
        raise BadInput(f"not everything was sent: {state.error}", where=state.url)
    sent = f"{state.url}: step {state.step} is the newest"
    print_result(call.json, {"healed": healed, **asdict(state)}, sent, *(f"healed: {damage}" for damage in healed))
    return 0


def _diff(call: argparse.Namespace) -> int:
    from ci_llm.checkpoints.checkpoint import compare, load_checkpoint

    folders = [_checkpoint(path) for path in (call.one, call.other)]
    found = compare(*(load_checkpoint(folder) for folder in folders))
    counting = [difference for difference in found.differences if difference.counts]
    beside = [difference for difference in found.differences if not difference.counts]
    record = {
        "identical": found.identical,
        "compared": {"tensors": found.num_tensors, "values": found.num_values},
        "differences": [asdict(difference) for difference in found.differences],
    }
    verdict = "bit-identical" if found.identical else count(len(counting), "difference")
    compared = f"{count(found.num_tensors, 'tensor')} and {count(found.num_values, 'plain value')} compared"
    lines = [f"A {folders[0]}", f"B {folders[1]}", f"{verdict}, {compared}"]
    lines += [f"  {difference.where}: {difference.what}" for difference in counting[:LINES_SHOWN]]
    if len(counting) > LINES_SHOWN:
        lines.append(f"  and {len(counting) - LINES_SHOWN} more; --json lists all")
    if beside:
        lines.append(f"beside the state: {', '.join(difference.where for difference in beside)}")
    print_result(call.json, record, *lines)
    return 0 if found.identical else 1


def _prune(call: argparse.Namespace) -> int:
    from ci_llm.checkpoints.catalog import pinned_steps, prune

    done = prune(call.run, call.keep, dry_run=call.dry_run)
    pinned = pinned_steps(call.run)
    removed = ", ".join(map(str, done.removed)) or "none"
    kept = ", ".join(f"{step} (best)" if step in pinned else str(step) for step in done.kept)
    line = f"{'would remove' if call.dry_run else 'removed'}: {removed} ({done.freed_bytes:,} bytes); kept: {kept}"
    damaged = [f"the next start of the run will quarantine: {damage}" for damage in done.damaged]
    print_result(call.json, {**asdict(done), "dry_run": call.dry_run}, line, *damaged)
    return 0


def _import(call: argparse.Namespace) -> int:
    if call.base_model:
        note_if_offline(call.base_model)
    from ci_llm.base.load import short_name
    from ci_llm.crowd.importing import import_crowd

    crowd = import_crowd(call.sources, call.to, call.base_model)
    settings, base_model = crowd.settings, short_name(crowd.base_model.base_name)
    record = {"folder": str(call.to), "num_agents": crowd.num_agents, "base_model": base_model}
    places = {"lora_target_modules": settings.target_modules, "agent_layers": settings.layers}
    said = (f"{key}={value if isinstance(value, str) else ','.join(map(str, value))}" for key, value in places.items())
    base, start = shlex.quote(f"model_name={base_model}"), shlex.quote(f"init_from={call.to}")
    print_result(
        call.json,
        {**record, "lora_rank": settings.rank, "lora_alpha": settings.alpha},
        f"{call.to}: {crowd.num_agents} agents of rank {settings.rank} on {base_model}",
        f'answer:  Crowd.from_pretrained("{call.to}").generate(...)',
        f"train:   python train.py {start} num_agents={crowd.num_agents} lora_rank={settings.rank}"
        f" lora_alpha={settings.alpha:g} use_rslora={str(settings.use_rslora).lower()}"
        f" {' '.join(said)}"
        f" {base} experiment_name=mine",
    )
    return 0


def _checkpoint(path: Path | str) -> Path:
    """The checkpoint at a path or URL: the folder itself, or the newest of a run.

    Raises:
        BadInput: it is neither.
    """
    from ci_llm.checkpoints.layout import find_checkpoint
    from ci_llm.mirror.filling import local_copy

    if isinstance(path, str):
        return local_copy(path, "URL")
    if (found := find_checkpoint(path)) is None:
        raise _no_checkpoint(path)
    return found


def _no_checkpoint(path: Path) -> BadInput:
    return BadInput(
        "there is no checkpoint here",
        where=str(path),
        hint="give a folder such as RUN/checkpoint_step_100, or the output_dir of a run",
    )
