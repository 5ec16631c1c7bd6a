"""An agent of a crowd as PEFT has it: a model of its own, with the same weights, trained by PEFT alone."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
from torch import Tensor

from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch


def with_weights_of(wrapped: Any, crowd: Crowd, agent: int) -> Any:
    """A model of PEFT, in training mode, once it has taken the weights of an agent."""
    weights = {in_twin(name): tensor for name, tensor in crowd.agents.agent_tensors(agent).items()}
    assert not wrapped.load_state_dict(weights, strict=False).unexpected_keys
    return wrapped.train()


def exported_twin(model: Any, crowd: Crowd, agent: int) -> Any:
    """The twin on a copy of the base, with the configuration that the crowd exports for the agent."""
    config = peft.LoraConfig(**crowd.adapter_files()[f"agent{agent}/adapter_config"] | {"inference_mode": False})
    return with_weights_of(
        peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False), crowd, agent
    )


def in_twin(name: str) -> str:
    """The name of a tensor of an agent, as a parameter of its twin."""
    return name.replace(".weight", ".default.weight")


def assert_weights_equal(found: dict[str, Tensor], twin: Any, crowd: Crowd, agent: int, atol: float) -> None:
    """All weights of an agent, among the tensors by name in `found`, are those of its twin."""
    wanted = dict(twin.named_parameters())
    for name in crowd.agents.agent_tensors(agent):
        torch.testing.assert_close(found[name], wanted[in_twin(name)].data, rtol=0, atol=atol)


def peft_loss(twin: Any, packed: Batch) -> Tensor:
    """Mean cross-entropy over all targets, row by row, without packing or padding."""
    total = torch.zeros((), dtype=torch.float64)
    for row, (start, end) in enumerate(zip(packed.bounds, packed.bounds[1:], strict=False)):
        log_probs = twin(input_ids=packed.input_ids[start:end][None]).logits[0].log_softmax(-1)
        mine = packed.target_rows == row
        total = total - log_probs[packed.predict_from[mine] - start, packed.targets[mine]].sum()
    return total / packed.num_targets
