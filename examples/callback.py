"""A callback of `ci_llm.train`: it keeps what the evaluations found, and ends a run that is good enough.

    python examples/callback.py

A run that it has ended is saved; the same call without the callback trains the rest.
"""

from pathlib import Path
from typing import Any

import ci_llm


class EnoughForMe:
    """Stops a run when the crowd's loss on the evaluation rows is at most `nll`, in nats per token.

    Attributes:
        history: (optimizer step, loss of the crowd) of every evaluation.
    """

    def __init__(self, nll: float) -> None:
        self.nll = nll
        self.history: list[tuple[int, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        """`args` is the configuration, `state` where the run stands, `control` what can be asked of it."""
        self.history.append((state.global_step, metrics["eval/crowd/nll"]))
        control.should_training_stop = metrics["eval/crowd/nll"] <= self.nll

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            steps = ", ".join(f"{nll:.2f} at step {step}" for step, nll in self.history)
            print(f"{args.num_agents} agents, {state.global_step} of {state.max_steps} steps: {steps}", flush=True)


def train(folder: Path, callback: EnoughForMe, **keys: object) -> str:
    """`completed`, or `interrupted` if the callback has ended the run."""
    keys = {"num_agents": 2, "max_train_steps": 60, "eval_steps": 10, "report_to": "none", **keys}
    return ci_llm.train(output_dir=folder, callbacks=[callback], **keys).status


if __name__ == "__main__":
    train(Path("build/callback"), EnoughForMe(nll=0.6))
