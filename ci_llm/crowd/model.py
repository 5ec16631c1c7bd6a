"""The crowd as a module: one frozen base, K agents, one fused pass, and the route that rows take through the base.

The route of rows through a base, packed or padded, chosen by a trial against the base's own forward pass.

A family may accept packed rows and still compute something else. So nothing is assumed about a family: at the start one
short batch goes both ways, and the logits are compared.

Legend: K agents, N packed tokens, V vocabulary.

The crowd as a module: one frozen base, K agents, one fused pass. Loops, evaluations and users call this.

Legend: K agents, B rows, N packed tokens, S targets, D hidden width, V vocabulary, T padded length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ci_llm.base.quantized import stored_quantization
from ci_llm.crowd.aggregators import Learned
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.asking import Answer, Choices, answers, options_of, stream, texts
from ci_llm.crowd.decoding import Decoding
from ci_llm.crowd.generation import Generated, Stream, TokenIds, generate_ids, is_padding_invariant, stop_strings_of
from ci_llm.crowd.pretrained import Pretrained, default_names, open_pretrained, save_crowd
from ci_llm.crowd.voting import Reading, elect, final_answers
from ci_llm.data.batches import AgentBatches, Batch
from ci_llm.data.prompts import Prompt, Prompter, prompts_of
from ci_llm.distributed.precision import DTYPES
from ci_llm.errors import ModelError
from ci_llm.lora.adapters import adapter_config, attach
from ci_llm.lora.layer import LoraSettings
from ci_llm.lora.passes import (
    PACKED,
    Head,
    Part,
    Passes,
    describe_error,
    distance,
    dtypes_of,
    recompute_layers,
    stop_recomputing,
    target_log_probs,
    tolerance,
    unusable_base,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


Route = Literal["packed", "padded"]


def choose_route(crowd: Crowd) -> str | None:
    """Compare one short batch through the base's own forward pass with both routes, and take the first that agrees.

    Returns:
        why the padded route was taken, or None for the packed one.

    Raises:
        ModelError: the base cannot run with agents, is not causal, or neither route reproduces its logits.
    """
    with _random_agents(crowd), torch.no_grad():
        batch = _probe(crowd.model, crowd.device)
        try:
            wanted = _reference(crowd, batch)
        except Exception as error:
            raise unusable_base(
                crowd.model, crowd.base_name, f"cannot read a short batch with agents on it ({describe_error(error)})"
            ) from error
        if wanted.isnan().any():
            raise ModelError(
                f"{type(crowd.model).__name__} gives NaN for logits: some of its weights are not finite",
                where=f"model_name: {crowd.base_name}",
                hint="download or save the base anew; if its weights are whole, take a wider model_dtype",
            )
        _refuse_non_causal(crowd, batch)
        reason = None
        routes: tuple[Route, ...] = ("packed", "padded")
        for crowd.route in routes:
            try:
                found = crowd.head.logits(crowd.states(batch))
            except Exception as error:  # noqa: BLE001 - families raise errors of every kind for packed rows
                reason = describe_error(error)
                continue
            gap = distance(found, wanted)
            if gap <= tolerance(*dtypes_of(crowd.model, found)):
                return reason
            reason = f"{crowd.route} rows change its logits by {gap:.1e}"
    raise unusable_base(
        crowd.model, crowd.base_name, f"computes its logits in a way this program does not reproduce ({reason})"
    )


@contextmanager
def _random_agents(crowd: Crowd) -> Iterator[None]:
    """Give the agents random weights for the trial: with B = 0 a mix-up of adapters would change nothing."""
    weights, training = crowd.agents.weights, crowd.training
    kept, generator = weights.clone(), torch.Generator().manual_seed(0)
    weights.copy_(torch.randn(kept.shape, generator=generator) * 0.05)
    crowd.eval()
    try:
        yield
    finally:
        weights.copy_(kept)
        crowd.train(training)


def _reference(crowd: Crowd, batch: Batch) -> Tensor:
    """Logits [K, N, V] of the model's own forward pass, for each agent and each row separately."""
    rows = [batch.input_ids[s:e][None] for s, e in zip(batch.bounds, batch.bounds[1:], strict=False)]
    logits = []
    for k in range(crowd.num_agents):
        with crowd.active_agent(k) as model:
            logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    return torch.stack(logits)


def _refuse_non_causal(crowd: Crowd, batch: Batch) -> None:
    """Change the last token of a row, and refuse the base if logits before it change."""
    row = batch.input_ids[: batch.bounds[1]][None]
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % crowd.model.get_input_embeddings().weight.shape[0]
    with crowd.active_agent(0) as model:
        first, second = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (row, other))
    if distance(first, second) > tolerance(*dtypes_of(crowd.model, first)):
        raise ModelError(
            f"{type(crowd.model).__name__} is no causal language model: a later token changes earlier logits",
            where=f"model_name: {crowd.base_name}",
            hint="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
        )


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


@dataclass
class CrowdOutput:
    """What one fused pass returns.

    Attributes:
        log_probs: [K, S] log-probability of every target under every agent, in nats; fp32, or fp64 on an fp64 base.
        states: [K, N, D] final hidden states, in packed order.
    """

    log_probs: Tensor
    states: Tensor

    @property
    def loss(self) -> Tensor:
        """[] the sum over agents of the mean cross-entropy: the K terms that K separate runs would minimise."""
        return -self.log_probs.mean(1).sum()


@dataclass
class AgentOutputs:
    """What one fused pass over rows of each agent's own returns.

    Attributes:
        each: per agent an output with K = 1; None for an agent that has no row in the micro-batch.
    """

    each: tuple[CrowdOutput | None, ...]

    @property
    def loss(self) -> Tensor:
        """[] the sum over agents of the mean cross-entropy of their rows."""
        return torch.stack([output.loss for output in self.each if output is not None]).sum()


class Crowd(nn.Module):
    """K LoRA agents on one frozen base.

    `forward(batch)` runs the base once over K copies of the packed rows. The base's parameters stay frozen; the
    agents' are registered parameters, so `crowd.parameters()`, `.to()`, DistributedDataParallel and
    `accelerator.prepare` work as for any module.

    Args:
        model: the base; its target modules are replaced in place.
        settings: number and shape of the agents.
        base_name: hub id or folder under which `from_pretrained` will find the base again.
        pad_id: token id that fills padded rows.

    Attributes:
        prompter: words prompts for `generate`; None until somebody sets it.
        calibration: what validation rows say about the answers; None until `ci-llm evaluate --calibrate`.
        learned: what aggregators with learned weights take; from the calibration.
        common_start: whether all agents began with the same weights, so that the mean of their weights is an agent.
        names: of the agents' folders in a checkpoint, agent0, agent1, ...; a run that stops agents leaves gaps.

    Raises:
        ModelError: `settings.target_modules` fits no linear layer, or memory does not hold the agents.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, base_name: str, pad_id: int = 0) -> None:
        super().__init__()
        self.settings, self.base_name, self.pad_id = settings, base_name, pad_id
        self.prompter: Prompter | None = None
        self.calibration: Calibration | None = None
        self.learned: Learned | None = None
        self.common_start = not settings.initialize_adapters_rand
        self.agents = attach(model, settings)
        self.names = default_names(settings.num_agents)
        self.model = model
        self._native_attention = model.config._attn_implementation
        self.route = "packed"
        self._padding_invariant: bool | None = None  # measured before the first batch that needs padding

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, *, device: torch.device | str | None = None, base_model: str | None = None
    ) -> Crowd:
        """Open a saved crowd, ready to `generate`: a run, a checkpoint, what `save_pretrained` wrote, or a hub id.

        See `open_pretrained` for the arguments and errors."""
        return cls.of(open_pretrained(folder, device, base_model))

    @classmethod
    def of(cls, saved: Pretrained) -> Crowd:
        """The crowd of parts that were opened, on their base, ready to `generate`."""
        crowd = cls(saved.base.model, saved.settings, saved.base.name, saved.base.pad_id)
        crowd.prompter, crowd.common_start, crowd.names = saved.prompter, saved.common_start, saved.names
        crowd.calibration, crowd.learned = saved.calibration, saved.learned
        for k, tensors in enumerate(saved.agents):
            crowd.agents.load_agent(k, tensors, saved.source)
        return crowd.eval()

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the agents for `from_pretrained`, each as a PEFT folder `agent<k>`, and the tokenizer; no base weights.

        Args:
            folder: must not exist. Afterwards it is whole, or not there.

        Raises:
            ModelError: it exists. CheckpointError: it cannot be written.
        """
        save_crowd(self, Path(folder))

    def detach(self) -> PreTrainedModel:
        """The base by itself again, with its own layers and attention. The crowd cannot be used any more."""
        for name, layer in self.agents.layers.items():
            self.model.set_submodule(name, layer.base_layer)
        self.model.config._attn_implementation = self._native_attention
        stop_recomputing(self.model)
        return self.model

    @property
    def route(self) -> Route:
        """How rows go through the base: "packed" end to end, or "padded" side by side in a rectangle."""
        return self._route

    @route.setter
    def route(self, route: Route) -> None:
        # The setting outlives the forward pass, because activation checkpointing runs the layers again in the
        # backward pass, and they must then take the same attention.
        self._route = route
        self.model.config._attn_implementation = PACKED if route == "packed" else self._native_attention

    @property
    def num_agents(self) -> int:
        return self.settings.num_agents

    def replace_agents(self, settings: LoraSettings, sources: Sequence[int | None], names: Sequence[str]) -> None:
        """Go on with copies of some of the agents, and with new ones; see `AgentStorage.with_agents_from`."""
        self.agents = self.agents.with_agents_from(settings, sources)
        self.settings, self.names = settings, [*names]

    @property
    def head(self) -> Head:
        return Head.of(self.model)

    @property
    def device(self) -> torch.device:
        return self.agents.weights.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Crowd:
        if stored_quantization(self.model.config) and fn(torch.zeros(1)).dtype != torch.float32:
            raise ModelError(
                "a quantised base keeps its precision",
                where="Crowd.to",
                hint="load it with load_base(..., model_dtype=...), or move it to a device only",
            )
        super()._apply(fn, recurse)
        self.agents.restack()  # .to() moves every parameter separately; make them views of one storage again
        return self

    @overload
    def forward(self, batch: Batch) -> CrowdOutput: ...
    @overload
    def forward(self, batch: AgentBatches) -> AgentOutputs: ...
    def forward(self, batch: Batch | AgentBatches) -> CrowdOutput | AgentOutputs:
        """Run one fused pass over the packed rows of `batch`, which are those of all agents or of each its own."""
        if self.training:
            self.agents.draw_masks_of_pass()
        if isinstance(batch, Batch):
            return self._output(self.states(batch), batch)
        found = zip(self._passes.states_of_each(batch), batch.each, strict=True)
        return AgentOutputs(tuple(None if own is None else self._output(states, own) for states, own in found))

    def parts(self, batch: Batch | AgentBatches) -> list[Part]:
        """The passes that a micro-batch takes: one for all agents, or one for each (`agents.pass_per_agent`).

        For each of them call the crowd with its `rows`, and go backward, inside of its `reading()`.
        """
        return self._passes.parts(batch)

    def _output(self, states: Tensor, batch: Batch) -> CrowdOutput:
        head = self._passes.cast_head(states)
        return CrowdOutput(target_log_probs(states[:, batch.predict_from], batch.targets, head), states)

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [K, N, D] of every agent, in packed order on either route."""
        return self._passes.states(batch)

    @property
    def _passes(self) -> Passes:
        return Passes(self.model, self.agents, self.pad_id, packed=self.route == "packed")

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the inputs of the base's layers, and compute the rest again in the backward pass."""
        recompute_layers(self.model, self.agents)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        details: Literal[False] = ...,
        stop_strings: str | Sequence[str] | None = ...,
        batch_size: int = ...,
        **choices: Unpack[Choices],
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        details: Literal[True],
        stop_strings: str | Sequence[str] | None = ...,
        batch_size: int = ...,
        **choices: Unpack[Choices],
    ) -> list[Answer]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        aggregator: str = "probability",
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        stop_strings: str | Sequence[str] | None = (),
        batch_size: int = 16,
        abstain_below: float | None = None,
        agents_per_prompt: float | None = None,
        details: bool = False,
    ) -> list[str] | list[Answer]:
        """Answer each prompt. Every token is chosen from the aggregated distribution of all agents.

        Args:
            prompts: a string or a chat (messages with "role" and "content"), or a list of them, worded as in training.
            max_new_tokens: at most so many tokens per answer.
            aggregator: a module of `ci_llm.crowd.aggregators`, such as probability, logit or rerank.
            do_sample: draw tokens by `temperature`, `top_k` and `top_p`; otherwise take the most probable one.
            seed: of sampling; None takes another one in each call.
            stop_strings: an answer ends before the first of these strings.
            batch_size: prompts answered at a time; the memory for keys and values grows with it.
            abstain_below: give no answer, "", that is right with a lower probability; needs a calibration.
            agents_per_prompt: ask one agent, and all of them where it is unsure, so that a prompt takes so many agents
                on average; needs a calibration.
            details: also say how sure the crowd is and, without `agents_per_prompt`, let each agent answer alone.

        Returns:
            one answer per prompt, in order: a string, or with `details` a `ci_llm.crowd.asking.Answer`.

        Raises:
            ModelError: this crowd has no `prompter`; `from_pretrained` gives it one.
            BadInput: a value is out of range, or a prompt cannot be used.
        """
        options = options_of(
            self,
            stop_strings_of(stop_strings),
            abstain_below=abstain_below,
            agents_per_prompt=agents_per_prompt,
            max_new_tokens=max_new_tokens,
            aggregator=aggregator,
            do_sample=do_sample,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
        )
        how = (self, prompts_of(prompts), options, batch_size)
        return list(answers(*how)) if details else texts(*how)

    def stream(
        self, prompt: Prompt, *, stop_strings: str | Sequence[str] | None = (), **choices: Unpack[Choices]
    ) -> Stream[Answer]:
        """Answer one prompt piece by piece: `for piece in crowd.stream(prompt): print(piece, end="", flush=True)`.

        The pieces together are the answer that `generate` gives. They come from a thread, which ends with the loop,
        with a `with` block around it, or by `close()`; until then the crowd cannot be used for anything else.

        Args:
            prompt, stop_strings, choices: as for `generate`.

        Returns:
            an iterator over strings; its `result` is the `ci_llm.crowd.asking.Answer`, without the agents' own.

        Raises:
            ModelError, BadInput: as `generate`.
        """
        return stream(self, prompt, options_of(self, stop_strings_of(stop_strings), **choices))

    def generate_ids(
        self,
        prompts: Sequence[TokenIds],
        decoding: Decoding,
        *,
        include_agents: bool = False,
        uncertainty: bool = False,
        agent: int | None = None,
        numbers: Sequence[int] | None = None,
        stop: Callable[[], bool] = lambda: False,
        is_over: Callable[[TokenIds], bool] | None = None,
        answers_of: Reading | None = None,
    ) -> Generated:
        """`generate` for one batch of token ids; see `ci_llm.crowd.generation.generate_ids`.

        Args:
            agent: ask this one alone, as a crowd of one.
            answers_of: the final answers in texts, for a crowd that votes.

        Raises:
            ModelError: the base cannot generate.
            DataError: a prompt is empty, or longer than the base can read.
        """
        route, training = self.route, self.training
        self.route = "padded"  # packed attention has no cache of keys and values; the model's own attention has
        self.eval()
        try:
            if self._padding_invariant is None and len({*map(len, prompts)}) > 1:
                self._padding_invariant = is_padding_invariant(self.model, self.num_agents, self.pad_id)
            size = 1 if self._padding_invariant is False else max(1, len(prompts))
            with nullcontext() if agent is None else self.active_agent(agent):
                parts = [
                    generate_ids(
                        self.model,
                        self.num_agents if agent is None else 1,
                        prompts[at : at + size],
                        decoding,
                        numbers=(numbers or range(len(prompts)))[at : at + size],
                        stop=stop,
                        is_over=is_over,
                        pad_id=self.pad_id,
                        include_agents=include_agents,
                        uncertainty=uncertainty,
                        learned=self.learned if agent is None else None,
                    )
                    for at in range(0, len(prompts), size)
                ]
        except Exception as error:  # families raise errors of every kind for what they do not support
            raise unusable_base(self.model, self.base_name, f"cannot generate ({describe_error(error)})") from error
        finally:
            self.route = route
            self.train(training)
        found = Generated.joined(parts)
        return elect(self, prompts, found, decoding, answers_of or self._answers_of) if found.voters else found

    def _answers_of(self, texts: Sequence[TokenIds]) -> list[str]:
        prompter = self.prompter
        return final_answers([prompter.text(ids) if prompter else str(list(ids)) for ids in texts])

    @contextmanager
    def active_agent(self, agent: int) -> Iterator[PreTrainedModel]:
        """Give the plain model, with its own attention and with the adapter of `agent` active for every row."""
        config, route_attention = self.model.config, self.model.config._attn_implementation
        config._attn_implementation = self._native_attention
        try:
            with self.agents.reading.of(agent):
                yield self.model
        finally:
            config._attn_implementation = route_attention

    def choose_route(self) -> str | None:
        """Take the route that reproduces the base's own logits; see `ci_llm.crowd.model.choose_route`."""
        return choose_route(self)

    def meta(self, fingerprint: str) -> dict[str, Any]:
        """The content of `ci_llm_meta_config.json`, from which this crowd can be built again.

        Args:
            fingerprint: of the base, see `fingerprint_of`.
        """
        sizes, stored = self.agents.sizes, stored_quantization(self.model.config)
        return {
            "num_agents": self.num_agents,
            "base_model_name_or_path": self.base_name,
            "base_fingerprint": fingerprint,
            "base_dtype": next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype),
            "prompt_form": self.prompter.form if self.prompter else "chat",
            "common_start": self.common_start,
            "lora": self.settings.to_dict(),
            **({"folders": self.names} if self.names != default_names(self.num_agents) else {}),
            "parameters_per_agent": sizes if len({*sizes}) > 1 else sizes[0],
            **({} if stored is None else {"quantization": stored}),
        }

    def adapter_files(self) -> dict[str, Any]:
        """Every agent in PEFT's layout: file names without their endings -> tensors or JSON."""
        kinds = [adapter_config(self.model, self.agents, k, self.base_name) for k in range(len(self.settings.kinds()))]
        files: dict[str, Any] = {}
        for k, name in enumerate(self.names):
            files[f"{name}/adapter_model"] = self.agents.agent_tensors(k)
            files[f"{name}/adapter_config"] = kinds[k % len(kinds)]
        return files
