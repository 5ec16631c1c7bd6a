"""An agent as PEFT has it: a model of PEFT's, and the configuration of its folder."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.agents.agent import Agent
from ci_llm.agents.storage import AgentStorage
from ci_llm.base.load import on_same_weights
from ci_llm.base.targets import peft_targets
from ci_llm.lora.heads import with_score

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def peft_model(model: PreTrainedModel, storage: AgentStorage, agent: Agent, base_name: str) -> PeftModel:
    """The agent as a PEFT model, which shares the base's weights with the crowd and copies the agent's."""
    from peft import get_peft_model, set_peft_model_state_dict

    plain = on_same_weights(model, {id(layer): layer.base_layer for layer in storage.layers.values()})
    plain.config.use_cache = True
    if storage.head.size:
        plain = with_score(plain, storage.head.outputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # not about this call
        found = get_peft_model(plain, _lora_config(model, storage, agent, base_name))
    set_peft_model_state_dict(found, agent.state_dict())
    return found.eval()


def adapter_config(model: PreTrainedModel, storage: AgentStorage, agent: Agent, base_name: str) -> dict[str, Any]:
    """The agent's `adapter_config.json` as PEFT writes it, so that the folder opens with plain PEFT."""
    config = _lora_config(model, storage, agent, base_name).to_dict()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    return {k: v for k, v in plain.items() if v is not None}


def _lora_config(model: PreTrainedModel, storage: AgentStorage, agent: Agent, base_name: str) -> LoraConfig:
    from peft import LoraConfig, TaskType

    own, is_scorer = agent.settings, agent.head is not None
    conv = any(isinstance(storage.layers[name].base_layer, Conv1D) for name in agent.adapted)
    return LoraConfig(
        task_type=TaskType.SEQ_CLS if is_scorer else TaskType.CAUSAL_LM,
        modules_to_save=["score"] if is_scorer else None,
        base_model_name_or_path=base_name,
        inference_mode=True,
        r=own.rank,
        lora_alpha=own.alpha,
        lora_dropout=own.dropout,
        use_rslora=own.use_rslora,
        fan_in_fan_out=conv,
        bias="none",
        **peft_targets(model, [*agent.adapted]),
    )
