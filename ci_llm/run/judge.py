"""How a run judges agents and crowd: teacher-forced on the way, by generation at the end; on all its processes."""

from __future__ import annotations

from ci_llm.ballot import Ballot
from ci_llm.crowd.answers import AnswerScores, Examination, examine
from ci_llm.crowd.evaluate import Scores, score
from ci_llm.data.batches import pack
from ci_llm.data.order import share
from ci_llm.run.run import Run


def evaluate_and_log(run: Run) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason if a stop was asked for meanwhile."""
    scores = evaluate(run)
    stop = run.processes.agree(Ballot(labelled_tokens=0, stop=run.interrupts.stop_reason)).stop
    if scores is not None:
        run.log.metrics(run.state.step, evaluation_metrics(scores))
    return stop


def evaluate(run: Run) -> Scores | None:
    """Scores over all processes, each of which takes its share of the rows; None if a stop was asked for."""
    shares = share(range(len(run.eval_rows)), run.processes.index, run.processes.count, 4 * run.config.batch_size)
    batches = (pack([run.eval_rows[i] for i in part], part) for part in shares)
    with run.processes.autocast():
        own = score(run.crowd, batches, run.config.aggregator, stop=lambda: run.interrupts.stop_reason is not None)
    parts = run.processes.gather_object(own)
    whole = [part for part in parts if part is not None]
    return Scores.joined(whole) if len(whole) == len(parts) else None


def examine_crowd(run: Run) -> AnswerScores | None:
    """Generated answers scored over all processes; None if the rows ask nothing, or a stop was asked for."""
    assert run.crowd.prompter is not None
    config, prompter = run.config, run.crowd.prompter
    asked = Examination.of(run.eval_rows, prompter, run.crowd, config.generation_eval_samples, config.max_seq_length)
    if not len(asked):
        return None
    with run.processes.autocast():
        own = examine(
            run.crowd,
            prompter,
            asked,
            share(range(len(asked)), run.processes.index, run.processes.count, config.batch_size),
            max_new_tokens=config.max_new_tokens_eval,
            aggregator=config.aggregator,
            stop=lambda: run.interrupts.stop_reason is not None,
        )
    parts = run.processes.gather_object(own)
    whole = [part for part in parts if part is not None]
    return AnswerScores.joined(whole) if len(whole) == len(parts) else None


def evaluation_metrics(scores: Scores) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows reproduced exactly."""
    metrics = {}
    names = [*(f"agent{k}" for k in range(len(scores.right) - 1)), "crowd"]
    for name, exact, nll in zip(names, scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics


def evaluation_due(run: Run) -> bool:
    """Whether the step just taken is one to evaluate after; the last one is judged by `job.conclude`."""
    every, step = run.config.eval_steps, run.state.step
    return every is not None and step % every == 0 and step < run.total_steps


def evaluation_missed(run: Run) -> bool:
    """Whether the attempt before ended between the step this one goes on from and the evaluation due there."""
    if run.state.step == 0 or not evaluation_due(run):
        return False
    return not run.processes.broadcast_object(run.log.has_metric(run.state.step, "eval/crowd/nll"))
