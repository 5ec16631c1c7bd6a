"""A base that a call in Python has loaded already: refused where it cannot be trained on, lent to a run, given back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ci_llm.base import load
from ci_llm.base.load import Base
from ci_llm.base.quantized import stored_quantization
from ci_llm.core.durable import new_folder, remove_tree
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
    if tokenizer is None:
        raise _refused("a model needs its tokenizer", "give both: train(model=model, tokenizer=tokenizer)")
    if model is None:
        raise _refused("tokenizer= goes with model=, a model that is loaded", "leave it out, or give model= as well")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _refused(f"tokenizer= is a {type(tokenizer).__name__}", "give what AutoTokenizer.from_pretrained returns")
    modules = [*model.modules()] if isinstance(model, torch.nn.Module) else []
    if any(hasattr(module, "lora_A") or hasattr(module, "peft_config") for module in modules):
        alone = "give the base alone: model.merge_and_unload() of PEFT, or crowd.detach() of a Crowd; init_from=FOLDER"
        raise _refused("there are adapters on this model already", f"{alone} starts agents from saved adapters")
    if not _is_causal(model):
        causal = "give what AutoModelForCausalLM.from_pretrained returns"
        raise _refused(f"a {type(model).__name__} is no causal language model of Transformers", causal)
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if torch.device("meta") in places:
        raise _refused("weights of this model are on the device meta: it has none yet", "load it without device_map")
    if stored_quantization(model.config) or len(places) > 1:
        how = "quantised" if stored_quantization(model.config) else f"spread over {len(places)} devices"
        keys = "quantization=nf4 or base_sharding=layers"
        raise _refused(f"this model is {how}", f"give its name or folder, model=NAME, and {keys} where you want it")
    load.require_tokenizer("model=", tokenizer)


def _is_causal(model: Any) -> bool:
    return type(model) is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(getattr(model, "config", None)), None)


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


@contextmanager
def lent(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Base]:
    """The base of a run, of a model that is afterwards as it was."""
    config, modules, device = model.config, dict(model.named_modules()), model.device
    attention, cache, training = config._attn_implementation, config.use_cache, model.training
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    head = model.get_output_embeddings()
    hooks = dict(head._forward_pre_hooks)
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # as `load_base`
    config.use_cache = False
    opened, prints = load.opened_by(name), (load.fingerprint_of(model), load.fingerprint_of(model, rounded=True))
    try:
        yield Base(model.eval(), copy.deepcopy(tokenizer), opened, *prints)
    finally:
        for path, module in modules.items():  # a run that failed may have left agents on it
            if path and model.get_submodule(path) is not module:
                model.set_submodule(path, module)
        head._forward_pre_hooks.clear()
        head._forward_pre_hooks.update(hooks)
        model.set_attn_implementation(attention)
        config.use_cache = cache
        for parameter in learned:
            parameter.requires_grad_()
        model.to(device).train(training)


def keep(base: Base, run_folder: Path) -> None:
    """Write the base into the folder of its run, if its name means that folder and it is not there."""
    folder = (run_folder / BASE_MODEL).absolute()
    if base.name != str(folder) or holds(str(folder), base.model):
        return
    if folder.exists():  # of a run that never came to a checkpoint
        remove_tree(folder)
    weights: Mapping[str, Tensor] = load.weights_of(base.model)
    with new_folder(folder) as draft:
        base.model.save_pretrained(draft, state_dict=dict(weights))
        base.tokenizer.save_pretrained(draft)
    size = sum(tensor.nbytes for tensor in base.model.parameters()) / 1e9
    logger.info(f"model     no folder has its weights, so that they are kept in {folder}, {size:.2f} GB")
