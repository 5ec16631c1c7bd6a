"""The objectives of a run in the form that the loop uses: the loss of agents on a micro-batch, and its metrics.

`NextToken` is summed cross-entropy, minus a weighted diversity term; `Preferences` learns from pairs, rated and
labelled rows, and `GrpoObjective` from completions that agents have drawn.

They have no state and do not communicate. Losses are SUMS, over targets, units or weighted tokens: only the ballot
knows the count of the whole optimizer step, and the loop divides by it. So neither accumulation nor uneven rows nor
the number of processes can bias a mean. Facts about the whole step are given.

Legend: K agents, U units (pairs, rows or prompts), R rows (of a pair two), B rows, S targets, V vocabulary, M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ci_llm import objectives
from ci_llm.config import Config
from ci_llm.core.determinism import derive_seed
from ci_llm.crowd.diversity import TermInputs, find_form
from ci_llm.crowd.model import CrowdModel, CrowdOutput
from ci_llm.data.batches import Batch
from ci_llm.errors import BadInput
from ci_llm.lora.passes import Head, plain_chunk
from ci_llm.objectives import Evidence, Metrics, Objective, for_agents, pairs
from ci_llm.objectives.grpo import Grpo, divergence
from ci_llm.objectives.grpo.rewards import Reward, rewards_of


@dataclass(frozen=True)
class StepLoss:
    """The loss of agents on their rows of one micro-batch, in nats, summed over targets.

    Attributes:
        agents: the places of these n agents.
        batch: the rows.
        total: [] the loss for the backward pass.
        task: [n] the cross-entropy of each agent, for the log.
        diversity: [] the diversity term times S, for the log.
        targets: [n] how many targets each agent has.
        log_probs: [n, S] the log-probabilities, detached, from which agents with passes of their own are compared.
        metrics: [n, M, 2] sum and count of each of the objective's `metric_names`; None if it has none.
    """

    agents: tuple[int, ...]
    batch: Batch
    total: Tensor
    task: Tensor
    diversity: Tensor
    targets: tuple[int, ...]
    log_probs: Tensor | None = None
    metrics: Tensor | None = None


def of_all(losses: Sequence[StepLoss], num_agents: int) -> StepLoss:
    """The losses of a micro-batch as one, of all K agents; an agent without rows has none."""
    first = losses[0]
    if len(losses) == 1 and len(first.agents) == num_agents:
        return first
    tasks, targets = [first.task.new_zeros(1)] * num_agents, [0] * num_agents
    metrics = None if first.metrics is None else [torch.zeros_like(first.metrics[:1])] * num_agents
    for own in losses:
        for place, agent in enumerate(own.agents):
            tasks[agent], targets[agent] = own.task[place : place + 1], own.targets[place]
            if metrics is not None and own.metrics is not None:
                metrics[agent] = own.metrics[place : place + 1]
    return StepLoss(
        tuple(range(num_agents)),
        first.batch,
        torch.stack([own.total for own in losses]).sum(),
        torch.cat(tasks),
        first.diversity,
        tuple(targets),
        metrics=None if metrics is None else torch.cat(metrics),
    )


@dataclass(frozen=True)
class NextToken:
    """Next-token prediction: Σₖ Σₛ cross-entropy - weight·K·(diversity x S).

    Args:
        diversity: a form of `ci_llm.crowd.diversity`: none or swd.
        weight: the weight of the term; without effect for `none`.
        representation: the state that stands for a row in this distance: last_token, first_token or mean.
        seed: the seed of the directions.
        bootstrap: [K] the key of an agent's random row weights, None for an agent that weighs all rows the same; empty
            if all agents do. Weights change what is learned, and not the reported losses.
    """

    diversity: str = "none"
    weight: float = 0.0
    representation: str = "last_token"
    seed: int = 42
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    metric_names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def count(batch: Batch) -> int:
        """The number of targets, by which sums over a micro-batch become means."""
        return batch.num_targets

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output.

        Args:
            step: the optimizer step, which keys the random directions.

        Raises:
            BadInput: there is no such diversity form.
        """
        log_probs, batch, agents = output.log_probs, output.batch, output.agents
        task = -log_probs.sum(1)
        keys = [self.bootstrap[k] for k in agents] if self.bootstrap else []
        total = _weighted(log_probs, batch, keys) if any(keys) else task.sum()
        rewarded = find_form(self.diversity).rewarded
        term = total.new_zeros(())
        with torch.set_grad_enabled(rewarded and torch.is_grad_enabled()):
            if rewarded or len(agents) > 1:
                term = self._term(log_probs, output.states, batch, step)
        if rewarded:
            total = total - self.weight * len(agents) * term
        targets = (batch.num_targets,) * len(agents)
        return StepLoss(agents, batch, total, task.detach(), term.detach(), targets, log_probs.detach())

    def together(self, losses: Sequence[StepLoss], num_agents: int, step: int) -> StepLoss:
        """Join the losses of all passes of a micro-batch; the diversity is that of agents on the same rows.

        Raises:
            BadInput: the diversity is rewarded, and agents took passes or rows of their own.
        """
        found = of_all(losses, num_agents)
        first = losses[0]
        if len(losses) == 1:
            return found
        if find_form(self.diversity).rewarded:
            raise BadInput(
                f"diversity {self.diversity} has gradients through all agents, in one pass over the same rows",
                where="pass_per_agent: true, or agents with rows of their own",
                hint="take diversity none",
            )
        if any(own.batch is not first.batch for own in losses):
            return found
        log_probs = torch.cat([own.log_probs for own in losses if own.log_probs is not None])
        return replace(found, diversity=self._term(log_probs, log_probs[:, :0, None], first.batch, step))

    def _term(self, log_probs: Tensor, states: Tensor, batch: Batch, step: int) -> Tensor:
        inputs = TermInputs(
            log_probs,
            states,
            finite=log_probs.detach().isfinite().all(1),
            batch=batch,
            step=step,
            seed=self.seed,
            representation=self.representation,
        )
        return find_form(self.diversity).term(inputs)


def _weighted(log_probs: Tensor, batch: Batch, keys: Sequence[tuple[int, int] | None]) -> Tensor:
    """The summed cross-entropy [] of agents [K, S], with every row's weight for every agent.

    Args:
        keys: see `NextToken.bootstrap`.
    """
    weights = bootstrap_weights(keys, batch.sample_ids).to(log_probs, non_blocking=True)
    return -(log_probs * weights[:, batch.target_rows]).sum()


def bootstrap_weights(keys: Sequence[tuple[int, int] | None], rows: Sequence[int]) -> Tensor:
    """Row weights that each agent draws for itself, once for the whole run: exponential with mean 1.

    This is the Bayesian bootstrap: an agent trained with such weights is a sample from the posterior distribution of
    agents (Rubin, "The Bayesian Bootstrap", 1981; Newton and Raftery, 1994). A weight depends only on the agent's key
    and the number of the row: it is the same in every epoch, on any number of processes and after a resume.

    Args:
        keys: [K] seed and index of the agents that draw weights; None for the others, whose weights are 1.
        rows: [B] the numbers of the rows in the data set.

    Returns:
        [K, B] fp64.
    """
    weights = [[1.0 if key is None else _weight(*key, row) for row in rows] for key in keys]
    return torch.tensor(weights, dtype=torch.float64)


def _weight(seed: int, index: int, row: int) -> float:
    uniform = (derive_seed(seed, "row weight", index, row) + 0.5) / 2**63  # in (0, 1]
    return -math.log(uniform)


class _OfUnits:
    """The part that objectives of units have in common."""

    @staticmethod
    def count(batch: Batch) -> int:
        """The number of units, by which sums over a micro-batch become means."""
        return batch.num_units

    def together(self, losses: Sequence[StepLoss], num_agents: int, step: int) -> StepLoss:
        """Join the losses of all passes of a micro-batch; `step` is unused here."""
        return of_all(losses, num_agents)


@dataclass(frozen=True)
class Preferences(_OfUnits):
    """An objective of pairs, rated or labelled rows.

    Args:
        objective: the objective, with the settings of all agents.
        crowd: the crowd, whose base alone or start is the reference.
        bootstrap: see `NextToken`.
        nll_shares: [K] units of the whole step per token of its next-token loss; empty if that loss is not used.
        kl: [K, 1] that of the whole step, see `Evidence.kl`.
    """

    objective: Objective
    crowd: CrowdModel
    bootstrap: tuple[tuple[int, int] | None, ...] = ()
    nll_shares: tuple[float, ...] = ()
    kl: Tensor | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of TRL's metrics, and of those that the objective adds."""
        needs, kinds = self.objective.needs, ["rewards"] if self.objective.needs.head else ["rewards", "logps"]
        judged = [f"{kind}/{side}" for kind in kinds for side in ("chosen", "rejected")]
        names = {
            "rewards/accuracies": needs.rows == "pairs",
            **dict.fromkeys(judged, needs.rows != "labelled"),
            "nll_loss": needs.nll != "none",
            "kl": needs.mismatched,
        }
        return (*(name for name, holds in names.items() if holds), *self.objective.metric_names)

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output; `step` is unused here."""
        agents, batch = output.agents, output.batch
        objective = for_agents(self.objective, _index(agents))
        evidence = self.evidence(output)
        losses = objective.losses(evidence)
        keys = [self.bootstrap[k] for k in agents] if self.bootstrap else []
        weighted = losses * bootstrap_weights(keys, batch.sample_ids).to(losses) if any(keys) else losses
        with torch.no_grad():
            measured = _measured(objective, evidence)
            sums = (measured[name] for name in self.metric_names)
            found = [torch.stack([total, torch.zeros_like(total) + count], -1) for total, count in sums]
            metrics = torch.stack(found, 1) if found else losses.new_zeros(len(losses), 0, 2)
        return StepLoss(
            agents,
            batch,
            total=weighted.sum(),
            task=losses.detach().sum(1),
            diversity=losses.new_zeros(()),
            targets=(batch.num_units,) * len(losses),
            metrics=metrics,
        )

    def evidence(self, output: CrowdOutput) -> Evidence:
        """The evidence about the rows of one output."""
        needs, batch, places = self.objective.needs, output.batch, _index(output.agents)
        labels, answered = batch.labels, batch.answered
        assert labels is not None
        assert answered is not None
        judged = labels > 0 if needs.rows == "rated" else labels
        counts = torch.tensor(batch.target_counts, device=labels.device)
        if output.values is not None:
            nothing = output.log_probs.double()[:, :0]
            return Evidence(nothing, counts, labels=judged, values=output.values.double())

        def sums_of(log_probs: Tensor) -> Tensor:
            return row_sums(log_probs.where(answered, 0.0) if needs.nll == "rows" else log_probs, batch)

        found = Evidence(
            sums=sums_of(output.log_probs),
            lengths=row_sums(answered[None], batch)[0],
            reference=sums_of(self.crowd.reference(output.agents, batch)) if needs.reference else None,
            labels=judged,
            kl=None if self.kl is None else self.kl[places],
        )
        if needs.nll == "none":
            return found
        shares = found.sums.new_tensor(self.nll_shares or (1.0,) * self.crowd.num_agents)[places, None]
        nll = -(row_sums(output.log_probs, batch) if needs.nll == "rows" else found.sums)
        return replace(found, nll=pairs(nll)[0], nll_tokens=pairs(counts)[0], nll_share=shares)


def _index(agents: tuple[int, ...]) -> slice | list[int]:
    """The places of agents as an index; a slice where it can be one, because a GPU is waited for to take a list."""
    if not agents:
        return slice(None)  # the base alone
    first, end = agents[0], agents[-1] + 1
    return slice(first, end) if agents == tuple(range(first, end)) else [*agents]


def row_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum values [K, S] of targets to [K, R] fp64 of rows, row by row, as `index_add` has no fixed order on a GPU."""
    return torch.stack([part.double().sum(-1) for part in values.split(list(batch.target_counts), dim=-1)], dim=-1)


def _measured(objective: Objective, e: Evidence) -> Metrics:
    """The sum [K] and the count of every metric in `Preferences.metric_names`, by name."""
    found: dict[str, tuple[Tensor, Tensor | float]] = {**objective.metrics(e)}
    if e.nll is not None and e.nll_tokens is not None:
        found["nll_loss"] = e.nll.sum(1), e.nll_tokens.sum()
    if e.kl is not None:
        found["kl"] = e.kl[:, 0] * e.sums.shape[1], float(e.sums.shape[1])
    if objective.needs.rows == "labelled":
        return found
    rewards = objective.answer_rewards(e)
    kinds = {"rewards": rewards}
    if e.values is None:
        kinds["logps"] = e.sums
    for kind, values in kinds.items():
        better, worse = pairs(values)
        sides: list[tuple[Tensor, Tensor | float]] = [(better, better.shape[1]), (worse, worse.shape[1])]
        if e.labels is not None and objective.needs.rows == "rated":
            sides = [(values.where(good, 0.0), good.sum()) for good in (e.labels, ~e.labels)]
        for side, (own, count) in zip(("chosen", "rejected"), sides, strict=True):
            found[f"{kind}/{side}"] = own.sum(1), count
    if objective.needs.rows == "pairs":
        better, worse = pairs(rewards)
        found["rewards/accuracies"] = (better > worse).double().sum(1), float(better.shape[1])
    return found


@dataclass
class Tempered:
    """The arithmetic of a chunk at a temperature (`OfChunk` in `ci_llm/lora/passes.py`), which keeps the entropies.

    Attributes:
        entropies: for each chunk the entropies [S] of its tokens' distributions, in nats, without a gradient.
    """

    temperature: float = 1.0
    entropies: list[Tensor] = field(default_factory=list)

    def __call__(self, z: Tensor, index: Tensor, head: Head, narrow: Tensor, grads: Tensor | None) -> Tensor:
        if self.temperature != 1:  # the scale of the logits is one over the temperature as well, and so is their cap
            z.div_(self.temperature)
            cap = head.softcap and head.softcap / self.temperature
            head = replace(head, scale=head.scale / self.temperature, softcap=cap)
        self.entropies.append(torch.special.entr(z.softmax(1)).sum(1))
        return plain_chunk(z, index, head, narrow, grads)


@dataclass(frozen=True)
class GrpoObjective(_OfUnits):
    """The objective of a run whose agents draw what they learn from.

    Args:
        grpo: GRPO with the settings of all agents.
        rewards: the functions that judge completions.
        failed: agents that could not draw, because their numbers are not finite.
    """

    grpo: Grpo
    crowd: CrowdModel
    rewards: tuple[Reward, ...]
    failed: frozenset[int] = frozenset()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """TRL's names of what the passes tell; the other metrics are those of completions."""
        return ("entropy", "kl") if self.grpo.needs.reference else ("entropy",)

    def __call__(self, output: CrowdOutput, step: int) -> StepLoss:
        """The loss of the agents of one output, each on completions of its own; `step` is unused here."""
        batch, agents = output.batch, output.agents
        assert batch.advantages is not None
        assert batch.weights is not None
        weights, gains = batch.weights[batch.target_rows], batch.advantages[batch.target_rows]
        learned = (weights > 0).double()
        shape = (len(agents), len(self.metric_names), 2)
        totals = []
        metrics = output.states.new_zeros(shape, dtype=torch.float64)
        metrics[..., 1] = learned.sum()
        for place, agent in enumerate(agents):
            beta, temperature = self.grpo.of_agent(agent)
            chunk = Tempered(temperature)
            divergences = None
            log_probs = self.crowd.target_log_probs(output.states[place : place + 1], batch, chunk)[0].double()
            if beta:
                reference = self.crowd.reference((agent,), batch, Tempered(temperature))[0].double()
                divergences = divergence(log_probs, reference)
                metrics[place, 1, 0] = (divergences.detach() * learned).sum()
            totals.append((self.grpo.token_losses(log_probs, gains, divergences, beta) * weights).sum())
            metrics[place, 0, 0] = (torch.cat(chunk.entropies).double() * learned).sum()
        total = torch.stack(totals)
        lost = [math.nan if agent in self.failed else 0.0 for agent in agents]
        return StepLoss(
            agents,
            batch,
            total=total.sum(),
            task=total.detach() + total.new_tensor(lost),
            diversity=total.new_zeros(()),
            targets=(batch.counted,) * len(agents),
            metrics=metrics,
        )


#: The objective of a run.
TrainedObjective = NextToken | Preferences | GrpoObjective


def objective_of(config: Config, crowd: CrowdModel) -> TrainedObjective:
    """The objective of the agents of `config`."""
    each = zip(config.each_agent, (agent.settings for agent in crowd.agents), strict=True)
    keys = [(agent.seed, agent.index) if own.row_weights == "bootstrap" else None for own, agent in each]
    bootstrap = tuple(keys) if any(keys) else ()
    if config.objective != objectives.SFT:
        found = objectives.objective_of(config.objective, config.each_agent, crowd.device)
        if isinstance(found, Grpo):
            rewards = rewards_of(config.rewards or (), config.answer_column, config.max_completion_length)
            return GrpoObjective(found, crowd, rewards)
        return Preferences(found, crowd, bootstrap)
    return NextToken(
        config.diversity, config.lambda_sw, config.swd_representation, seed=config.seed, bootstrap=bootstrap
    )
