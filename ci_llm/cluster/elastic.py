"""Elastic rounds of torchrun: a process that dies or a machine that joins ends a round, and the next one goes on.

A round has one world of processes. When a process dies or a machine joins, the agents of torchrun send SIGTERM to the
processes that are left, and start all of them anew as another world. A process of this package saves, ends, and goes on
in the next round. This file says what such a process must know about its agent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

#: The agent waits so long before it kills, between two rounds, whatever TORCH_ELASTIC_SHUTDOWN_TIMEOUT says.
KILL_DELAY_S: Final = 30.0
#: Of a process that was asked to stop and whose agent must not take this for the end of the job.
AGAIN_EXIT_CODE: Final = 75
_NO_NAME: Final = ("", "none")  # the run id of torchrun without --rdzv-id


def has_rounds(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the agent of this process begins another round after a failure (`--max-restarts`)."""
    text = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return text.isdecimal() and int(text) > 0


def exit_code_after_stop(reason: str, configured: int, environ: Mapping[str, str] = os.environ) -> int:
    """The exit code of a run that was asked to stop and is saved.

    An agent whose processes all end with 0 takes the job for done and closes the rendezvous: no round follows. The
    signal may have reached the processes of another agent only, so the end of these must not look like that. An agent
    that has sent the signal itself does not look at the code.

    Args:
        reason: why the run stopped: "signal:SIGTERM", "walltime", ...
        configured: `interrupted_exit_code`.
    """
    goes_on = reason.startswith("signal:") and has_rounds(environ)
    return configured or (AGAIN_EXIT_CODE if goes_on else 0)


def job_and_round(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """A name of the elastic job, and one of the round within it; None where it has none.

    In a new round process 0 meets the others at a new port, unless the agents share their store.
    """
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    if job in _NO_NAME:
        return None, None
    return job, f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def names_of_round(environ: Mapping[str, str] = os.environ) -> str:
    """What to put before the names in the store at which processes meet; empty where each round has a store of its own.

    An agent that is alone keeps one store for all its rounds, and in it the addresses of those that have died. It
    counts the rounds. The counts of several agents differ, so those must not share a store: see `elastic_notes`.
    """
    alone = environ.get("GROUP_WORLD_SIZE") == "1" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"round {environ.get('TORCHELASTIC_RESTART_COUNT', '0')} " if alone else ""


def elastic_notes(environ: Mapping[str, str], machines: str) -> list[str]:
    """Lines for people about agents that do not let a machine join.

    Args:
        machines: the number of them, as torchrun was told: "4", "1:4".
    """
    if ":" not in machines or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return [
        "a machine that joins later would not be let in, because the agents of torchrun share their store:"
        " export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before each torchrun"
    ]
