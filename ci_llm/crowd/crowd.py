"""The public class `Crowd`: the module of K agents with what users do with it, to open, ask and save it.

The state of a crowd in a checkpoint (`state_of`) is the same in those of a run and in what the hooks of Accelerate
write. What they hold beside it, such as moments and the position in the data, is that of their loops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ci_llm.agents.as_peft import adapter_config, peft_model
from ci_llm.base.load import fingerprint_of
from ci_llm.base.quantized import stored_quantization
from ci_llm.config.own_keys import SHAPE_KEYS
from ci_llm.crowd import answering, generation, scoring
from ci_llm.crowd.answering import Answer, Choices, Prompts, Stream, options_of
from ci_llm.crowd.given_path import META
from ci_llm.crowd.judging import TextScore, score_texts
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.pretrained import Pretrained, class_names, default_names, open_pretrained, write_crowd
from ci_llm.data.prompts import Prompt, prompts_of, tokenizer_files
from ci_llm.distributed.precision import DTYPES
from ci_llm.errors import ModelError
from ci_llm.lora.settings import FIELD_OF_KEY, LoraSettings

if TYPE_CHECKING:
    from peft import PeftModel


class Crowd(CrowdModel):
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
        prompter: formats prompts for `generate`; a ModelError until it is set.
        calibration: the lessons of validation rows about the answers; None until `ci-llm evaluate --calibrate`.
        common_start: True if all agents began with the same weights, so that the mean of their weights is an agent.
        names: the agents' folders in a checkpoint, agent0, agent1, ...; a run that stops agents leaves gaps. Empty
            for a base alone.
        classes: the names of the classes, for agents that classify texts.
        reads_pairs: True if heads were trained on pairs, and judge answers.
        start: [K, P] the weights with which agents are compared in training; None for the base alone.

    Raises:
        ModelError: `settings.target_modules` fits no linear layer, or memory does not hold the agents.

    Examples:
        >>> crowd = ci_llm.Crowd.from_pretrained(run)
        >>> [answer] = crowd.generate(["Ann has 7 pens. Ann breaks 6. How many pens are left?"], max_new_tokens=4)
        >>> isinstance(answer, str), crowd.num_agents
        (True, 3)
        >>> crowd.log_probs(["Ann has 7 pens.", "Ben has 2."], ["7", "2"]).shape  # 3 agents and the crowd, in nats
        torch.Size([4, 2])
        >>> type(crowd[0]).__name__
        'PeftModelForCausalLM'
    """

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, *, device: torch.device | str | None = None, base_model: str | None = None
    ) -> Crowd:
        """Open a saved crowd, ready to `generate`: a run, a checkpoint, what `save_pretrained` wrote, or a hub id.

        See `open_pretrained` for the arguments and errors."""
        return cls.of(open_pretrained(folder, device, base_model))

    @classmethod
    def of(cls, saved: Pretrained) -> Crowd:
        """A crowd from the parts of a saved one, ready to `generate`."""
        crowd = cls(saved.base.model, saved.settings, saved.base.name, saved.base.pad_id)
        crowd.prompter = saved.prompter
        crowd.common_start = saved.common_start
        crowd.names = saved.names
        crowd.calibration = saved.calibration
        heads = saved.meta.get("head", {})
        crowd.classes = class_names(heads)
        crowd.reads_pairs = heads.get("reads") == "pairs"
        for agent, adapter in zip(crowd.agents, saved.agents, strict=False):  # a base alone has none
            agent.load_state_dict(adapter.tensors, saved.source)
        return crowd.eval()

    generate_ids = generation.generate_ids

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the agents for `from_pretrained`, each as a PEFT folder `agent<k>`, and the tokenizer; no base weights.

        Args:
            folder: must not exist. It is written completely or not at all.

        Raises:
            ModelError: the folder exists. CheckpointError: it cannot be written.
        """
        tokenizer = tokenizer_files(self._prompter.tokenizer) if self._prompter else {}
        meta = self.meta(fingerprint_of(self.model))
        write_crowd(Path(folder), self.adapter_files(), meta, tokenizer, calibration=self.calibration)

    def meta(self, fingerprint: str) -> dict[str, Any]:
        """The content of `ci_llm_meta_config.json`, from which this crowd can be built again.

        Args:
            fingerprint: the fingerprint of the base, see `fingerprint_of`.
        """
        sizes = self.storage.sizes
        stored = stored_quantization(self.model.config)
        named = {"id2label": {str(number): name for number, name in enumerate(self.classes)}} if self.classes else {}
        head = {"reads": "pairs" if self.reads_pairs else "texts", "num_labels": self.settings.outputs, **named}
        return {
            "num_agents": self.num_agents,
            "base_model_name_or_path": self.base_model.base_name,
            "base_fingerprint": fingerprint,
            "base_dtype": next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype),
            "prompt_form": self._prompter.form if self._prompter else "chat",
            "common_start": self.common_start,
            "lora": self.settings.to_dict(),
            **({"head": head} if self.settings.outputs else {}),
            **({"folders": self.names} if self.names != default_names(self.num_agents) else {}),
            "parameters_per_agent": sizes if len({*sizes}) > 1 else sizes[0],
            **({} if stored is None else {"quantization": stored}),
        }

    def adapter_files(self) -> dict[str, Any]:
        """Every agent in PEFT's layout: file names without endings -> tensors or JSON."""
        files: dict[str, Any] = {}
        base_name = self.base_model.base_name
        alike = adapter_config(self.model, self.storage, self.agents[0], base_name)
        for agent, name in zip(self.agents, self.names, strict=False):
            own = adapter_config(self.model, self.storage, agent, base_name) if self.settings.agents else alike
            files |= {f"{name}/adapter_model": agent.state_dict(), f"{name}/adapter_config": own}
        return files

    def __getitem__(self, agent: int) -> PeftModel:
        """One agent as a plain PEFT model, for sequence classification if it has a head.

        The model shares the base's weights with the crowd. Its adapter is a copy of the agent as it is now, and later
        training of one does not change the other. A negative number counts from the last agent.

        Raises:
            IndexError: there is no such agent. ModelError: PEFT does not know the layers of this quantised base.
        """
        if not -len(self.names) <= agent < len(self.names):
            raise IndexError(f"there is no agent {agent}: there are {len(self.names)}")
        if stored_quantization(self.model.config):
            hint = "open the adapter's folder with PeftModel.from_pretrained, on a base that Transformers has quantised"
            raise ModelError("the layers of a quantised base cannot be shared with PEFT", where="Crowd", hint=hint)
        k = agent % len(self.names)
        with self.base_model.plain(), self.base_model.active_agent(k) as model:
            return peft_model(model, self.storage, self.agents[k], self.base_model.base_name)

    def log_probs(self, prompts: Prompts, answers: str | Sequence[str], *, batch_size: int = 16) -> Tensor:
        """The log-probabilities of given answers.

        Args:
            prompts: N prompts as for `generate`.
            answers: N strings, formatted as in training; their ends are counted.
            batch_size: rows at a time.

        Returns:
            [K + 1, N], fp64, in nats: the log-probability of each answer under every agent, and last under the crowd.

        Raises:
            BadInput: there is not one answer for each prompt.
            ModelError: this crowd has no `prompter`.
        """
        answering.require_writers(self)
        rows = answering.answered_rows(self, prompts_of(prompts), answers)
        scores = scoring.score(self, answering.batches_of(rows, batch_size), "probability")
        assert scores is not None, "nobody asks to stop"
        return -scores.nll

    def score(
        self,
        texts: Prompts,
        answers: str | Sequence[str] | None = None,
        *,
        abstain_below: float | None = None,
        batch_size: int = 16,
    ) -> list[TextScore]:
        """Score texts by the heads of the agents: rewards, classes or numbers, by their objective.

        Args:
            texts: a text or a chat, or a list of N of them; with `answers` the prompts.
            answers: N answers to these prompts, for heads that give rewards.
            abstain_below: a class that is less probable is marked as `abstained`; for heads of classes.
            batch_size: texts at a time.

        Returns:
            for each text a `ci_llm.crowd.judging.TextScore`: `scores` of the agents, `mean`, `std`, `lower`; for
            classes also `label` and `probabilities`.

        Raises:
            ModelError: these agents have no heads, or the crowd has no `prompter`.
            BadInput: there is not one answer for each prompt, or a text cannot be used.
        """
        return score_texts(self, texts, answers, abstain_below, batch_size)

    @overload
    def generate(
        self, prompts: Prompts, *, details: Literal[False] = ..., batch_size: int = ..., **choices: Unpack[Choices]
    ) -> list[str]: ...
    @overload
    def generate(
        self, prompts: Prompts, *, details: Literal[True], batch_size: int = ..., **choices: Unpack[Choices]
    ) -> list[Answer]: ...
    def generate(
        self, prompts: Prompts, *, details: bool = False, batch_size: int = 16, **choices: Unpack[Choices]
    ) -> list[str] | list[Answer]:
        """Answer each prompt. Every token is chosen from the aggregated distribution of all agents.

        Args:
            prompts: a string or a chat (messages with "role" and "content"), or a list of them, worded as in training.
            details: also say how sure the crowd is, and let each agent answer alone.
            batch_size: prompts answered at a time; the memory for keys and values grows with it.
            **choices: options, with the defaults of `ci_llm.crowd.next_token.Decoding`: `max_new_tokens` (256),
                `aggregator` ("probability"), `do_sample` (False), `temperature`, `top_p`, `top_k`, `seed`,
                `stop_strings` (one or several) and `abstain_below`. With `temperature=0` the most probable token is
                taken, and without a seed each call takes another one.

        Returns:
            one answer per prompt, in order: a string, or with `details` a `ci_llm.crowd.answering.Answer`.

        Raises:
            ModelError: this crowd has no `prompter`; `from_pretrained` gives it one.
            BadInput: a value is out of range, or a prompt cannot be used.
        """
        options = options_of(self, **choices)
        if details:
            return [*answering.answers(self, prompts_of(prompts), options, batch_size)]
        return answering.texts(self, prompts_of(prompts), options, batch_size)

    def stream(self, prompt: Prompt, **choices: Unpack[Choices]) -> Stream:
        """Answer one prompt piece by piece: `for piece in crowd.stream(prompt): print(piece, end="", flush=True)`.

        The pieces together are the answer that `generate` gives. Votes, and answers of bases that do not read packed
        rows, come in one piece. A loop that is left early, or `close()`, writes no further token.

        Args:
            prompt: one prompt, as for `generate`.
            **choices: the options of `generate`.

        Returns:
            an iterator over strings; its `result` is the `ci_llm.crowd.answering.Answer`, without the agents' own.

        Raises:
            ModelError, BadInput: as `generate`.
        """
        return Stream(self, prompt, options_of(self, **choices))


def state_of(crowd: Crowd, fingerprint: str, **facts: Any) -> dict[str, Any]:
    """Every agent in PEFT's layout, and the description of the crowd under META.

    Args:
        fingerprint: the fingerprint of the base, see `fingerprint_of`.
        facts: further facts for the description.
    """
    return {**crowd.adapter_files(), META: crowd.meta(fingerprint) | facts}


def shape_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The number and the shapes of the agents of a state, by the names of keys: a crowd takes no state of others."""
    lora = LoraSettings.from_dict(state[META]["lora"])
    return {
        "num_agents": state[META]["num_agents"],
        **{key: lora.common_or_list(FIELD_OF_KEY[key]) for key in SHAPE_KEYS},
    }


def load_state(crowd: Crowd, state: Mapping[str, Any], where: str) -> None:
    """Give the agents their weights.

    Args:
        where: the checkpoint, for the error.

    Raises:
        ForeignCheckpoint: names or shapes of tensors differ.
    """
    for agent in crowd.agents:
        agent.load_state_dict(state[f"{agent.name}/adapter_model"], where)
