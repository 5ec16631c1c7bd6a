"""The result of a run: as a value for a script, and for people as a table, a model card, next commands, report.html."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ci_llm.base.load import auto_class
from ci_llm.cluster.launch import exit_code_after_stop, has_rounds
from ci_llm.config import Config
from ci_llm.core.evaluation_file import Evaluation
from ci_llm.core.measures import measures_of
from ci_llm.core.run_folder import PushRecord, keep_push
from ci_llm.crowd.card import CardFacts, crowd_card, public_name
from ci_llm.errors import BadInput, CiLlmError
from ci_llm.objectives import head_size
from ci_llm.report.facts import read_metrics
from ci_llm.report.page import curves_command, write_report
from ci_llm.report.scores import scores, table
from ci_llm.run.attempt import Attempt, described

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from ci_llm.crowd.crowd import Crowd
    from ci_llm.distributed.processes import Processes


@dataclass(frozen=True)
class Result:
    """How a run ended; the same on every process. A run that fails raises an error and has no result.

    A notebook shows it as the report of the run.

    Attributes:
        status: "completed", or "interrupted": the same call resumes from what is saved.
        step: optimizer steps taken.
        folder: the folder of the run.
        evaluation: the final evaluation; None if the run was interrupted.
        reason: why it was interrupted: "signal:SIGINT", "walltime", "callback", ...; None if it is completed.
    """

    status: Literal["completed", "interrupted"]
    step: int
    folder: Path
    evaluation: Evaluation | None = field(default=None, repr=False)
    reason: str | None = None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The final evaluation as in `evaluation.json`; empty if the run was interrupted."""
        return self.evaluation.to_dict() if self.evaluation else {}

    @cached_property
    def crowd(self) -> Crowd:
        """The crowd of the final checkpoint, or of the newest one of an interrupted run; loaded at first use.

        Raises:
            CiLlmError: nothing is saved, or it is damaged.
        """
        from ci_llm.crowd.crowd import Crowd

        return Crowd.from_pretrained(self.folder)

    @property
    def scores(self) -> pd.DataFrame:
        """The final evaluation: a line for the untrained base, each agent, their mean, their vote and the crowd.

        Columns: `exact_match`, the share of right answers, with the ends `low` and `high` of its 95 % interval; `nll`,
        nats per token of the reference, or the loss of a row for heads; `learning_rate`. A number that was not measured
        is NaN. An interrupted run has no lines.
        """
        import pandas as pd

        lines = [asdict(score) for score in scores(self.evaluation)] if self.evaluation else []
        columns = ["who", "exact_match", "low", "high", "nll", "learning_rate"]
        return pd.DataFrame(lines, columns=columns).set_index("who").astype(float)

    @property
    def history(self) -> pd.DataFrame:
        """`metrics.jsonl` of all attempts, and the final evaluation: a line per step, a column per number.

        Losses and NLL are in nats per token, unless the objective has another unit; `step_time_s` is in seconds. A
        number that a step does not have is NaN.
        """
        import pandas as pd

        found = read_metrics(self.folder)
        lines = (found.with_last(self.evaluation) if self.evaluation else found).lines
        table = pd.DataFrame(lines, columns=[*dict.fromkeys(key for line in lines for key in line)] or ["step"])
        return table.groupby("step").last().apply(pd.to_numeric, errors="coerce")

    @property
    def best(self) -> Mapping[str, Any]:
        """The best evaluation of the crowd: `step`, `value` and `metric`, which is nll (nats per token) or exact_match.

        Empty if the run was interrupted, or never evaluated the crowd.
        """
        found = self.evaluation and self.evaluation.ending and self.evaluation.ending.best
        return {**asdict(found.crowd), "metric": found.metric} if found and found.crowd else {}

    def plot(self) -> Any:
        """Draw the training loss, and the loss of the crowd on held-out rows, over the steps.

        Returns:
            the axes of Matplotlib.

        Raises:
            BadInput: Matplotlib is not installed.
        """
        try:
            import matplotlib  # type: ignore[import-not-found,unused-ignore] # noqa: F401
        except ImportError as error:
            raise BadInput("Matplotlib is not installed", where="Result.plot", hint="pip install matplotlib") from error
        names = {"train/task_loss": "training, mean of the agents", "eval/crowd/nll": "crowd, held out"}
        curves = self.history.reindex(columns=[*names]).rename(columns=names).interpolate(limit_area="inside")
        words = self.evaluation.measures if self.evaluation else measures_of("sft")
        units = dict.fromkeys([words.trained, words.loss])
        return curves.plot(xlabel="step", ylabel=" and ".join(units))

    def _repr_html_(self) -> str:
        """The report of the run, for a notebook; its scores where there is none."""
        page = self.folder / "report.html"
        if page.is_file():
            inner = escape(page.read_text(encoding="utf-8"))
            return f'<iframe srcdoc="{inner}" style="width:100%; height:600px; border:0"></iframe>'
        return f"<p>{escape(repr(self))}</p>{self.scores.to_html(na_rep='', float_format='{:.4g}'.format)}"

    def exit_code(self, config: Config) -> int:
        """The exit code of a program that ends with this run."""
        if self.status != "interrupted":
            return 0
        return exit_code_after_stop(self.reason or "", config.interrupted_exit_code)


logger = logging.getLogger(__name__)


def score_table(evaluation: Evaluation, run: Path | str | None) -> str:
    """Base and agents beside the crowd; for `run` see `ci_llm.report.scores.table`."""
    lines = [*table(evaluation, run)]
    if evaluation.ending and evaluation.ending.warning:
        lines.append(f"warning: while they trained, {evaluation.ending.warning}")
    return "\n".join(lines)


def final_card(evaluation: Evaluation, crowd: Crowd, datasets: Iterable[str], step: int) -> str:
    """README.md of `final_checkpoint`."""
    configs = [values for name, values in crowd.adapter_files().items() if name.endswith("/adapter_config")]
    facts = CardFacts(
        base=crowd.base_model.base_name,
        ranks=[config["r"] for config in configs],
        agents=crowd.names,
        trained=f" for {step} optimizer steps on `{', '.join(map(public_name, datasets))}`",
        scores=score_table(replace(evaluation, data=tuple(map(public_name, evaluation.data))), None),
        notes=[
            "The folder is also a complete checkpoint: `resume_from_checkpoint` takes it, with a larger"
            " `max_train_steps`, and trains on from there."
        ],
        opened_with=auto_class(crowd.model.config).__name__,
        num_labels=crowd.settings.outputs,
        classes=crowd.classes,
    )
    return crowd_card(facts)


#: A run on the reader's own rows, as in the README.
OWN_DATA: Final = "ci-llm train model_name=Qwen/Qwen2.5-0.5B dataset_name=my.jsonl experiment_name=mine"


def log_next_steps(config: Config, evaluation: Evaluation, to_go_on: Mapping[str, str]) -> None:
    """Log what to do after a completed run, or which agents have no finite scores.

    Args:
        config: with the agents that the run ends with.
        to_go_on: the keys to change for this run to train on.
    """
    each = zip(evaluation.agent_names, evaluation.nll.agents, strict=True)
    if bad := [name for name, loss in each if not math.isfinite(loss)]:
        logger.warning(
            f"the scores of {', '.join(bad)} are not finite: these adapters cannot be used; a smaller learning_rate,"
            " with overwrite_output_dir=true or another experiment_name, trains them again"
        )
        return
    folder = config.run_folder
    export = ["ci-llm", "export", str(folder), "--merge", "svd", "--to", "adapter"]
    is_example = not any(Path(name).expanduser().exists() for name in config.all_dataset_names)
    heads = head_size(config)
    lines = [
        f"ask        ci-llm {'score' if heads else 'chat'} {shlex.quote(str(folder))}",
        f"adapters   {folder / 'final_checkpoint'}/agent<k>, plain PEFT",
        *([f"curves     {curves_command(folder)}"] if (folder / "tensorboard").is_dir() else []),
        *(
            [f"elsewhere  {shlex.join(export)}   makes one PEFT adapter of all"]
            if config.num_agents > 1 and not heads
            else []
        ),
        f"longer     the same command with {shlex.join(map('='.join, to_go_on.items()))}   continues from here",
        *([f"own data   {OWN_DATA}   with columns question, answer"] if is_example else []),
    ]
    for line in lines:
        logger.info(line)


def write_page(attempt: Attempt) -> None:
    """Write report.html, as the last act of an attempt. It never fails the run.

    A run that was told to end writes no page once a third of its grace is over: to end in time is more important, and
    `ci-llm report RUN` writes the page later. Between two elastic rounds it writes none either, because the others wait
    for this process. A segment of a sweep has none: the sweep writes its own.
    """
    config, told_at = attempt.config, attempt.interrupts.stop_requested_at
    grace_s = min(config.grace_s, attempt.launch.kill_delay_s)
    if told_at is not None and (has_rounds() or time.monotonic() - told_at > grace_s / 3):
        return
    if config.trial_steps is not None or not attempt.manager.store.holds_lease():
        return
    try:
        page = write_report(config.run_folder)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, the work of the run is done
        logger.warning(f"report.html was not written: {type(error).__name__}: {error}")
    else:
        logger.info(f"report     {page}")


def push_result(config: Config, processes: Processes) -> None:
    """Publish the final checkpoint with `push_to_hub`, unless it is published already.

    It never fails the run, whose work is done; the next call of a complete run tries again.
    """
    if not (config.push_to_hub and processes.is_main_process):
        return
    from ci_llm.crowd.publishing import is_published, publish

    try:
        if is_published(config.run_folder, config.hub_model_id):
            return
        done = publish(config.run_folder, config.hub_model_id)
    except Exception as error:  # noqa: BLE001 - as in `write_page`
        what = error.what if isinstance(error, CiLlmError) else described(error)
        to = config.hub_model_id or config.run_folder.resolve().name
        again = shlex.join(["ci-llm", "push", str(config.run_folder), "--to", f"hub:{to}"])
        logger.warning(f"hub       not published: {what}; the same call or {again} tries it again")
        keep_push(config.run_folder, PushRecord(to, error=what))
    else:
        logger.info(f"hub       {done.url}, {'private' if done.private else 'public'}")
