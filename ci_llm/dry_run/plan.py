"""The dry run: its checks, their order, and which of them each one needs."""

from __future__ import annotations

import logging
import sys
import time

from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.core.quantities import duration
from ci_llm.dry_run import environment, gpu, inputs, toy_run
from ci_llm.dry_run.checks import Check, CheckResult, Report, run_checks
from ci_llm.dry_run.context import CheckContext
from ci_llm.interrupts import Interrupts

CHECKS: tuple[Check[CheckContext], ...] = (
    Check("environment", (), environment.environment),
    Check("precision", (), environment.precision),
    Check("port", ("precision",), environment.port),  # first, as later checks may fail on one process alone
    Check("disk", (), environment.disk),
    Check("mirror", (), environment.mirror),
    Check("accelerate", ("disk", "port"), environment.accelerate),
    Check("gpu autocast", ("accelerate",), gpu.on_gpu(gpu.autocast)),
    Check("gpu attention", ("accelerate",), gpu.on_gpu(gpu.attention)),
    Check("gpu determinism", ("accelerate",), gpu.determinism_of),
    Check("gpu copies", ("accelerate",), gpu.on_gpu(gpu.copies)),
    Check("gpu checkpoint", ("accelerate",), gpu.checkpoint_of),
    Check("gpu memory", ("accelerate",), gpu.on_gpu(gpu.memory)),
    Check("architecture", (), inputs.architecture),
    Check("data", (), inputs.data),
    Check("template", ("accelerate", "architecture", "data"), inputs.template),
    Check("estimate", ("port", "architecture"), inputs.estimate),
    Check("batch", ("estimate",), inputs.batch),
    Check("model", ("template", "batch"), toy_run.model),
    Check("two steps", ("model",), toy_run.two_steps),
    Check("checkpoint", ("two steps",), toy_run.checkpoint),
    Check("interruption", ("checkpoint",), toy_run.interruption),
    Check("diversity", ("model",), toy_run.diversity),
    Check("generation", ("model",), toy_run.generation),
    Check("conclusion", ("checkpoint", "generation"), toy_run.conclusion),
    Check("storage", ("estimate",), inputs.space),
    Check("time", ("estimate",), inputs.time_needed),
)


def dry_run(config: Config, interrupts: Interrupts, launch: Launch, *, debug: bool = False) -> int:
    """Run all checks and show their results; returns the exit code: 0 only if all have passed."""
    start = time.monotonic()
    # Their retries and tracebacks would appear between the results.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    outcomes: list[CheckResult] = []

    def stopped() -> str | None:
        if interrupts.stop_reason is not None:
            return f"stopped: {interrupts.stop_reason}"
        broken = launch.num_processes > 1 and any(outcome.verdict == "failed" for outcome in outcomes)
        return "this process leaves the others after a failure" if broken else None

    with CheckContext(config, launch, interrupts) as context:
        report = Report(max(len(check.name) for check in CHECKS))
        for outcome in run_checks(CHECKS, context, stopped=stopped, debug=debug):
            outcomes.append(outcome)
            _show(report, outcome, launch)
        passed = all(outcome.verdict in ("passed", "inapplicable") for outcome in outcomes)
        if launch.is_main_process:
            for note in [*_notes(context), *config.notices()]:
                report.say(note)
            report.say(_summary(outcomes, time.monotonic() - start))
    return 0 if passed else 1


def _notes(context: CheckContext) -> list[str]:
    """Notes for the reader beside the checks."""
    notes = list(context.processes.notes) if hasattr(context, "processes") else []
    if context.uses_stand_in:
        notes.append(f"not proven: the weights of {context.config.model_name}, which train.py will have to download")
    return notes


def _show(report: Report, outcome: CheckResult, launch: Launch) -> None:
    """The main process shows every result, the others only their own failures."""
    if launch.is_main_process:
        report.show(outcome)
    elif outcome.verdict == "failed":
        story = "\n".join(outcome.lines)
        print(f"process {launch.process_index}: {outcome.name} failed: {story}", file=sys.stderr, flush=True)


def _summary(outcomes: list[CheckResult], seconds: float) -> str:
    failed = [outcome.name for outcome in outcomes if outcome.verdict == "failed"]
    skipped = sum(outcome.verdict == "skipped" for outcome in outcomes)
    absent = sum(outcome.verdict == "inapplicable" for outcome in outcomes)
    if not failed and not skipped:
        beside = f", {absent} had nothing to check here" if absent else ""
        passed = len(outcomes) - absent
        left = "they leave nothing on the disk but the cache of the data set"
        return f"all {passed} checks passed in {duration(seconds)}{beside}; {left}"
    return f"failed: {', '.join(failed) or 'none'}; {skipped} of {len(outcomes)} checks skipped"
