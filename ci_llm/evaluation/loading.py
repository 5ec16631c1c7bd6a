"""What is evaluated, opened: a saved crowd, its rows, and the questions in them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from ci_llm.config import Config
from ci_llm.crowd.answer_scores import Questions
from ci_llm.crowd.generation import num_positions
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.pretrained import calibration_path, given_names, open_pretrained
from ci_llm.crowd.prompts import Prompter
from ci_llm.data.mixture import joined_sizes
from ci_llm.data.rows import Rows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import BadInput, DataError
from ci_llm.evaluation.rows import Choice, open_rows, read_run_config
from ci_llm.evaluation.sureness import AGENTS_PER_PROMPT

logger = logging.getLogger(__name__)

PREDICTIONS: Final = "predictions.jsonl"


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how.

    Attributes:
        run: the folder of a run, a checkpoint, a saved crowd, or a hub id.
        metric: a module of `ci_llm.crowd.metrics`.
        batch_size: questions answered at a time, and a quarter of the rows scored at a time; None: as in training.
        output: the predictions file; None: `predictions.jsonl` in the folder of the run.
        overwrite: begin the predictions file anew, whatever it holds.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.
        calibrate: fit a calibration on the answers, and keep it beside the checkpoint.
        abstain_below: say what answers remain if those that are less probably right are not given.
        agents_per_prompt: say what asking one agent first keeps at this price.
    """

    run: str
    choice: Choice
    metric: str = "exact_match"
    batch_size: int | None = None
    output: Path | None = None
    overwrite: bool = False
    base_model: str | None = None
    calibrate: bool = False
    abstain_below: float | None = None
    agents_per_prompt: float = AGENTS_PER_PROMPT


#: Rows of a training with which rows to evaluate on are compared. Every one is read for that.
COMPARED_AT_MOST = 200_000


@dataclass(frozen=True)
class Job:
    """The parts of an evaluation, loaded.

    Attributes:
        names: of the agents, for people.
    """

    request: Request
    config: Config
    crowd: Crowd
    names: list[str]
    prompter: Prompter
    tokenized: TokenizedRows
    questions: Questions
    batch_size: int


def default_output(checkpoint: Path) -> Path:
    """In the folder of the run, where reports look for it; never in a checkpoint, whose files are fixed."""
    run = checkpoint.absolute().parent
    return (checkpoint.parent if (run / "status.json").is_file() else Path()) / PREDICTIONS


def load(request: Request, checkpoint: Path) -> Job:
    choice = request.choice
    trained = read_run_config(checkpoint)
    config, rows = open_rows(trained, choice, str(request.run))
    rows = _counting_copies(rows, trained)
    saved = open_pretrained(checkpoint, base_model=request.base_model)
    crowd, names = Crowd.of(saved), given_names(saved.meta)
    if reason := crowd.choose_route():
        logger.debug("rows are padded, not packed: %s", reason)
    prompter = crowd.prompter
    assert prompter is not None, "a crowd that was opened has one"
    if choice.data is not None and "max_seq_length" not in choice.keys:
        # What the run had place for in training says nothing about other rows: the base's positions do.
        config = config.model_copy(update={"max_seq_length": num_positions(crowd.model)})
    tokenized = _tokenized(rows, prompter, config)
    count = config.generation_eval_samples if choice.is_own else 0
    questions = Questions.of(
        tokenized,
        prompter,
        crowd,
        count or len(tokenized),
        config.max_seq_length,
        metric=request.metric,
        sets=_sets(tokenized) if len({*config.evaluated_on}) > 1 else None,
    )
    batch_size = request.batch_size or config.batch_size
    return Job(request, config, crowd, names, prompter, tokenized, questions, batch_size)


def _sets(tokenized: TokenizedRows) -> list[range]:
    """The rows of each set, where agents have sets of their own: they stand one after the other."""
    ends = [bisect_left(tokenized.row_numbers, end) for end in accumulate(joined_sizes(tokenized.rows))]
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _counting_copies(rows: Rows, trained: Config | None) -> Rows:
    """The rows, which know how many of them the run was trained on, as far as its data can be read."""
    if trained is None or rows.num_trained_on:
        return rows
    try:
        training = load_rows(trained, "train")
        if len(training) > COMPARED_AT_MOST:
            logger.warning(f"whether rows are copies of the {len(training)} rows to train on is not looked up")
            return rows
        return rows.counting_copies_of(training)
    except DataError as error:
        logger.warning(f"whether rows are copies of rows to train on is not known: {error.what}")
        return rows


def _tokenized(rows: Rows, prompter: Prompter, config: Config) -> TokenizedRows:
    try:
        return tokenize(rows, prompter.tokenizer, max_seq_length=config.max_seq_length)
    except DataError as error:
        if any(row is not None for row in rows):
            what = error.what.replace("to learn from", "to evaluate")
            raise DataError(what, where=error.where, hint=error.hint) from error
        columns = ", ".join(rows.form.columns.values())
        answers = rows.form.columns.get("answer") or rows.form.columns.get("completion")
        raise DataError(
            f"no row has an answer to compare with: column {answers!r} is empty" if answers else "no row has an answer",
            where=rows.where,
            hint=f"give rows with reference answers, or name their column by answer_column=; read are: {columns}",
        ) from error


def refuse_unanswerable(job: Job) -> None:
    """Rows that ask something, of which none fits: their teacher-forced figures alone would be misread."""
    if any(row is not None and row.question is not None for row in job.tokenized.rows):
        raise DataError(
            f"none of {len(job.tokenized)} rows has place for its answer within {job.config.max_seq_length} tokens",
            where=job.tokenized.rows.where,
            hint="shorten the rows, or raise max_seq_length= up to the positions of the base",
        )
    if job.request.calibrate:
        raise BadInput("plain text has no answers to calibrate on", where="--calibrate", hint="leave --calibrate out")
    if job.request.output is not None:
        raise BadInput("plain text has no answers, and so no predictions", where="--output", hint="leave --output out")


def require_new_rows(job: Job) -> None:
    """Refuse to calibrate on rows that were all learned."""
    if job.tokenized.rows.trained_on == "all":
        raise BadInput(
            "these rows were trained on: they show how sure the crowd is of what it remembers",
            where=f"--calibrate: {job.tokenized.rows.where}",
            hint="--split validation, or other rows by --data",
        )


def require_place(checkpoint: Path) -> Path:
    path = calibration_path(checkpoint)
    if path is None:
        raise BadInput(
            "a calibration is kept in the folder of a run, and this is no checkpoint in one",
            where=f"--calibrate {checkpoint}",
            hint="calibrate the run before you export it: what is exported has its calibration",
        )
    return path
