"""report.html: one self-contained page about a run, rendered from its facts."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from ci_llm._version import __version__
from ci_llm.core.durable import write_bytes
from ci_llm.core.quantities import count, duration, size
from ci_llm.errors import CiLlmError
from ci_llm.report import drawings
from ci_llm.report.facts import KINDS, Attempt, RunFacts, read_run, seconds_by_kind, settings
from ci_llm.report.scores import Leaderboard, gains, is_free_text, notes, read_trials, scores, surest_first

NAME: Final = "report.html"
MOST_ATTEMPTS: Final = 60
MOST_LINES: Final = 60
MOST_EXAMPLES: Final = 5
MOST_CHARACTERS: Final = 1200

#: Lines of training.log about faults, and about the responses to them.
_NOTABLE: Final = re.compile(
    r"WARNING|not finite|finite for no agent|rolled back|set back|does not fit|taken over|damaged|quarantine|moved to"
    r"|recovery:|exactness|changed since|cannot be|walltime|no progress|early stopping"
)


@dataclass(frozen=True)
class Tile:
    """One key figure of the head of the page."""

    label: str
    value: str
    note: str = ""


def write_report(path: Path | str) -> Path:
    """Write `report.html` into the folder of a run; returns where it lies.

    Args:
        path: the output folder of a run, or a checkpoint in it.

    Raises:
        BadInput: there is no run, or a file of it is damaged.
        CiLlmError: the disk refuses the file.
    """
    facts = read_run(path)
    page = facts.folder / NAME
    try:
        write_bytes(page, render(facts).encode())
    except OSError as error:
        raise CiLlmError(
            f"the report cannot be written: {error.strerror}", where=str(page), hint="make space there, or copy the run"
        ) from error
    return page


def render(facts: RunFacts) -> str:
    """The page, as HTML."""
    return render_template("page.html.j2", _contents(facts))


def render_template(name: str, contents: Mapping[str, Any]) -> str:
    """Render a template of this package with these contents."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ci_llm.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {each.__name__: each for each in (duration, clock, share, cut, number, count, losses)}
    page: str = environment.get_template(name).render(**contents)
    return page


def _contents(facts: RunFacts) -> dict[str, Any]:
    """The variables of the template."""
    evaluation, attempts = facts.evaluation, facts.attempts
    table = scores(evaluation) if evaluation else []
    by_kind = {kind: seconds for kind, seconds in seconds_by_kind(attempts).items() if seconds > 0}
    solved, failed = _examples(facts)
    leaderboard = read_trials(facts.folder)
    restarts = [attempt.first_step for attempt in attempts[1:]]
    words = facts.words
    curves = drawings.draw_curves(facts.metrics, restarts, facts.agents_names, words)
    is_free = evaluation is not None and is_free_text(evaluation)
    return {
        "facts": facts,
        "now": datetime.now().timestamp(),
        "version": __version__,
        "verdict": _verdict(facts),
        "tiles": list(_tiles(facts)),
        "leaderboard": leaderboard,
        "scores": table,
        "scores_drawing": drawings.draw_scores(table, words.right) if table else "",
        "gains": list(gains(evaluation)) if evaluation else [],
        "notes": list(notes(evaluation, facts.folder)) if evaluation else [],
        "drawings": [(title, drawn) for title, drawn in curves if not (is_free and title.endswith(words.right))],
        "right": words.right,
        "loss": words.loss,
        "attempts": attempts[-MOST_ATTEMPTS:],
        "timeline": drawings.draw_timeline(attempts),
        "notable": {attempt.number: _notable(attempt) for attempt in attempts},
        "most_lines": MOST_LINES,
        "recovery": list(_recovery(facts)),
        "seconds": by_kind,
        "kinds": KINDS,
        "total_s": sum(by_kind.values()),
        "memory": list(_memory(facts)),
        "solved": solved,
        "failed": failed,
        "asked": _asked(facts),
        "settings": list(settings(facts.config)) if facts.config else [],
        "commands": list(_commands(facts, leaderboard)),
    }


def goodput(facts: RunFacts) -> float:
    """The share of the time since the first launch that went into steps that are part of the result."""
    seconds = seconds_by_kind(facts.attempts)
    return seconds["training"] / max(sum(seconds.values()), 1e-9)


def _verdict(facts: RunFacts) -> str:
    status, number_of_attempts = facts.status, len(facts.attempts)
    attempts = count(number_of_attempts, "attempt")
    reason = f" ({status.reason})" if status.reason else ""
    words = {
        "completed": f"Completed at step {status.step}, in {attempts} and {duration(facts.wall_s)}.",
        "interrupted": f"Interrupted{reason}: step {status.step} is saved, after {attempts}."
        " The same command resumes it.",
        "running": f"Still running, in attempt {number_of_attempts}:"
        f" step {status.step} at {clock(status.heartbeat)}. This page shows how it stood then.",
        "vanished": f"No sign of life since {clock(status.heartbeat)}, after step {status.step}.",
    }
    return words.get(status.status, f"Failed{reason} after step {status.step}, in {attempts}.")


def _tiles(facts: RunFacts) -> Iterator[Tile]:
    has_lines = bool(facts.metrics.lines)  # a sweep has none: each of its runs has its own
    if facts.evaluation and not facts.has_gone_on:
        crowd = scores(facts.evaluation)[-1]
        note = f"{crowd.low:.3f} to {crowd.high:.3f}" if crowd.low is not None and crowd.high is not None else ""
        words = facts.words
        if crowd.exact_match is not None:
            yield Tile(f"crowd, {words.right}", f"{crowd.exact_match:.3f}", note)
        yield Tile(f"crowd, {words.loss}", number(crowd.nll))
    elif (loss := facts.metrics.last("train/task_loss")) is not None:
        yield Tile("training loss", number(loss), f"{facts.words.trained}, mean over agents")
    agent_steps = facts.status.agent_steps
    yield Tile("optimizer steps", str(facts.status.step), "" if agent_steps is None else f"{agent_steps:,} agent-steps")
    redone = sum(attempt.redone_steps for attempt in facts.attempts)
    note = "no step was lost" if has_lines else ""
    if redone:
        note = f"{count(redone, 'step')} lost and taken again"
    yield Tile("attempts", str(len(facts.attempts)), note)
    yield Tile("time", duration(facts.wall_s), "from first launch to last sign of life")
    if has_lines:
        yield Tile("goodput", share(goodput(facts)), "of that time went into steps that count")
    if (memory := _peak_bytes(facts)) is not None:
        yield Tile("memory, peak", size(memory))


def _recovery(facts: RunFacts) -> Iterator[str]:
    """The responses of the run and its supervisor to faults, from the metrics and recovery.json."""
    last = facts.metrics.last
    for name in facts.metrics.agents:
        if skipped := last(f"train/{name}/skipped_steps"):
            who = facts.agents_names.get(name, name)
            line = f"{who} was left out of {count(skipped, 'step')} that were not finite for it"
            if (rate := last(f"train/{name}/learning_rate_share")) is not None:
                line += f"; its learning rate is {rate:.3g} of the schedule's"
            if set_backs := last(f"train/{name}/set_backs"):
                line += f"; it was rolled back to its last good weights {count(set_backs, 'time')}"
            yield line + "."
    if batches := last("train/skipped_batches"):
        yield f"Skipped for good, because no agent had finite numbers: {batches:.0f} of the run's batches."
    if (rows := last("train/micro_batch_size")) is not None:
        configured = f" instead of {facts.config.batch_size}" if facts.config else ""
        yield f"Memory ran out: a micro-batch has {rows:.0f} rows{configured}; the effective batch is the same."
    yield from facts.because


def _memory(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Peaks by name, from metrics.jsonl and gpu_stats.json."""
    names = {"memory/resident_bytes": "training process", "memory/cuda_peak_bytes": "tensors on the GPU"}
    for key, name in names.items():
        if (peak := facts.metrics.peak(key)) is not None:
            yield name, size(peak)
    for key, peak in sorted(facts.hardware.items()):
        if key.endswith("_bytes"):
            yield key.removesuffix("_bytes").replace("/", ": ").replace("_", " "), size(peak)


def _peak_bytes(facts: RunFacts) -> float | None:
    on_gpu = facts.metrics.peak("memory/cuda_peak_bytes")
    return on_gpu if on_gpu is not None else facts.metrics.peak("memory/resident_bytes")


def _examples(facts: RunFacts) -> tuple[Sequence[Any], Sequence[Any]]:
    """Rows that were answered right or with free text, and rows answered wrong, those with the surest answers first."""
    solved = [row for row in facts.predictions if row["correct"] is not False]
    failed = sorted((row for row in facts.predictions if row["correct"] is False), key=surest_first)
    return solved[:MOST_EXAMPLES], failed[:MOST_EXAMPLES]


def _asked(facts: RunFacts) -> str:
    """The checkpoint that gave the answers, and the rows; empty if they are not known."""
    if not facts.asked:
        return ""
    answers = f"Answers of {facts.asked.get('checkpoint')}, to rows of {facts.asked.get('data')}."
    is_result = facts.asked.get("step") in (None, facts.result_step)
    return answers if is_result else f"{answers} The result of this run is that of step {facts.result_step}."


def _notable(attempt: Attempt) -> list[str]:
    return [" ".join(line.split()) for line in attempt.log if _NOTABLE.search(line)][:12]


def _commands(facts: RunFacts, leaderboard: Leaderboard | None = None) -> Iterator[tuple[str, str]]:
    """Commands that a person may type next: (what it does, the command)."""
    folder = facts.folder
    if facts.status.next_command and facts.status.status != "running":
        yield "resume from here", facts.status.next_command
    yield "how the run stands", shlex.join(["ci-llm", "status", str(folder)])
    if leaderboard is None:
        yield "its checkpoints", shlex.join(["ci-llm", "checkpoints", "list", str(folder)])
        yield "beside another run", shlex.join(["ci-llm", "compare", str(folder), "OTHER_RUN"])
    else:
        yield "its trials in the terminal", shlex.join(["ci-llm", "compare", str(folder)])
        if leaderboard.best_run is not None:
            yield "the run of the best trial", shlex.join(["ci-llm", "report", str(leaderboard.best_run)])
    if (folder / "tensorboard").is_dir():
        yield "all curves", curves_command(folder)
    if (folder / "final_checkpoint").is_dir():
        yield "ask the crowd", shlex.join(["ci-llm", "chat", str(folder)])
        yield "its answers to rows", shlex.join(["ci-llm", "evaluate", str(folder), "--failed"])
        yield "take it elsewhere", shlex.join(["ci-llm", "export", str(folder), "--to", "agents"])
    yield "this page again", shlex.join(["ci-llm", "report", str(folder)])


def curves_command(folder: Path) -> str:
    """The command that opens the curves of a run in TensorBoard, under the run's name."""
    name, drawn = folder.resolve().name, str(folder / "tensorboard")
    is_plain = not {":", ","} & {*name, *drawn}  # which separate names, folders and runs there
    return shlex.join(["tensorboard", *(["--logdir_spec", f"{name}:{drawn}"] if is_plain else ["--logdir", drawn])])


def losses(attempt: Attempt) -> str:
    """The optimizer steps that the end of an attempt cost, in words; for a killed one the fewest possible."""
    at_least = "at least " if attempt.outcome == "killed" else ""
    if attempt.redone_steps:
        return f"{at_least}{count(attempt.redone_steps, 'step')} lost"
    return "no step is known to be lost" if at_least else "no step lost"


def clock(seconds: float) -> str:
    """Local time of unix seconds."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def share(value: float) -> str:
    return f"{value:.0%}"


def number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def cut(text: object) -> str:
    """A text that may be long, shortened."""
    shown = str(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]} ..."
