"""A base that a call in Python has loaded already: refused where it cannot be trained on, found again, or kept."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ci_llm.base import load
from ci_llm.base.load import Base
from ci_llm.base.progress import weights_counted
from ci_llm.base.quantized import stored_quantization
from ci_llm.core.durable import new_folder, remove_tree
from ci_llm.core.quantities import size
from ci_llm.core.run_folder import BASE_MODEL
from ci_llm.errors import ModelError

logger = logging.getLogger(__name__)

#: What two configurations of the same model may have different.
_INCIDENTAL: Final = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def require_usable(model: Any, tokenizer: Any) -> None:
    """Refuse what cannot be trained on.

    Raises:
        ModelError: with the way.
    """
    if model is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = f"model= is a {type(model).__name__}, tokenizer= a {type(tokenizer).__name__}"
        both = "give both: what AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained return"
        raise _refused(f"a loaded model and its tokenizer go together: {given}", both)
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if any(hasattr(module, "lora_A") or hasattr(module, "peft_config") for module in modules):
        alone = "give the base alone: model.merge_and_unload() of PEFT, or crowd.detach() of a Crowd; init_from=FOLDER"
        raise _refused("there are adapters on this model already", f"{alone} starts agents from saved adapters")
    if type(model) is not MODEL_FOR_CAUSAL_LM_MAPPING.get(type(getattr(model, "config", None)), None):
        causal = "give what AutoModelForCausalLM.from_pretrained returns"
        raise _refused(f"a {type(model).__name__} is no causal language model of Transformers", causal)
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if stored_quantization(model.config) or len(places) > 1 or torch.device("meta") in places:
        how = "quantised" if stored_quantization(model.config) else f"on {', '.join(sorted(map(str, places)))}"
        keys = "quantization='nf4' or base_sharding='layers'"
        raise _refused(f"this model is {how}", f"load it whole on one device, or give its name, model=NAME, and {keys}")
    load.require_tokenizer("model=", tokenizer)


def _refused(what: str, hint: str) -> ModelError:
    return ModelError(what, where="train(model=..., tokenizer=...)", hint=hint)


def name_of(model: PreTrainedModel, run_folder: Path) -> str:
    """What `from_pretrained` opens for this model: where it is from, if that has the same weights and the same
    configuration; else the folder in which the run is going to keep it."""
    name = str(model.name_or_path)
    return load.short_name(name) if name and holds(name, model) else str((run_folder / BASE_MODEL).absolute())


def holds(name: str, model: PreTrainedModel) -> bool:
    """Whether `from_pretrained(name)` gives exactly these weights, in the precision that they have here."""
    own, found = load.weights_of(model), set[str]()
    try:
        if _described(load.load_architecture(name)) != _described(model.config):
            return False
        for key, tensor in load.stored_tensors(name):
            if key not in own or not torch.equal(tensor.to(own[key]), own[key]):
                return False
            found.add(key)
    except (ModelError, OSError, ValueError):
        return False
    tied = {own[key].data_ptr() for key in found}
    return all(key in found or tensor.data_ptr() in tied for key, tensor in own.items())


def _described(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}


def on_same_weights(model: PreTrainedModel, instead: Mapping[int, Any] = {}) -> PreTrainedModel:
    """A frozen copy with modules and a configuration of its own, whose weights take no further memory.

    Args:
        instead: what stands in the copy for objects of the model, by their `id`.
    """
    known = {id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, {**known, **{id(buffer): buffer for buffer in model.buffers()}, **instead})


def base_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Base:
    """The base of a run, on the weights of a model that stays as it is."""
    model = on_same_weights(model).eval()
    if attention := load.attention_of(model.config):
        model.set_attn_implementation(attention)
    model.config.use_cache = False
    prints = load.fingerprint_of(model), load.fingerprint_of(model, rounded=True)
    return Base(model, copy.deepcopy(tokenizer), load.opened_by(name), *prints)


def keep(base: Base, run_folder: Path) -> None:
    """Write the base into the folder of its run, if its name means that folder and it is not there."""
    folder = (run_folder / BASE_MODEL).absolute()
    if base.name != str(folder) or holds(str(folder), base.model):
        return
    if folder.exists():  # of a run that never came to a checkpoint
        remove_tree(folder)
    with new_folder(folder) as draft, weights_counted():
        base.model.save_pretrained(draft, state_dict=load.weights_of(base.model))
        base.tokenizer.save_pretrained(draft)
    stored = sum(path.stat().st_size for path in folder.iterdir())
    logger.info(f"model     no folder has its weights, so that they are kept in {folder}, {size(stored)}")
