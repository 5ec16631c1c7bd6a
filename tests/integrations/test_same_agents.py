"""Accelerate's shape: `train.py` and the plain Accelerate loop of the example end with the same agents.

With the defaults of configs.yaml for schedule, warm-up, clipping and decay, and with dropout. The agents begin with B
not 0, so that every gradient counts from the first step on. The last micro-step is short. Both loops are also killed
and called again.

In double precision another order of summation is seen in the last digits only. The fast kernels round norms to fp32 in
another place than the family does, so they are compared in fp32. On two processes Accelerate deals batches where
train.py deals rows. A micro-batch, whose dropout is drawn as one, then holds other rows: dropout is compared on one.
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

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.cli.main import main
from ci_llm.config.load import load_config
from ci_llm.core.determinism import seed_everything
from ci_llm.crowd.crowd import Crowd
from examples import accelerate_loop
from tests.support.campaign import sampled_cases
from tools.testbed.events import wait_until
from tools.testbed.forkserver import ForkServer
from tools.testbed.worlds import difference, toy_base

pytestmark = pytest.mark.slow

DEFAULTS = Path(__file__).parents[2] / "configs.yaml"
STEPS, ROWS_OF_A_STEP, WINDOW, SAVED = 6, 8, 2, 3
KEYS: dict[str, Any] = {
    "max_train_samples": STEPS * ROWS_OF_A_STEP - 1,
    "gradient_accumulation_steps": WINDOW,
    "num_agents": 3,
    "lora_rank": 2,
    "lora_alpha": 4,
    "learning_rate": 4e-3,
    "seed": 5,
}
#: A plain loop takes one pass for all agents.
PLAIN = "pass_per_agent=false"
KERNELS = {"fp64": "plain", "fp32": "fast"}
QUIET = "max_train_steps=null epochs=1 eval_steps=null eval_samples=1 save_interval_seconds=null report_to=none"


def trial(folder: str, loop: str, keys: dict[str, Any], dies: bool) -> int:
    """In a process of its own: one of both loops, killed before its fifth step if that is wanted."""
    torch.set_num_threads(1)
    place, steps, begin, forward = Path(folder), [0], Crowd.__init__, Crowd.forward

    def begin_elsewhere(crowd: Crowd, *of: Any, **named: Any) -> None:
        begin(crowd, *of, **named)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in crowd.parameters():
                if tensor.requires_grad:
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))

    resumed = SAVED if (place / f"plain/step_{SAVED}").is_dir() else 0
    passes = 0

    def keyed(crowd: Crowd, *given: Any) -> Any:
        """The forward pass behind the key that train.py sets: so the draws of dropout are the same."""
        nonlocal passes
        process = int(os.environ.get("RANK", "0"))
        seed_everything(KEYS["seed"], "micro-step", resumed + passes // WINDOW, process, passes % WINDOW)
        passes += 1
        return forward(crowd, *given)

    def count(*_: Any) -> None:
        steps[0] += 1
        if dies and steps[0] == 5:
            wait_until("step 3 is saved", lambda: any(place.glob(f"*/*step_{SAVED}")))
            os.kill(os.getpid(), signal.SIGKILL)

    Crowd.__init__ = begin_elsewhere  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(count)
    words = [*(f"{key}={value}" for key, value in keys.items()), *PLAIN.split(), *QUIET.split(), f"save_steps={SAVED}"]
    if loop == "plain":
        Crowd.forward = keyed  # type: ignore[method-assign]
        losses = accelerate_loop.train(load_config(DEFAULTS, words), place / "plain", save_steps=SAVED)
        assert len(losses) == steps[0]
        return 0
    return main(["train", "--config", str(DEFAULTS), *words, "max_seq_length=256", f"output_dir={place / 'run'}"])


def agents(state: dict[str, Any]) -> Tensor:
    """All numbers of all agents, end to end."""
    found = [state[f"agent{k}/adapter_model"] for k in range(KEYS["num_agents"])]
    return torch.cat([tensor.flatten() for agent in found for _, tensor in sorted(agent.items())])


#: Processes, whether both loops die once, and how exactly they agree.
CASES = [
    (processes, dies, dtype, dropout)
    for dtype in ("fp64", "fp32")
    for dropout in (0.0, 0.05)
    for processes, dies in ((1, False), (2, True), (1, True), (2, False))
    if processes == 1 or not dropout
]
SAMPLE = [(1, False, "fp64", 0.05), (2, True, "fp64", 0.0), (1, False, "fp32", 0.05)]
AGREE_TO = {"fp64": 1e-10, "fp32": 1e-5}


@pytest.mark.parametrize(("processes", "dies", "dtype", "dropout"), sampled_cases(CASES, SAMPLE))
def test_train_py_and_a_plain_loop_end_with_the_same_agents(
    processes: int, dies: bool, dtype: str, dropout: float, server: ForkServer, tmp_path: Path
) -> None:
    keys = KEYS | {"model_name": str(toy_base(tmp_path / "base")), "model_dtype": dtype, "lora_dropout": dropout}
    keys["kernels"] = KERNELS[dtype]
    keys["batch_size"] = ROWS_OF_A_STEP // WINDOW // processes
    for loop in ("plain", "ours"):
        for killed in [True, False] if dies else [False]:
            how = {"folder": str(tmp_path), "loop": loop, "keys": keys, "dies": killed}
            codes = server.run(trial, tmp_path / "log", ranks=processes, **how)
            assert codes == [-signal.SIGKILL if killed else 0] * processes, (tmp_path / "log").read_text()
    plain = [load_checkpoint(tmp_path / f"plain/step_{step}/ci_llm").state for step in (SAVED, STEPS)]
    ours = [load_checkpoint(tmp_path / "run" / f"checkpoint_step_{step}").state for step in (SAVED, STEPS)]
    for one, other in zip(plain, ours, strict=True):
        assert agents(one).dtype == (torch.float64 if dtype == "fp64" else torch.float32)
        assert difference(agents(one), agents(other)) < AGREE_TO[dtype]
    assert difference(agents(ours[0]), agents(ours[1])) > 1e-3, "they move"
