"""Ways to train a crowd that are published elsewhere, beside the crowd as it is. Of them, IVON is part of the package.

    OMP_NUM_THREADS=1 python -m benchmarks.objectives --rows 100 --seeds 7

The crowd of configs.yaml on so many rows of the embedded task, trained by the functions of the loop without
checkpoints, is evaluated by teacher forcing on the 320 rows of the validation split. All take 1,040 agent-steps.

crowd         cross-entropy of each agent, AdamW
specialists   a row counts for agent k in proportion to p_k(row)^alpha, its mean over the agents being 1: alpha 0 is the
              crowd as it is, a large one gives every row to the agent that knows it best (Guzman-Rivera et al.,
              "Multiple Choice Learning", 2012, softly)
population    every ten steps the agents are drawn towards their mean: weights alpha * own + (1 - alpha) * mean; each
              agent has an order of the rows of its own (Jolicoeur-Martineau et al., "PAPA", 2023); `own orders` is its
              control, alpha 1
snapshots     one agent, four cycles of the cosine; the four states at their ends answer together (Huang et al.,
              "Snapshot Ensembles", 2017)
average       the exponential moving average of the weights of one agent that takes all steps
ivon          the optimizer IVON in place of AdamW, and for one agent that takes all steps (`optimizer: ivon`)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.crowd import Results, over_seeds
from benchmarks.crowd_answers import Measured, scored
from ci_llm.cluster.launch import read_launch
from ci_llm.config import Config, load_config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.model import CrowdOutput
from ci_llm.crowd.objective import Objective, StepLoss
from ci_llm.crowd.preferences import TrainedObjective
from ci_llm.data.batches import Batch, MicroBatch, pack, stream
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.processes import Processes
from ci_llm.run.end.watchdog import Heartbeat
from ci_llm.run.loop import apply_gradients, compute_gradients
from ci_llm.run.setup import build_crowd
from ci_llm.run.start.agent_settings import objective_of, optimizer_of, schedules
from ci_llm.run.start.loading import Loaded, load, rows_and_plan, training_rows
from ci_llm.run.step.nonfinite_policy import AgentRecovery, RecoveryState
from ci_llm.run.step.state import TrainState

CONFIG = Path(__file__).parent.parent / "configs.yaml"
AGENTS, STEPS = 4, 260
PULL_EVERY = 10
EVALUATED_AT_A_TIME = 50


class Training:
    """A training without checkpoints; the attributes are what the functions of the loop read of a run."""

    def __init__(self, config: Config, loaded: Loaded, processes: Processes) -> None:
        loaded = loaded.for_agents(config.num_agents)
        self.config, self.processes = config, processes
        self.crowd = build_crowd(config, loaded.base, processes)
        self.crowd.choose_route()
        self.rows, self.plan = rows_and_plan(config, training_rows(config, loaded.rows), None, config.rows_per_step(1))
        recovery = RecoveryState(agents=(AgentRecovery(),) * config.num_agents)
        self.state = TrainState(skipped=(0,) * config.num_agents, recovery=recovery)
        self.heartbeat = Heartbeat()
        self.objective: TrainedObjective | Specialists = objective_of(config, self.crowd)
        self.total_steps = STEPS * AGENTS // config.num_agents
        self.learning_rates = schedules(config, None, self.total_steps)
        self.max_grad_norms = [config.max_grad_norm] * config.num_agents
        self.optimizer = optimizer_of(config, self.crowd, self.rows)

    def steps(self) -> Iterator[int]:
        """Train; yields the number of steps taken after each."""
        alone = {"process_index": 0, "num_processes": 1, "num_workers": 0, "pin_memory": False}
        size = self.config.rows_per_step(1)
        for step, batches in stream(self.rows, self.plan, 0, self.total_steps, micro_batch_size=size, **alone):
            self.step(step, batches)
            yield step + 1

    def step(self, step: int, batches: list[MicroBatch]) -> None:
        """One optimizer step, as in `ci_llm.run.loop`."""
        run: Any = self
        sums = compute_gradients(run, step, batches)
        verdict = self.processes.agree(Ballot(sums.num_targets, sums.nonfinite, sums.sums))
        apply_gradients(run, step, verdict, [k for k, nonfinite in enumerate(verdict.nonfinite) if nonfinite])

    def to_the_end(self) -> Crowd:
        """Train; returns the crowd."""
        for _ in self.steps():
            pass
        return self.crowd


@dataclass(frozen=True)
class Specialists:
    """Cross-entropy in which a row counts for agent k in proportion to p_k(row)^alpha."""

    alpha: float
    metric_names: ClassVar[tuple[str, ...]] = ()
    count = staticmethod(Objective.count)

    def __call__(self, output: CrowdOutput, batch: Batch, step: int, agent: int | None = None) -> StepLoss:
        agents, rows = output.log_probs.shape[0], batch.num_rows
        found = output.log_probs.new_zeros(agents, rows).index_add(1, batch.target_rows, output.log_probs.detach())
        weights = agents * (self.alpha * found).softmax(0)
        total = -(output.log_probs * weights[:, batch.target_rows]).sum()
        return StepLoss(total, -output.log_probs.detach().sum(1), total.new_zeros(()))

    def together(self, parts: Sequence[tuple[int | None, StepLoss]], batch: Batch, step: int) -> StepLoss:
        """One pass serves all agents."""
        [(_, loss)] = parts
        return loss


@dataclass(frozen=True)
class Bench:
    """One seed: base and rows in memory, on one process."""

    config: Config
    loaded: Loaded
    processes: Processes

    @classmethod
    def of(cls, rows: int, seed: int, split: str) -> Bench:
        """The operating point of configs.yaml; all rows of the split are evaluated on."""
        words = [f"seed={seed}", f"max_train_samples={rows}", f"eval_split={split}", "eval_samples=null"]
        config = load_config(CONFIG, [*words, f"num_agents={AGENTS}", f"max_train_steps={STEPS}"])
        processes = Processes(config, launch=read_launch())
        loaded = load(config, processes)
        return cls(config.model_copy(update=loaded.settled), loaded, processes)

    def training(self, **own: Any) -> Training:
        """The crowd as it is, with these keys."""
        return Training(self.config.model_copy(update=own), self.loaded, self.processes)

    def alone(self, rate: float) -> Crowd:
        return self.training(num_agents=1, learning_rate=rate).to_the_end()

    def average(self, rate: float, decay: float) -> Crowd:
        training = self.training(num_agents=1, learning_rate=rate)
        [row] = training.crowd.agents.rows
        mean = row.detach().clone()
        for _ in training.steps():
            mean.lerp_(row.detach(), 1 - decay)
        row.data.copy_(mean)
        return training.crowd

    def specialists(self, alpha: float) -> Crowd:
        training = self.training()
        training.objective = Specialists(alpha)
        return training.to_the_end()

    def population(self, alpha: float) -> Crowd:
        words = [f"seed={self.config.seed}", f"num_agents={AGENTS}", f"data_seed={[*range(AGENTS)]}"]
        agents = load_config(CONFIG, words).agents
        training = self.training(agents=agents)
        rows = training.crowd.agents.rows
        for step in training.steps():
            if step % PULL_EVERY == 0:
                with torch.no_grad():
                    mean = torch.stack([*rows]).mean(0)
                    for row in rows:
                        row.lerp_(mean, 1 - alpha)
        return training.crowd

    def snapshots(self, rate: float) -> Crowd:
        training = self.training(num_agents=1, learning_rate=rate)
        cycle = schedules(training.config, None, STEPS)[0]
        training.learning_rates = [lambda step: cycle(step % STEPS)]
        [row] = training.crowd.agents.rows
        found = [row.detach().clone() for step in training.steps() if step % STEPS == 0]
        training.crowd.detach()
        crowd = build_crowd(self.config, self.loaded.base, self.processes)
        crowd.choose_route()
        for target, state in zip(crowd.agents.rows, found, strict=True):
            target.data.copy_(state)
        return crowd

    def ivon(self, rate: float, agents: int = AGENTS) -> Crowd:
        return self.training(optimizer="ivon", learning_rate=rate, weight_decay=1e-4, num_agents=agents).to_the_end()

    def ways(self) -> Mapping[str, Callable[[], Crowd]]:
        """Each way to train, with its settings in its name."""
        return {
            "crowd": lambda: self.training().to_the_end(),
            **{f"specialists, alpha {a}": (lambda a=a: self.specialists(a)) for a in (0.03, 0.1, 0.3, 1.0)},
            "own orders": lambda: self.population(1.0),
            **{f"population, alpha {a}": (lambda a=a: self.population(a)) for a in (0.99, 0.9)},
            **{f"snapshots at {rate}": (lambda rate=rate: self.snapshots(rate)) for rate in (4e-3, 8e-3)},
            **{f"ivon at {rate}": (lambda rate=rate: self.ivon(rate)) for rate in (0.5, 1.0, 2.0, 3.0)},
            **{f"one agent, ivon at {rate}": (lambda rate=rate: self.ivon(rate, 1)) for rate in (0.5, 1.0, 2.0)},
            **{f"one agent at {rate}": (lambda rate=rate: self.alone(rate)) for rate in (2e-3, 4e-3)},
            **{
                f"average at {rate}, decay {decay}": (lambda r=rate, d=decay: self.average(r, d))
                for rate in (2e-3, 4e-3)
                for decay in (0.98, 0.99, 0.995)
            },
        }

    def measured(self, name: str) -> Measured:
        """Train in this way, and evaluate the crowd; the base is without agents before and after."""
        crowd = self.ways()[name]()
        try:
            *_, together = scored(crowd.eval(), evaluated(self.loaded.eval_rows[0]))
            return {**together, "agents": float(crowd.num_agents)}
        finally:
            crowd.detach()


def evaluated(rows: TokenizedRows) -> Iterator[Batch]:
    """All rows, in order."""
    for at in range(0, len(rows), EVALUATED_AT_A_TIME):
        part = range(at, min(at + EVALUATED_AT_A_TIME, len(rows)))
        yield pack([rows[number] for number in part], part)


def main() -> None:
    """Prints a markdown table; what is measured is shown at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100, help="training rows (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7], help="default: 7, with which no test is made")
    parser.add_argument("--split", default="validation", help="the rows to evaluate on (default: validation)")
    parser.add_argument("--ways", nargs="+", help="begin with one of these words (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Measured]] = {}
    for seed in options.seeds:
        bench = Bench.of(options.rows, seed, options.split)
        for name in bench.ways():
            if name.startswith(tuple(options.ways or ("",))):
                found.setdefault(name, []).append(bench.measured(name))
                print(f"seed {seed}: {line(name, found[name][-1:])}", flush=True)
        bench.processes.shutdown()
    print("\n| | exact match | NLL | ECE |\n|---|---|---|---|")
    for name, measured in found.items():
        print(line(name, measured))


def line(name: str, measured: list[Measured]) -> str:
    """A row of the table."""
    results = Results.of(name, measured)
    cells = over_seeds(results.exact_match, ".3f"), over_seeds(results.mean_nll, ".4f"), over_seeds(results.ece, ".3f")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
