"""How a run ended, for the script or the notebook that called it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ci_llm.cluster.launch import exit_code_after_stop
from ci_llm.config import Config
from ci_llm.errors import BadInput
from ci_llm.report.facts import read_metrics
from ci_llm.report.scores import scores

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

    from ci_llm.crowd.crowd import Crowd


@dataclass(frozen=True)
class Result:
    """How a run ended; the same on every process. A run that fails is an exception and has none.

    A notebook shows it as the report of the run.

    Attributes:
        status: "completed", or "interrupted": the same call resumes from what is saved.
        step: optimizer steps taken.
        folder: of the run.
        metrics: `evaluation.json`, the final evaluation; empty if the run was interrupted.
        reason: why it was interrupted: "signal:SIGINT", "walltime", "callback", ...; None if it is completed.
    """

    status: Literal["completed", "interrupted"]
    step: int
    folder: Path
    metrics: Mapping[str, Any] = field(default_factory=dict, repr=False)
    reason: str | None = None

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
        """The final evaluation, a line for the untrained base, each agent, their mean, their vote and the crowd.

        Columns: `exact_match`, the share of right answers, with the ends `low` and `high` of its 95 % interval; `nll`,
        nats per token of the reference; `learning_rate`. What was not measured is NaN; no line if it was interrupted.
        """
        import pandas as pd

        lines = [asdict(score) for score in scores(self.metrics)] if self.metrics else []
        columns = ["who", "exact_match", "low", "high", "nll", "learning_rate"]
        return pd.DataFrame(lines, columns=columns).set_index("who").astype(float)

    @property
    def history(self) -> pd.DataFrame:
        """`metrics.jsonl` of all attempts of the run, and the final evaluation: a line per step, a column per number.

        Losses and NLL are in nats per token, `step_time_s` is in seconds. NaN where a step has no such number.
        """
        import pandas as pd

        found = read_metrics(self.folder)
        lines = (found.with_last(self.metrics) if self.metrics else found).lines
        table = pd.DataFrame(lines, columns=[*dict.fromkeys(key for line in lines for key in line)] or ["step"])
        return table.groupby("step").last().apply(pd.to_numeric, errors="coerce")

    @property
    def best(self) -> Mapping[str, Any]:
        """The best evaluation of the crowd: its `step`, the `value`, and the `metric` that it is of, nll in nats per
        token or exact_match; empty if the run was interrupted, or never evaluated the crowd."""
        found = self.metrics.get("best") or {}
        return {**found["crowd"], "metric": found["metric"]} if found.get("crowd") else {}

    def plot(self) -> Any:
        """Draw the training loss and the loss of the crowd on rows that are held out, over the steps.

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
        return curves.plot(xlabel="step", ylabel="nats per token")

    def _repr_html_(self) -> str:
        """The report of the run, for a notebook; its scores where `write_report` is off."""
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
