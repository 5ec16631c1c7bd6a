"""The model card of an exported folder, its README.md: scores, and the commands that open the folder elsewhere.

A card holds no path of this machine. The commands run in the card's folder, and a base without a public name is a shell
variable to be set.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from ci_llm.base.load import short_name
from ci_llm.core.remote import may_be_on_hub

#: The values from 8 on that vLLM accepts for --max-lora-rank.
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)

#: The files of an adapter for llama.cpp and Ollama.
ADAPTER: Final = "adapter.gguf"
MODELFILE: Final = "Modelfile"
Kind = Literal["adapter", "gguf", "model"]


def public_name(name: str) -> str:
    """The public name of a base or a data set; for a local path or an address its last part only."""
    short = short_name(name)
    if short == "embedded" or may_be_on_hub(short):
        return short
    address = urlsplit(short) if "://" in short else None  # it may hold a password, or a token behind its path
    return Path(address.path).name or address.scheme if address else Path(short).name


@dataclass(frozen=True)
class CardFacts:
    """The facts that every card states.

    Attributes:
        base: the name that `from_pretrained` opens here.
        ranks: the ranks of the agents, one per agent.
        agents: the names of their folders, where the card is of all agents.
        trained: how they were trained: `for 260 optimizer steps on ...`; "" if it is not known.
        scores: a table for people; "" if nothing was scored.
        opened_with: the class of Transformers that opens the base.
        num_labels: how many numbers each agent's head computes; 0 if the agents have no heads.
        classes: the names of these numbers, if they are classes.
    """

    base: str
    ranks: Sequence[int]
    agents: Sequence[str] = ()
    trained: str = ""
    scores: str = ""
    notes: Sequence[str] = field(default=())
    opened_with: str = "AutoModelForCausalLM"
    num_labels: int = 0
    classes: Sequence[str] = ()

    @property
    def base_name(self) -> str:
        return public_name(self.base)

    @property
    def is_on_hub(self) -> bool:
        return may_be_on_hub(short_name(self.base))

    @property
    def set_base(self) -> str:
        """A line of shell that puts the base into `$BASE`."""
        if self.base_name == "embedded":
            return """BASE=$(python -c 'from ci_llm import load_base; print(load_base("embedded").name)')"""
        return f"BASE={shlex.quote(self.base_name)}" + ("" if self.is_on_hub else "   # its folder on your machine")


def crowd_card(facts: CardFacts) -> str:
    """The card of a folder with all agents, each a PEFT folder `agent<k>`."""
    heads = " with heads" if facts.num_labels else ""
    return _rendered("crowd", facts, f"A crowd of {len(facts.ranks)} LoRA agents{heads}")


def adapter_card(facts: CardFacts, title: str, what: str, kind: Kind = "adapter", gguf_base: str = "") -> str:
    """The card of a folder with one adapter.

    Args:
        title: the title of the card.
        what: a sentence on where the adapter comes from.
        kind: a PEFT folder, an adapter for llama.cpp and Ollama, or a model that has it in its weights.
        gguf_base: the name of the GGUF file of the base.
    """
    names = {"base": gguf_base, "base_stem": Path(gguf_base).stem} if kind == "gguf" else {}
    return _rendered(kind, facts, title, what=what, **names)


def _rendered(kind: str, facts: CardFacts, title: str, **more: str) -> str:
    loader = PackageLoader("ci_llm.crowd", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"allowed_rank": allowed_rank, "shell": shlex.quote}
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    card = environment.get_template("card.md.j2").render(kind=kind, facts=facts, title=title, **more)
    return card.rstrip() + "\n"


def allowed_rank(ranks: Sequence[int]) -> int:
    """The smallest --max-lora-rank of vLLM that serves all of these ranks."""
    return next((allowed for allowed in RANKS if allowed >= max(ranks)), max(ranks))
