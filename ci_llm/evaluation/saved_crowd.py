"""`ci-llm evaluate`: a saved crowd scores and answers rows, and every answer and all figures are kept.

It also makes the lines for a terminal: the figures of agents, their mean, vote and crowd, and the rows answered wrong.
"""

from __future__ import annotations

import logging
import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from ci_llm.core.durable import write_json
from ci_llm.core.evaluation_file import NOBODY, Evaluation, Figure, Sureness
from ci_llm.core.work import Listener, counted, listeners
from ci_llm.crowd.card import public_name
from ci_llm.crowd.given_path import is_base, require_checkpoint
from ci_llm.crowd.judging import Classes
from ci_llm.crowd.metrics import Reader
from ci_llm.crowd.pretrained import default_names, located
from ci_llm.crowd.questions import Answers, answer_questions
from ci_llm.crowd.scoring import AnswerScores, Scores, base_scores
from ci_llm.crowd.uncertainty import Calibration, fit, of_text, signals
from ci_llm.data.order import share
from ci_llm.data.rows import Chat, question_of
from ci_llm.distributed.precision import autocast
from ci_llm.evaluation import loading
from ci_llm.evaluation.evaluator import OF_BASE
from ci_llm.evaluation.predictions import (
    Predictions,
    Row,
    Source,
    open_predictions,
    require_own,
    sureness,
    sureness_of_answers,
)
from ci_llm.report.scores import failed_rows

logger = logging.getLogger(__name__)


T = TypeVar("T")


@dataclass(frozen=True)
class Evaluated:
    """A saved crowd after its evaluation, with every answer.

    Attributes:
        evaluation: the figures.
        lines: facts about the rows, for people.
        rows: the lines of the predictions file; empty for plain text.
        predictions: the predictions file; None for plain text.
        resumed: how many of the rows an earlier call had answered.
        read: finds the normalised answer in a text.
        seconds: the duration of this call.
        calibrated: the file of the calibration that this call has made; None without a calibration.
    """

    evaluation: Evaluation
    lines: list[str]
    rows: list[Row]
    predictions: Path | None
    resumed: int
    read: Reader
    seconds: float = 0.0
    calibrated: Path | None = None


def evaluate(request: loading.Request, listener: Listener | None = None) -> Evaluated:
    """Evaluate agents, vote and crowd, and keep every answer.

    Args:
        listener: hears of the batches and of all other work of this call, see `ci_llm.core.work`.

    Raises:
        BadInput: there is no checkpoint, or there are no rows, or the predictions file belongs to something else.
        DamagedCheckpoint: a file of the checkpoint differs from its digest.
        OutOfMemory: a batch does not fit.
    """
    began = time.monotonic()
    checkpoint = None
    with ExitStack() as held:
        if listener is not None:
            listeners.append(listener)
            held.callback(listeners.remove, listener)
        if not is_base(request.run):
            place = held.enter_context(located(request.run))
            checkpoint = require_checkpoint(place, str(request.run), final_first=True)
        found = _evaluate(request, checkpoint)
    return replace(found, seconds=time.monotonic() - began)


def _evaluate(request: loading.Request, checkpoint: Path | None) -> Evaluated:
    output = request.output or loading.default_output(checkpoint)
    require_own(output, overwrite=request.overwrite)
    calibrated = loading.require_place(checkpoint) if request.calibrate else None
    job = loading.load(request, checkpoint)
    if calibrated is not None:
        loading.require_new_rows(job)
    with autocast(job.config, job.crowd.device):
        if len(job.questions):
            prompts = [_prompt(job, number) for number in range(len(job.questions))]
            with open_predictions(output, _source(job), prompts, overwrite=request.overwrite) as predictions:
                resumed = len(predictions.rows)
                scores, base = _score(job)
                job.evaluator.fitting(partial(_answer, job, predictions), job.saved.step or 0, job.batch_size)
            rows = predictions.rows
            if calibrated is not None:
                job.crowd.calibration = _calibration(job, rows)
        else:
            if not job.crowd.settings.outputs and not job.is_rewarded:
                loading.refuse_unanswerable(job)
            resumed = 0
            rows = []
            scores, base = _score(job)
            if calibrated is not None:
                scores = _calibrated(job, scores)
        if calibrated is not None and job.crowd.calibration is not None:
            write_json(calibrated, job.crowd.calibration.record())
    return Evaluated(
        evaluation=_evaluation(job, scores, base, rows),
        lines=_lines(job),
        rows=rows,
        predictions=output if rows else None,
        resumed=resumed,
        read=job.questions.read,
        calibrated=calibrated,
    )


def _score(job: loading.Job) -> tuple[Scores, Scores]:
    """The scores of all rows, with the agents and by the base alone."""
    step = job.saved.step or 0
    scores = base = job.evaluator.scores(step, job.batch_size)
    if job.names and not job.crowd.settings.outputs:
        base = job.evaluator.scores_of_base(step, job.batch_size)
    assert scores is not None, "nobody asks to stop"
    assert base is not None
    return scores, base


# Answers


def _answer(job: loading.Job, predictions: Predictions, size: int) -> None:
    """Answer the questions without a line yet, by agents, crowd and base, and write the lines batch by batch."""
    batches = share(range(len(predictions.rows), len(job.questions)), 0, 1, size)
    answers = partial(answer_questions, job.crowd, job.questions, max_new_tokens=job.evaluator.longest)
    answered = answers(batches, aggregator=job.config.aggregator, uncertainty=True)
    for batch in counted(batches, "answer", len(batches), "batches"):
        ours = bases = [*islice(answered, len(batch))]
        if job.names:
            with job.crowd.without_agents():
                bases = [*answers([batch], aggregator=OF_BASE)]
        predictions.append([_row(job, *both) for both in zip(ours, bases, strict=True)])


def _row(job: loading.Job, answers: Answers, base: Answers) -> Row:
    """The line of one question in the predictions file. Free text is neither right nor wrong."""
    number = answers.number
    sure = of_text(answers.sure)
    right = [*answers.right, base.right[0]]
    *agents, crowd, vote, of_base = right if job.evaluator.primary_metric == "exact_match" else [None] * len(right)
    count = len(job.names)
    source = job.tokenized.rows.numbers
    canonical = job.tokenized.row_numbers[job.questions.rows[number]]
    return {
        "prompt": _prompt(job, number),
        "reference": job.questions.references[number],
        "answer": answers.crowd,
        "agents": answers.agents[:count],
        "base": base.crowd,
        "correct": crowd,
        "confidence": float(f"{sure.confidence:.6g}"),
        "disagreement": round(sure.disagreement, 6),
        "row": source[canonical] if source else canonical,
        "agents_correct": agents[:count],
        "vote_correct": vote,
        "base_correct": of_base,
        "signals": [round(number, 6) for number in signals(answers.sure)],
    }


def _prompt(job: loading.Job, number: int) -> str:
    """The question as the user wrote it; for several turns, or rows of tokens, the text that the model reads."""
    row = job.tokenized.rows[job.tokenized.row_numbers[job.questions.rows[number]]]
    several = isinstance(row, Chat) and sum(message.role == "user" for message in row.messages) > 1
    question = None if several else question_of(row)
    return job.crowd.prompter.text(job.questions.prompts[number]) if question is None else question


# Calibration


def _calibrated(job: loading.Job, scores: Scores) -> Scores:
    """Fit the temperature of classes and give it to the crowd; returns the scores at this temperature."""
    assert isinstance(scores.units, Classes), "others were refused"
    before = replace(scores.units, temperature=1.0)
    fitted = Calibration.of_classes(before.everyone[-1].log(), before.labels, **_about(job, len(before.labels)))
    job.crowd.calibration = fitted
    units = replace(before, temperature=fitted.temperature)
    return replace(scores, units=units, nll=units.outcome[1])


def _about(job: loading.Job, rows: int) -> dict[str, Any]:
    """The facts that a calibration records about its rows and its crowd."""
    data = public_name(job.tokenized.rows.where)  # because it leaves this machine with the agents
    return {"rows": rows, "data": data, "weights": job.saved.weights}


def _calibration(job: loading.Job, rows: Sequence[Row]) -> Calibration:
    """The calibration from the lines of the predictions file."""
    *agents, crowd, _ = _right(rows).tolist()
    about = _about(job, len(rows))
    return fit([row["signals"] for row in rows], crowd, agents, aggregator=job.config.aggregator, **about)


# The figures


def _right_answers(job: loading.Job, rows: Sequence[Row]) -> tuple[AnswerScores | None, AnswerScores | None]:
    """The right answers of agents, crowd and vote, and those of the base; None for free text."""
    if not rows or job.evaluator.primary_metric == "nll":
        return None, None
    right, base = _right(rows), torch.tensor([[row["base_correct"] for row in rows]])
    if not job.names:
        right = torch.cat([base, right])  # a crowd of one
    return AnswerScores(right, answered=job.evaluator.answered), AnswerScores(base)


def _right(rows: Sequence[Row]) -> torch.Tensor:
    """[K+2, n] bool: K agents, the crowd, the vote."""
    return torch.tensor([[*row["agents_correct"], row["correct"], row["vote_correct"]] for row in rows]).T


def _evaluation(job: loading.Job, scores: Scores, base: Scores, rows: Sequence[Row]) -> Evaluation:
    config, (right, base_right) = job.config, _right_answers(job, rows)
    heads, names = bool(job.crowd.settings.outputs), job.crowd.names
    rates = [own.learning_rate for own in config.each_agent]
    has_own = job.saved.run_config is not None and len(rates) == len(job.names)
    more = dict[str, Any]()
    if right is None and not heads and not job.is_rewarded:
        more = _text_figures(job, scores, base)
    if not job.names:
        more |= {"exact_match": NOBODY, "nll": NOBODY, "teacher_forced": None}
    return job.evaluator.evaluation(
        scores,
        right,
        task=job.request.data or config.task,
        step=job.saved.step,
        base=None if heads else base_scores(base, base_right),
        names=tuple(job.names) if job.names != names else (),
        folders=tuple(names) if job.names and names != default_names(len(names)) else (),
        learning_rates=tuple(rates) if has_own else (),
        left_out=0 if heads or job.is_rewarded else job.questions.left_out,
        sureness=_sureness(job, scores, right, rows),
        **more,
    )


def _sureness(job: loading.Job, scores: Scores, right: AnswerScores | None, rows: Sequence[Row]) -> Sureness | None:
    """The quality of the crowd's sureness; None where nothing is right or wrong."""
    below = job.request.abstain_below
    if right is not None:
        return sureness_of_answers(rows, job.crowd.calibration, job.config.aggregator, abstain_below=below)
    if isinstance(scores.units, Classes):
        return sureness("probability", scores.units.everyone[-1].amax(-1), scores.right[-1], below)
    return None


def _text_figures(job: loading.Job, scores: Scores, base: Scores) -> dict[str, Any]:
    """Perplexity per token, and bits per byte, which do not depend on the tokenizer."""
    tokens, nats = int(scores.tokens.sum()), torch.cat([base.nll[:1], scores.nll]).double().sum(1)
    targets = (job.tokenized[number] for number in range(len(job.tokenized)))
    size = sum(len(job.crowd.prompter.text(row.input_ids[row.supervised].tolist()).encode()) for row in targets)

    def figure(values: torch.Tensor) -> Figure:
        of_base, *agents, crowd = values.tolist()
        return Figure(tuple(agents), crowd, base=of_base) if job.names else replace(NOBODY, base=of_base)

    figures = {"perplexity": (nats / tokens).exp(), "bits_per_byte": nats / math.log(2) / max(1, size)}
    return {"tokens": tokens, "bytes": size, **{name: figure(values) for name, values in figures.items()}}


def _lines(job: loading.Job) -> list[str]:
    found = job.tokenized.rows.description
    # It is followed by lines on the template and the tokens, on rows cut or left out, and by an example row.
    facts = [*found, *job.tokenized.description[len(found) + 2 : -1]]
    if job.request.is_of_own_rows and len({*job.config.evaluated_on}) > 1:
        facts.append("each agent answers the rows of all agents; the run's evaluation.json scores it by its own rows")
    if len(job.questions):
        facts.append(f"answers of at most {job.config.answer_tokens(job.questions.longest)} tokens are generated")
    if job.questions.left_out and len(job.questions):
        facts.append(
            f"not asked: {job.questions.left_out} rows, which have no question, or no place for a whole answer"
            f" within {job.config.max_seq_length} tokens"
        )
    return facts


# The source of predictions


def _source(job: loading.Job) -> Source:
    return Source(
        weights=job.saved.weights,
        checkpoint=f"step {job.saved.step} of {Path(job.saved.source).absolute().parent}"
        if job.names
        else job.saved.source,
        data=job.tokenized.rows.where,
        rows=len(job.questions),
        aggregator=job.config.aggregator,
        step=job.saved.step,
        **asdict(job.evaluator.answered),
    )


def failed_lines(found: Evaluated, most: int) -> Iterator[str]:
    """A line for each row that the crowd answered wrong, beginning with those of which it was most sure.

    Args:
        most: the most rows that are listed.
    """
    failed = failed_rows(found.rows)
    for row in failed[:most]:
        answer, reference = (_short(found.read(row[key]), 24) for key in ("answer", "reference"))
        yield (
            f"row {row['row']:<6} {row['confidence']:.2f}  answered {answer or 'nothing'}, right is {reference}:"
            f"  {_short(row['prompt'], 60)}"
        )
    if len(failed) > most:
        yield f"... and {len(failed) - most} more: --failed {len(failed)}"


def _short(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")
