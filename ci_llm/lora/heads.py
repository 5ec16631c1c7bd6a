"""The heads of agents: n numbers for a row, from the state of its last token, in place of the logits of the base.

The numbers of a head lie at the end of its agent's row of `weights [K, P]`. So norms, clipping, rollbacks, the
optimizer and saves include heads. LoRA dropout and DropConnect do not change them. They begin as the `score` of
Transformers' classes for sequences: normally distributed, without a bias.

Legend: K agents, R rows, D hidden width, n numbers of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ci_llm.config import Config
from ci_llm.core.determinism import generator_for
from ci_llm.errors import ModelError
from ci_llm.objectives import head_size

#: The name of a head's tensor in a PEFT folder of task type SEQ_CLS.
SCORE = "base_model.model.score.weight"


@dataclass(frozen=True)
class HeadShape:
    """The shape of all heads of a crowd.

    Attributes:
        outputs: n; 0 if there are no heads.
        width: D.
        std: the standard deviation of a head's first numbers.
    """

    outputs: int = 0
    width: int = 0
    std: float = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel, outputs: int) -> HeadShape:
        """The shape of heads of n numbers on a base."""
        if not outputs:
            return cls()
        config = model.config.get_text_config()
        width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        return cls(outputs, width, getattr(config, "initializer_range", 0.02))

    @property
    def size(self) -> int:
        """The numbers of a head."""
        return self.outputs * self.width

    def start(self, seed: int, index: int) -> Tensor:
        """The first numbers [n, D] of the head of an agent with this seed and index."""
        generator = generator_for(seed, "head", index)
        return torch.empty(self.outputs, self.width).normal_(0, self.std, generator=generator)


def head_values(states: Tensor, heads: Sequence[Tensor]) -> Tensor:
    """What the heads of K agents compute for their rows.

    Every agent has its own product, because one of all agents would round differently than that of an agent alone.

    Args:
        states: [K, R, D] the states of the rows' last tokens.
        heads: K heads [n, D].

    Returns:
        [K, R, n] in the precision of the heads.
    """
    with torch.autocast(states.device.type, enabled=False):
        return torch.stack([F.linear(own.to(head.dtype), head) for own, head in zip(states, heads, strict=True)])


def with_score(model: PreTrainedModel, outputs: int) -> PreTrainedModel:
    """The family's model for sequence classification, on the weights of a base; its `score` is not set.

    Args:
        model: the base, a causal model.
        outputs: how many numbers the new model computes for a sequence.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = outputs
    with torch.device("meta"):
        found: PreTrainedModel = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)](config)
    prefix = found.base_model_prefix
    setattr(found, prefix, getattr(model, prefix))
    weights = next(model.parameters())
    found.score = nn.Linear(found.score.in_features, outputs, bias=False, device=weights.device)
    return found.eval()


def pad_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The pad token of a base, before which Transformers pools the state of a row; or else the tokenizer's."""
    own: int | None = config.get_text_config().pad_token_id
    return tokenizer.pad_token_id if own is None else own


def require_class(model: PreTrainedModel) -> None:
    """Refuse a base whose family has no class for sequence classification, by which others could use its agents.

    Raises:
        ModelError: Transformers has no such class.
    """
    if type(model.config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"{model.config.model_type} has no class for sequence classification in Transformers: no other program"
            " could use a head on it",
            where=f"model_name: {model.config.name_or_path or model.config.model_type}",
            hint="take a base of another family, such as Llama, Qwen, Mistral, Gemma, Phi or GPT-2; or objective=sft"
            " with the labels as answers",
        )


def how_tokenized(config: Config, shape: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The arguments of `tokenize` that concern heads and the date of chats; empty if there is neither.

    Args:
        shape: the configuration of the base.
    """
    dated = {"chat_date": config.chat_date} if config.chat_date else {}
    if not head_size(config):
        return dated
    return dated | {"classes": config.label_names or (), "pad": pad_of(shape, tokenizer)}
