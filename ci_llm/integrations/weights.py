"""What a training changes of a model, by name; and a digest of what it does not change."""

from __future__ import annotations

import hashlib

import torch
import xxhash
from torch import Tensor, nn

from ci_llm.errors import ForeignCheckpoint


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that are trained and buffers that are kept, each once however often it is shared."""
    kept = model.state_dict(keep_vars=True).keys()
    named = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    return named | {name: tensor for name, tensor in model.named_buffers() if name in kept}


def frozen_digest(model: nn.Module) -> str:
    """Of every frozen parameter's name, shape, dtype and bytes; the same for the same weights."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        if not tensor.requires_grad:
            raw = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            whole.update(
                f"{name} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(raw.data)}\n".encode()
            )
    return whole.hexdigest()[:32]


@torch.no_grad()
def load_trained(model: nn.Module, saved: dict[str, Tensor], where: str) -> None:
    """Copy saved tensors into the model, in place; nothing is touched unless all of them fit.

    Raises:
        ForeignCheckpoint: names, shapes or types differ.
    """
    own = trained_tensors(model)
    forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (own, saved)]
    if odd := sorted(name for name in own.keys() | saved.keys() if forms[0].get(name) != forms[1].get(name)):
        raise ForeignCheckpoint(
            f"the model is another one: {len(odd)} trained tensors differ in name, shape or type, first {odd[0]}",
            where=where,
            hint="build the model as the saved run did, with the same layers frozen",
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
