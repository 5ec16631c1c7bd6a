"""A crowd that answers in words, made without training: the embedded base with agents that disturb it a little."""

from __future__ import annotations

from pathlib import Path

import torch

from ci_llm.base.load import load_base
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import META
from ci_llm.data.prompts import Prompter, PromptForm
from ci_llm.lora.layer import LoraSettings

K = 3


def disturbed_crowd(form: PromptForm = "chat") -> Crowd:
    """Each agent answers in its own way; some are right."""
    loaded = load_base("embedded")
    crowd = Crowd(loaded.model, LoraSettings(num_agents=K), loaded.name, loaded.tokenizer.pad_token_id)
    crowd.prompter = Prompter(loaded.tokenizer, form)
    with torch.no_grad():
        crowd.agents.weights.normal_(0, 0.06, generator=torch.Generator().manual_seed(3))
    return crowd.eval()


def save_crowd(crowd: Crowd, folder: Path, step: int = 7) -> Path:
    """Commit the crowd as a checkpoint, as a loop of one's own would."""
    fingerprint = load_base("embedded").fingerprint
    write_checkpoint(folder, {**crowd.adapter_files(), META: crowd.meta(fingerprint)}, step=step)
    return folder
