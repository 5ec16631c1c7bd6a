"""An evaluation of a saved crowd: its rows, teacher-forced and answered; every answer kept; the figures of both."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import datasets
import torch
import xxhash

from ci_llm.checkpoints.manifest import Manifest, read_manifest
from ci_llm.config import Config
from ci_llm.core.memory import is_out_of_memory
from ci_llm.crowd.answer_scores import Answers, AnswerScores, Questions, answer_questions, merge_records
from ci_llm.crowd.base import DTYPES
from ci_llm.crowd.generation import num_positions
from ci_llm.crowd.metrics import Reader
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.prompts import Prompter
from ci_llm.crowd.recognise import META, require_checkpoint
from ci_llm.crowd.scoring import Scores, evaluation_record, score
from ci_llm.data.batches import pack
from ci_llm.data.order import share
from ci_llm.data.rows import Chat, Rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import BadInput, DataError, OutOfMemory
from ci_llm.evaluation.predictions import Predictions, Row, Source, open_predictions, require_own
from ci_llm.evaluation.rows import Choice, open_rows, read_run_config

logger = logging.getLogger(__name__)

PREDICTIONS: Final = "predictions.jsonl"

Phase = Literal["loading", "scoring", "answering"]
Progress = Callable[[Phase, int, int], None]


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how.

    Attributes:
        run: the folder of a run, or a checkpoint.
        metric: a module of `ci_llm.crowd.metrics`.
        batch_size: questions answered at a time, and a quarter of the rows scored at a time; None: as in training.
        output: the predictions file; None: `predictions.jsonl` in the folder of the run.
        overwrite: begin the predictions file anew, whatever it holds.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.
    """

    run: Path
    choice: Choice
    metric: str = "exact_match"
    batch_size: int | None = None
    output: Path | None = None
    overwrite: bool = False
    base_model: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found.

    Attributes:
        record: the figures, by the names of `evaluation.json`.
        lines: what was found about the rows, for people.
        rows: the lines of the predictions file; empty for plain text.
        predictions: that file; None for plain text.
        resumed: how many of the rows an earlier call had answered.
        read: finds the answer in a text, normalised.
        seconds: since the beginning of this call.
    """

    record: dict[str, Any]
    lines: list[str]
    rows: list[Row]
    predictions: Path | None
    resumed: int
    read: Reader
    seconds: float


@dataclass(frozen=True)
class _Job:
    """The parts of an evaluation, loaded."""

    request: Request
    config: Config
    crowd: Crowd
    prompter: Prompter
    tokenized: TokenizedRows
    questions: Questions
    batch_size: int


def evaluate(request: Request, progress: Progress = lambda *_: None) -> Evaluation:
    """Evaluate agents, vote and crowd, and keep every answer.

    Args:
        progress: called with the phase, the rows done and all rows.

    Raises:
        BadInput: no checkpoint, no rows, a predictions file of something else.
        DamagedCheckpoint: a file of the checkpoint differs from its digest.
        OutOfMemory: a batch does not fit.
    """
    began = time.monotonic()
    checkpoint = require_checkpoint(request.run, str(request.run), final_first=True)
    output = request.output or _default_output(checkpoint)
    require_own(output, overwrite=request.overwrite)
    progress("loading", 0, 0)
    job = _load(request, checkpoint)
    manifest = read_manifest(checkpoint)
    with _fits(job.batch_size), _autocast(job.config, job.crowd.device):
        if len(job.questions):
            source = _source(job, checkpoint, manifest)
            with open_predictions(output, source, _prompts(job), overwrite=request.overwrite) as predictions:
                resumed = len(predictions.rows)
                scores = _score(job, progress)
                _answer(job, predictions, progress)
            rows, right = predictions.rows, AnswerScores(_right(predictions.rows))
        else:
            _refuse_unanswerable(job)
            resumed, rows, right, scores = 0, [], None, _score(job, progress)
    return Evaluation(
        record=_record(job, manifest.step, scores, right),
        lines=_lines(job),
        rows=rows,
        predictions=output if rows else None,
        resumed=resumed,
        read=job.questions.read,
        seconds=time.monotonic() - began,
    )


# What is loaded


def _default_output(checkpoint: Path) -> Path:
    """In the folder of the run, where reports look for it; never in a checkpoint, whose files are fixed."""
    run = checkpoint.absolute().parent
    return (checkpoint.parent if (run / "status.json").is_file() else Path()) / PREDICTIONS


def _load(request: Request, checkpoint: Path) -> _Job:
    choice = request.choice
    config, rows = open_rows(read_run_config(checkpoint), choice, str(request.run))
    crowd = Crowd.from_pretrained(checkpoint, base_model=request.base_model)
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
        tokenized, prompter, crowd, count or len(tokenized), config.max_seq_length, metric=request.metric
    )
    batch_size = request.batch_size or config.batch_size
    return _Job(request, config, crowd, prompter, tokenized, questions, batch_size)


def _tokenized(rows: Rows, prompter: Prompter, config: Config) -> TokenizedRows:
    try:
        return tokenize(
            rows,
            prompter.tokenizer,
            max_seq_length=config.max_seq_length,
            cache_folder=Path(datasets.config.HF_DATASETS_CACHE, "ci_llm"),
        )
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


def _refuse_unanswerable(job: _Job) -> None:
    """Rows that ask something, of which none fits: their teacher-forced figures alone would be misread."""
    if job.tokenized.questions is not None:
        raise DataError(
            f"none of {len(job.tokenized)} rows has place for its answer within {job.config.max_seq_length} tokens",
            where=job.tokenized.rows.where,
            hint="shorten the rows, or raise max_seq_length= up to the positions of the base",
        )
    if job.request.output is not None:
        raise BadInput("plain text has no answers, and so no predictions", where="--output", hint="leave --output out")


def _autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of the training's own evaluations."""
    dtype = DTYPES.get(config.mixed_precision)
    if dtype is None or (dtype == torch.float16 and device.type == "cpu"):  # as Accelerate, which then takes fp32
        return nullcontext()
    return torch.autocast(device.type, dtype)


@contextmanager
def _fits(batch_size: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        if not is_out_of_memory(cause):
            raise
        raise OutOfMemory(
            f"memory ran out: {cause}".splitlines()[0],
            where=f"--batch-size {batch_size}",
            hint=f"--batch-size {max(1, batch_size // 2)} goes on after the rows that are answered",
        ) from error


# What is asked


def _score(job: _Job, progress: Progress) -> Scores:
    """Every row, teacher-forced; in the batches of the training's own evaluation, which has no gradients either."""
    total = len(job.tokenized)
    parts = share(range(total), 0, 1, 4 * job.batch_size)

    def batches() -> Iterator[Any]:
        for part in parts:
            progress("scoring", part[0], total)
            yield pack([job.tokenized[number] for number in part], part)

    scores = score(job.crowd, batches(), job.config.aggregator)
    assert scores is not None, "nobody asks to stop"
    return scores


def _answer(job: _Job, predictions: Predictions, progress: Progress) -> None:
    """Answer the questions that have no line yet.

    A batch that was begun is answered as a whole again: beside other prompts, its numbers differ in their last bits.
    """
    total, done = len(job.questions), len(predictions.rows)
    batches = [batch for batch in share(range(total), 0, 1, job.batch_size) if batch[-1] >= done]
    config = job.config
    progress("answering", done, total)
    for answers in answer_questions(
        job.crowd,
        job.prompter,
        job.questions,
        batches,
        max_new_tokens=config.max_new_tokens_eval,
        aggregator=config.aggregator,
        uncertainty=True,
    ):
        rows = [row for number, row in zip(answers.numbers, _rows(job, answers), strict=True) if number >= done]
        predictions.append(rows)
        progress("answering", answers.numbers[-1] + 1, total)


def _rows(job: _Job, answers: Answers) -> Iterator[Row]:
    """The lines of the predictions file for a batch."""
    numbers, source = job.tokenized.row_numbers, job.tokenized.rows.numbers
    for at, number in enumerate(answers.numbers):
        *agents, crowd, vote = answers.right[:, at].tolist()
        canonical = numbers[job.questions.rows[number]]
        yield {
            "prompt": _prompt(job, number),
            "reference": job.questions.references[number],
            "answer": answers.crowd[at],
            "agents": [texts[at] for texts in answers.agents],
            "correct": crowd,
            "confidence": round(answers.uncertainty[at].confidence, 6),
            "disagreement": round(answers.uncertainty[at].disagreement, 6),
            "row": source[canonical] if source else canonical,
            "agents_correct": agents,
            "vote_correct": vote,
        }


def _prompts(job: _Job) -> list[str]:
    return [_prompt(job, number) for number in range(len(job.questions))]


def _prompt(job: _Job, number: int) -> str:
    """The question as the user wrote it; a conversation of several turns, or of tokens, as the model reads it."""
    row = job.tokenized.rows[job.tokenized.row_numbers[job.questions.rows[number]]]
    several = isinstance(row, Chat) and sum(message.role == "user" for message in row.messages) > 1
    if row is None or row.question is None or several:
        return job.prompter.text(job.questions.prompts[number])
    return row.question


# What is found


def _right(rows: Sequence[Row]) -> torch.Tensor:
    """[K+2, n] bool: K agents, the crowd, the vote."""
    return torch.tensor([[*row["agents_correct"], row["correct"], row["vote_correct"]] for row in rows]).T


def _record(job: _Job, step: int, scores: Scores, right: AnswerScores | None) -> dict[str, Any]:
    config = job.config
    task = job.request.choice.data or config.task
    forced = evaluation_record(scores, task, config.aggregator, job.tokenized.rows.trained_on)
    record = {**merge_records(forced, right), "step": step}
    if right is not None:
        return {**record, "metric": job.request.metric, "left_out": job.questions.left_out}
    return {**record, **_text_figures(job, scores)}


def _text_figures(job: _Job, scores: Scores) -> dict[str, Any]:
    """Perplexity per token, and bits per byte, which do not depend on the tokenizer."""
    tokens, nats = int(scores.tokens.sum()), scores.nll.double().sum(1)
    targets = (job.tokenized[number] for number in range(len(job.tokenized)))
    size = sum(len(job.prompter.text(row.input_ids[row.supervised].tolist()).encode()) for row in targets)
    *perplexity, crowd = (nats / tokens).exp().tolist()
    *bits, crowd_bits = (nats / math.log(2) / max(1, size)).tolist()
    return {
        "tokens": tokens,
        "bytes": size,
        "perplexity": {"agents": perplexity, "crowd": crowd},
        "bits_per_byte": {"agents": bits, "crowd": crowd_bits},
    }


def _lines(job: _Job) -> list[str]:
    found = job.tokenized.rows.description
    # After it come the template, the tokens, what was cut or left out, and finally an example row.
    facts = [*found, *job.tokenized.description[len(found) + 2 : -1]]
    if job.questions.left_out and len(job.questions):
        facts.append(
            f"not asked: {job.questions.left_out} rows, which have no question, or no place for a whole answer"
            f" within {job.config.max_seq_length} tokens"
        )
    return facts


# What identifies it


def _source(job: _Job, checkpoint: Path, manifest: Manifest) -> Source:
    return Source(
        weights=_weights(manifest),
        questions=_fingerprint([job.questions.prompts, job.questions.references]),
        checkpoint=f"step {manifest.step} of {checkpoint.absolute().parent}",
        data=job.tokenized.rows.where,
        rows=len(job.questions),
        metric=job.request.metric,
        aggregator=job.config.aggregator,
        max_new_tokens=job.config.max_new_tokens_eval,
    )


def _weights(manifest: Manifest) -> str:
    """A fingerprint of agents and base: the same for a final checkpoint and the step that it was made of."""
    files: Mapping[str, Any] = manifest.files
    parts = [name for name in files if name.endswith("/adapter_model.safetensors") or name.startswith(META)]
    return _fingerprint([[name, files[name].digest] for name in sorted(parts)])


def _fingerprint(value: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value).encode()))
