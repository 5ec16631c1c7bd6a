"""`ci-llm agents stop`: stop an agent of a run while it trains."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.cli.command import Parser, add_verb, agent_number, print_result, run_verb
from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from ci_llm.run.step.members import CrowdRequest

_DESCRIPTION: Final = """Stop an agent of a run. A running job does so after the step under way, on all its
processes; a run that was interrupted does so after its first step. K is the number of the agent, as in agent2."""
_EXAMPLES: Final = """examples:
  ci-llm agents stop ci_llm_output 1     agent1 leaves; the steps get cheaper

exit codes: 0 done, or left for the run; 1 the run refuses it; 2 bad call"""
_POLL_S: Final = 0.1


def agents(words: Sequence[str]) -> int:
    """Run `ci-llm agents ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, or there is no run that could do it.
        CheckpointError: the request cannot be written.
        SystemExit: with 0, after `--help`.
    """
    parser = Parser("ci-llm agents", description=_DESCRIPTION, epilog=_EXAMPLES)
    verbs = parser.add_subparsers(metavar="VERB", required=True, dest="verb")
    does = "an agent leaves the crowd, and the steps get cheaper"
    more = " Its adapter stays in stopped/ of the checkpoints."
    stopping = add_verb(verbs, "stop", _stop, does, "ci-llm agents stop ci_llm_output 1", more)
    stopping.add_argument("run", type=Path, metavar="RUN", help="the output_dir of the run")
    stopping.add_argument("agent", type=agent_number, metavar="K", help="the number of the agent, or agentK")
    stopping.add_argument(
        "--wait", type=float, default=30.0, metavar="S", help="seconds to wait for the answer of a running job (30)"
    )
    return run_verb(parser, words)


def _stop(call: argparse.Namespace) -> int:
    from ci_llm.core.run_status import read_status
    from ci_llm.run.step.members import ask

    status = read_status(call.run)
    if status.status == "completed":
        raise BadInput(
            f"this run is completed at step {status.step}: no agent takes another step",
            where=str(call.run),
            hint="a larger max_train_steps trains on; ci-llm export writes single agents",
        )
    request = ask(call.run, call.agent)
    is_running = status.status == "running"
    decided = _decided(call.run, request, call.wait if is_running else 0.0)
    told = None if decided is None else {"step": decided.step, "refused": decided.refused}
    if decided is None:
        when = "after the step under way" if is_running else "after its first step, once it resumes"
        line = f"asked to stop agent{call.agent}: the run does so {when}; its log tells"
    elif decided.refused is not None:
        line = f"refused: {decided.refused}"
    else:
        line = f"stop agent{call.agent}: done after step {decided.step}"
    print_result(call.json, {"verb": "stop", "agent": call.agent, "decision": told}, line)
    return 1 if decided is not None and decided.refused else 0


def _decided(run: Path, request: CrowdRequest, patience_s: float) -> CrowdRequest | None:
    """The request as the run has decided it; None if it has not within this time."""
    from ci_llm.run.step.members import read_record

    until = time.monotonic() + patience_s
    while True:
        found = next((each for each in read_record(run) if each.id == request.id), None)
        if found is not None or time.monotonic() >= until:
            return found
        time.sleep(_POLL_S)
