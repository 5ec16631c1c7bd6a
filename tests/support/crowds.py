"""A crowd that answers in words, made without training: the embedded base with agents that disturb it a little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from ci_llm.base.load import load_base
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import META
from ci_llm.data.prompts import Prompter, PromptForm
from ci_llm.lora.settings import LoraSettings

K = 3


def _rows_are_alike() -> bool:
    for inner in (64, 128, 352):  # the widths of the toys and of the embedded base
        x, weight = (torch.arange(float(inner * rows)).sin().view(rows, inner) for rows in (32, 128))
        whole = torch.nn.functional.linear(x, weight)
        if not all(torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n]) for n in range(4, 32)):
            return False
    return True


#: Bits in any company, and in batches of any size, are promised where a row of a product does not depend on how many
#: more there are.
bits_in_company = pytest.mark.skipif(
    not _rows_are_alike(), reason="the bits of this CPU's products depend on the number of rows; one with AVX2"
)


def disturbed_crowd(form: PromptForm = "chat") -> Crowd:
    """Each agent answers in its own way; some are right."""
    loaded = load_base("embedded")
    crowd = Crowd(loaded.model, LoraSettings(num_agents=K), loaded.name, loaded.tokenizer.pad_token_id)
    crowd.prompter = Prompter(loaded.tokenizer, form)
    with torch.no_grad():
        crowd.storage.weights.normal_(0, 0.06, generator=torch.Generator().manual_seed(3))
    return crowd.eval()


def save_crowd(crowd: Crowd, folder: Path, step: int = 7) -> Path:
    """Commit the crowd as a checkpoint, as a loop of one's own would."""
    fingerprint = load_base("embedded").fingerprint
    write_checkpoint(folder, {**crowd.adapter_files(), META: crowd.meta(fingerprint)}, step=step)
    return folder


@torch.no_grad()
def full_passes(
    crowd: Crowd, agents: Iterable[int | None], prompt: Sequence[int], count: int
) -> tuple[list[int], list[float]]:
    """What these agents write together, and its log-probabilities: each token by a pass of each over the whole text."""
    ids, nats, everybody = list(prompt), list[float](), [*agents]
    for _ in range(count):
        each = []
        for k in everybody:
            with crowd.base_model.active_agent(k) as model:
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            each.append(logits.float().log_softmax(-1))
        found = aggregate(torch.stack(each), "probability")
        ids.append(int(found.argmax()))
        nats.append(float(found.max()))
    return ids[len(prompt) :], nats
