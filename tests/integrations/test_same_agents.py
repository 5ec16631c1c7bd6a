"""Accelerate's shape: `train.py` and the plain Accelerate loop of the example end with the same agents.

In double precision, where another order of summation is seen in the last digits only. The agents begin with B not 0, so
that every gradient counts from the first step on. The last micro-step is short. Both loops are also killed and called
again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ci_llm import Config
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.cli.main import main
from ci_llm.crowd.crowd import Crowd
from examples import accelerate_loop
from tools.testbed.events import wait_until
from tools.testbed.forkserver import ForkServer
from tools.testbed.worlds import difference, toy_base

pytestmark = pytest.mark.slow

STEPS, ROWS_OF_A_STEP, WINDOW, SAVED = 6, 8, 2, 3
KEYS: dict[str, Any] = {
    "model_dtype": "fp64",
    "max_train_samples": STEPS * ROWS_OF_A_STEP - 1,
    "gradient_accumulation_steps": WINDOW,
    "num_agents": 3,
    "lora_rank": 2,
    "lora_alpha": 4,
    "learning_rate": 4e-3,
    "weight_decay": 0.1,
    "seed": 5,
}
#: What train.py does and a plain loop leaves out, unless somebody asks for it.
PLAIN = (
    "kernels=plain max_grad_norm=null lr_scheduler_type=constant diversity=none dropconnect_p=0 lora_dropout=0"
    " num_warmup_steps=0"
)
QUIET = "epochs=1 eval_steps=null eval_samples=1 save_interval_seconds=null report_to=none num_workers=0"


def trial(folder: str, loop: str, keys: dict[str, Any], dies: bool) -> int:
    """In a process of its own: one of both loops, killed before its fifth step if that is wanted."""
    torch.set_num_threads(1)
    place, steps, begin = Path(folder), [0], Crowd.__init__

    def begin_elsewhere(crowd: Crowd, *of: Any, **named: Any) -> None:
        begin(crowd, *of, **named)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in crowd.parameters():
                if tensor.requires_grad:
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))

    def count(*_: Any) -> None:
        steps[0] += 1
        if dies and steps[0] == 5:
            wait_until("step 3 is saved", lambda: any(place.glob(f"*/*step_{SAVED}")))
            os.kill(os.getpid(), signal.SIGKILL)

    Crowd.__init__ = begin_elsewhere  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(count)
    if loop == "plain":
        losses = accelerate_loop.train(Config(**keys), place / "plain", save_steps=SAVED)
        assert len(losses) == steps[0]
        return 0
    words = [*(f"{key}={value}" for key, value in keys.items()), *PLAIN.split(), *QUIET.split(), f"save_steps={SAVED}"]
    return main(["train", "--config", os.devnull, *words, "max_seq_length=256", f"output_dir={place / 'run'}"])


def agents(state: dict[str, Any]) -> Tensor:
    """All numbers of all agents, end to end."""
    found = [state[f"agent{k}/adapter_model"] for k in range(KEYS["num_agents"])]
    return torch.cat([tensor.flatten() for agent in found for _, tensor in sorted(agent.items())])


@pytest.mark.parametrize("dies", [False, True], ids=["from the start", "over a resume"])
@pytest.mark.parametrize("processes", [1, 2])
def test_train_py_and_a_plain_loop_end_with_the_same_agents(
    processes: int, dies: bool, server: ForkServer, tmp_path: Path
) -> None:
    keys = KEYS | {"model_name": str(toy_base(tmp_path / "base"))}
    keys["batch_size"] = ROWS_OF_A_STEP // WINDOW // processes
    for loop in ("plain", "ours"):
        for killed in [True, False] if dies else [False]:
            how = {"folder": str(tmp_path), "loop": loop, "keys": keys, "dies": killed}
            codes = server.run(trial, tmp_path / "log", ranks=processes, **how)
            assert codes == [-signal.SIGKILL if killed else 0] * processes, (tmp_path / "log").read_text()
    plain = [load_checkpoint(tmp_path / f"plain/step_{step}/ci_llm").state for step in (SAVED, STEPS)]
    ours = [load_checkpoint(tmp_path / "run" / f"checkpoint_step_{step}").state for step in (SAVED, STEPS)]
    for one, other in zip(plain, ours, strict=True):
        assert agents(one).dtype == torch.float64
        assert difference(agents(one), agents(other)) < 1e-10
    assert difference(agents(ours[0]), agents(ours[1])) > 1e-3, "they move"
