"""The exit codes that a process gives its elastic agent, and the name of its round."""

from __future__ import annotations

import shlex

import pytest

from ci_llm.cluster.launch import exit_code_after_stop, job_and_round, launch_notes, names_of_round, read_launch
from tests.cluster.test_launch import TORCHRUN

ROUNDS = {"TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.parametrize(
    ("reason", "configured", "environ", "code"),
    [
        ("signal:SIGTERM", 0, ROUNDS, 75),
        ("signal:SIGTERM", 9, ROUNDS, 9),
        ("walltime", 0, ROUNDS, 0),  # of the whole job: another round would have no time either
        ("callback", 0, ROUNDS, 0),
        ("signal:SIGTERM", 0, {"TORCHELASTIC_MAX_RESTARTS": "0"}, 0),
        ("signal:SIGTERM", 0, {}, 0),
    ],
)
def test_an_agent_with_rounds_left_does_not_take_a_stop_for_the_end(
    reason: str, configured: int, environ: dict[str, str], code: int
) -> None:
    assert exit_code_after_stop(reason, configured, environ) == code


def test_a_round_has_a_name_only_within_a_job_that_has_one() -> None:
    assert job_and_round({**TORCHRUN, "TORCHELASTIC_RUN_ID": "crowd"}) == ("crowd", "node1:1234")
    assert job_and_round({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}) == (None, None)
    assert job_and_round({}) == (None, None)


def test_an_agent_alone_tells_its_rounds_apart_in_the_store_that_it_keeps() -> None:
    alone = {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert names_of_round(alone) == "round 2 "
    assert names_of_round({**alone, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == ""
    assert names_of_round({**alone, "GROUP_WORLD_SIZE": "2"}) == ""  # each of them counts by itself
    assert names_of_round({}) == ""


@pytest.mark.parametrize(
    ("command", "shares", "lines"),
    [
        ("torchrun --nnodes 1:4 train.py", "True", 1),
        ("torchrun --nnodes=1:4 train.py", "True", 1),
        ("torchrun --nnodes 1:4 train.py", "False", 0),
        ("torchrun --nnodes 2 --rdzv-endpoint node1:29400 train.py max_runtime=1:30", "True", 0),
    ],
)
def test_agents_that_let_no_machine_join_are_named(command: str, shares: str, lines: int) -> None:
    environ = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": shares}
    launch = read_launch(environ, shlex.split(command), [])
    found = [
        line for line in launch_notes(launch, environ, num_gpus=4) if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    ]
    assert len(found) == lines
