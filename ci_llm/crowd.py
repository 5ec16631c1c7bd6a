"""The crowd: one frozen base, K agents, one pass. What a training loop, an evaluation or a user calls.

Legend: K agents, B rows, N packed tokens, S targets, D hidden width, V vocabulary, T padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.agents import LoraSettings, StackedLoRALinear, adapter_config, attach
from ci_llm.attention import PACKED, Segments
from ci_llm.batches import Batch, padded
from ci_llm.errors import ModelError
from ci_llm.head import Head, target_log_probs

Route = Literal["packed", "padded"]


@dataclass
class CrowdOutput:
    """What one fused pass returns.

    Attributes:
        log_probs: [K, S] log-probability of every target under every agent.
        states: [K, N, D] final hidden states, in packed order.
    """

    log_probs: Tensor
    states: Tensor

    @property
    def loss(self) -> Tensor:
        """Sum over the agents of each one's mean cross-entropy: what K separate runs would minimise."""
        return -self.log_probs.mean(1).sum()


class Crowd(nn.Module):
    """K LoRA agents on one frozen base.

    `forward(batch)` runs the base once over K copies of the packed rows. The base's parameters stay frozen; the
    agents' are registered parameters, so `crowd.parameters()`, `.to()`, DistributedDataParallel and
    `accelerator.prepare` work as for any module.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, base_name: str, pad_id: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.base_name = base_name
        self.pad_id = pad_id
        self.agents = attach(model, settings)
        self.model = model
        self.route: Route = "packed"

    @property
    def num_agents(self) -> int:
        return self.settings.num_agents

    @property
    def head(self) -> Head:
        return Head.of(self.model)

    @property
    def device(self) -> torch.device:
        return self.agents.weights.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Crowd:
        super()._apply(fn, recurse)
        self.agents.restack()  # .to() and friends move every parameter on its own; make them views again
        return self

    def forward(self, batch: Batch) -> CrowdOutput:
        states = self.states(batch)
        return CrowdOutput(target_log_probs(states[:, batch.predict_from], batch.targets, self.head), states)

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [K, N, D] of every agent, in packed order, whichever route the base can take."""
        if self.route == "packed":
            return self._packed(batch, self.num_agents)
        return self._padded(batch, self.num_agents)

    def _packed(self, batch: Batch, agents: int) -> Tensor:
        with own_attention(self.model, PACKED):
            return self.model.base_model(  # type: ignore[no-any-return]
                input_ids=batch.input_ids.expand(agents, -1),
                position_ids=batch.position_ids[None],
                use_cache=False,
                segments=Segments(batch.bounds),
            ).last_hidden_state

    def _padded(self, batch: Batch, agents: int) -> Tensor:
        inputs, (rows, columns) = padded(batch, self.pad_id)
        # No attention mask: pads stand to the right, where a causal model never looks, and a mask that leaves a pad
        # nothing to look at turns its state, and then everything, into NaN in some families.
        repeated = {name: inputs[name].repeat(agents, 1) for name in ("input_ids", "position_ids")}
        states = self.model.base_model(**repeated, use_cache=False).last_hidden_state
        return states.unflatten(0, (agents, batch.num_rows))[:, rows, columns]  # type: ignore[no-any-return]

    @contextmanager
    def solo(self, agent: int) -> Iterator[PreTrainedModel]:
        """The plain model with one agent's adapter in place, every row his."""
        layers = [m for m in self.model.modules() if isinstance(m, StackedLoRALinear)]
        for layer in layers:
            layer.solo = agent
        try:
            yield self.model
        finally:
            for layer in layers:
                layer.solo = None

    def choose_route(self) -> str | None:
        """Try one short batch through the base's own forward and through ours, and take the way that agrees.

        Returns:
            why the padded way was taken, or None for the packed one.

        Raises:
            ModelError: the base sees the future, or no way of ours reproduces its logits.
        """
        with self._noisy_agents(), torch.no_grad():
            batch = _probe(self.model, self.device)
            wanted = self._reference(batch)
            self._refuse_the_clairvoyant(batch)
            reason = None
            for route, run in (("packed", self._packed), ("padded", self._padded)):
                try:
                    found = self.head.logits(run(batch, self.num_agents))
                except TypeError as error:
                    reason = str(error)
                    continue
                gap = _distance(found, wanted)
                if gap <= _tolerance(found.dtype, self.model.dtype):
                    self.route = route  # type: ignore[assignment]
                    return reason if route == "padded" else None
                reason = f"packed rows change its logits by {gap:.1e}"
        name = type(self.model).__name__
        raise ModelError(
            f"{name} computes its logits in a way this program does not reproduce ({reason})",
            where=f"model_name: {self.base_name}",
            cure="use a base of another family; Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX and GPT-2 are known to work",
        )

    @contextmanager
    def _noisy_agents(self) -> Iterator[None]:
        """Agents that differ, for a moment: with B = 0 a check would not see whose adapter was applied to whom."""
        kept, training = self.agents.weights.clone(), self.training
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(kept.shape, generator=generator) * 0.05
        self.agents.weights.copy_(noise)
        self.eval()
        try:
            yield
        finally:
            self.agents.weights.copy_(kept)
            self.train(training)

    def _reference(self, batch: Batch) -> Tensor:
        """[K, N, V]: each agent alone, each row alone, through the model's own forward."""
        rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
        logits = []
        for k in range(self.num_agents):
            with self.solo(k) as model:
                logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
        return torch.stack(logits)

    def _refuse_the_clairvoyant(self, batch: Batch) -> None:
        row = batch.input_ids[: batch.bounds[1]][None]
        other = row.clone()
        other[0, -1] = (other[0, -1] + 1) % self.model.get_input_embeddings().weight.shape[0]
        with self.solo(0) as model:
            first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
        if _distance(first, second) > _tolerance(first.dtype, self.model.dtype):
            raise ModelError(
                f"{type(self.model).__name__} is no causal language model: a later token changes earlier logits",
                where=f"model_name: {self.base_name}",
                cure="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
            )

    def meta(self, fingerprint: str) -> dict[str, Any]:
        """`ci_llm_meta_config.json`: what it takes to build this crowd again."""
        settings = asdict(self.settings)
        targets = settings["target_modules"]
        settings["target_modules"] = targets if isinstance(targets, str) else list(targets)
        return {
            "num_agents": self.num_agents,
            "base_model_name_or_path": self.base_name,
            "base_fingerprint": fingerprint,
            "lora": settings,
            "parameters_per_agent": self.agents.weights.shape[1],
        }

    def adapter_files(self) -> dict[str, Any]:
        """Every agent in PEFT's layout, keyed by the names of the files without their endings."""
        config = adapter_config(self.model, self.settings, self.base_name)
        files: dict[str, Any] = {}
        for k in range(self.num_agents):
            files[f"agent{k}/adapter_model"] = self.agents.agent_tensors(k)
            files[f"agent{k}/adapter_config"] = config
        return files


@contextmanager
def own_attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Another attention implementation for one pass; generation and the padded way keep the model's own."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _probe(model: PreTrainedModel, device: torch.device) -> Batch:
    """Three short rows of random tokens; one is longer than a short attention window, if the model has one."""
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    lengths = [7, 12, max(9, window + 5 if window < 64 else 0)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    everything = torch.arange(len(ids))
    return Batch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        bounds=tuple(bounds),
        predict_from=everything,
        targets=ids,
        target_rows=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        last_tokens=torch.tensor(bounds[1:]) - 1,
        sample_ids=tuple(range(len(lengths))),
    ).to(device)


def _distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def _tolerance(*dtypes: torch.dtype) -> float:
    """Half the digits of the coarsest dtype: far above rounding, far below a wrong mask.

    Not under 1e-5: some families take their softmax in fp32 whatever the model's dtype is.
    """
    return max(1e-5, *(torch.finfo(dtype).eps ** 0.5 for dtype in dtypes))
