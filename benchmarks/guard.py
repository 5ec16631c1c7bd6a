"""What the guard costs a healthy step: the look at the gradients, the recovery state, snapshots every few steps.

    python -m benchmarks.guard [--agents 4] [--parameters 1000000] [--rounds 50]

Beside each other and on the same numbers: the optimizer's own step, and each part of the guard. CPU time, medians.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.timing import median_cost, take_turns
from ci_llm.run.step.nonfinite import nonfinite_here
from ci_llm.run.step.nonfinite_policy import AgentRecovery, Bounds, RecoveryState
from ci_llm.run.step.state import EVERY_STEPS, LastGood


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=1_000_000, help="of one agent")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = torch.randn(options.agents, options.parameters)
    gradients, losses = torch.randn_like(weights), torch.ones(options.agents, dtype=torch.float64)
    rows = [torch.nn.Parameter(row) for row in weights]
    for row, gradient in zip(rows, gradients, strict=True):
        row.grad = gradient
    optimizer = torch.optim.AdamW([{"params": [row]} for row in rows], fused=True)
    optimizer.step()
    last_good, recovery = LastGood(rows, optimizer), RecoveryState(agents=(AgentRecovery(),) * options.agents)
    last_good.begin(0)
    costs = take_turns(
        {
            "the optimizer's step": lambda _: optimizer.step(),
            "the look at gradients and losses": lambda _: nonfinite_here(gradients, losses),
            "the recovery state": lambda step: recovery.after(step, (), Bounds()),
            "the snapshots": lambda _: last_good.keep_if_due(0, range(options.agents)),
        },
        range(options.rounds),
    )
    print(f"{options.agents} agents of {options.parameters:,} parameters, one thread, ms of CPU time")
    for name, each in costs.items():
        share = f", every {EVERY_STEPS} steps" if name == "the snapshots" else ""
        print(f"{name:<34}{1000 * median_cost(each).cpu_s:>9.3f}{share}")


if __name__ == "__main__":
    main()
