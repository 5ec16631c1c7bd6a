"""The model card of an exported folder, its README.md: scores, and the commands that open the folder elsewhere.

A card holds no path of this machine. The commands run in the card's folder, and a base without a public name is a shell
variable to be set.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ci_llm.base.load import short_name
from ci_llm.core.remote import may_be_on_hub

#: The values from 8 on that vLLM accepts for --max-lora-rank.
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)

#: The files of an adapter for llama.cpp and Ollama.
ADAPTER: Final = "adapter.gguf"
MODELFILE: Final = "Modelfile"
_GGUF: Final = "llama.cpp and Ollama take another file: `ci-llm export` with `--format gguf` writes it."


def public_name(name: str) -> str:
    """The public name of a base or a data set; for a local path its last part only."""
    short = short_name(name)
    return short if short == "embedded" or may_be_on_hub(short) else Path(short).name


@dataclass(frozen=True)
class CardFacts:
    """What every card says.

    Attributes:
        base: the name that `from_pretrained` opens here.
        ranks: the ranks of the agents, one per agent.
        trained: how they were trained: `for 260 optimizer steps on ...`; "" if it is not known.
        scores: a table for people; "" if nothing was scored.
        opened_with: the class of Transformers that opens the base.
        num_labels: how many numbers each agent's head computes; 0 if the agents have no heads.
        classes: the names of these numbers, if they are classes.
    """

    base: str
    ranks: Sequence[int]
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

    @property
    def open_base(self) -> str:
        """Lines of Python that make `base`."""
        if self.base_name == "embedded":
            return 'from ci_llm import load_base\n\nbase = load_base("embedded").model'
        place = "" if self.is_on_hub else "  # its folder on your machine"
        return (
            f"from transformers import {self.opened_with}\n\n"
            f"base = {self.opened_with}.from_pretrained({_quoted(self.base_name)}){place}"
        )


def crowd_card(facts: CardFacts) -> str:
    """The card of a folder with all agents, each a PEFT folder `agent<k>`."""
    count, trained = len(facts.ranks), f"trained together by CI-LLM{facts.trained}, on one frozen base"
    if facts.num_labels:
        about, call, kind = " with heads", 'score(["..."])', "for sequence classification, with its tokenizer"
        what = f"{count} LoRA adapters with a head each, {trained}: `{facts.base_name}`. They score texts; the crowd's"
        what += " score is the mean of theirs."
    else:
        about, call, kind = "", 'generate("...")', "with its tokenizer, whose chat template is that of the training"
        what = f"{count} LoRA adapters, {trained}: `{facts.base_name}`. They are meant to answer together: the crowd's"
        what += " distribution is the mean of theirs."
    return _joined(
        _front(facts, "peft", "lora", "ensemble"),
        f"# A crowd of {count} LoRA agents{about}",
        what,
        _scores(facts),
        "Run what follows in this folder. All together:",
        _block("python", f'from ci_llm import Crowd\n\nprint(Crowd.from_pretrained(".").{call})'),
        f"Each `agent<k>` is a plain PEFT adapter {kind}:",
        _peft(facts, "agent0"),
        *(() if facts.num_labels else _crowd_elsewhere(facts)),
        *facts.notes,
    )


def _crowd_elsewhere(facts: CardFacts) -> tuple[str, ...]:
    """How other programs take all agents."""
    count = len(facts.ranks)
    return (
        "vLLM serves all of them on one base, each under its own name:",
        _block(
            "bash",
            f"{facts.set_base}\nvllm serve $BASE --enable-lora --max-loras {count}"
            f" --max-lora-rank {allowed_rank(facts.ranks)} \\\n"
            f"  --lora-modules $(for k in {{0..{count - 1}}}; do echo agent$k=$PWD/agent$k; done)",
        ),
        _GGUF,
        "`ci-llm export --merge` makes one adapter of them. That is one more agent and not the crowd: no mean of"
        " weights gives the mean of distributions.",
    )


def adapter_card(facts: CardFacts, title: str, what: str) -> str:
    """The card of a folder that is one PEFT adapter.

    Args:
        title: the title of the card.
        what: a sentence on where the adapter comes from.
    """
    return _joined(
        _front(facts, "peft", "lora"),
        f"# {title}",
        f"{what} Its base is `{facts.base_name}`. The agents were trained by CI-LLM{facts.trained}.",
        _scores(facts),
        "Run what follows in this folder. Transformers and PEFT:",
        _peft(facts, "."),
        *(() if facts.num_labels else _served(facts)),
        *facts.notes,
    )


def _served(facts: CardFacts) -> tuple[str, ...]:
    """How vLLM and llama.cpp serve one adapter."""
    line = f"vllm serve $BASE --enable-lora --max-lora-rank {allowed_rank(facts.ranks)} --lora-modules adapter=$PWD"
    return "vLLM:", _block("bash", f"{facts.set_base}\n{line}"), _GGUF


def gguf_card(facts: CardFacts, title: str, what: str, base: str) -> str:
    """The card of a folder with an adapter for llama.cpp and Ollama.

    Args:
        base: the name of the GGUF file of the base.
    """
    made = "" if facts.base_name == Path(base).stem else _block("bash", f"{facts.set_base}\n{make_base(base)}")
    return _joined(
        _front(facts, "gguf", "lora"),
        f"# {title}",
        f"{what} Its base is `{facts.base_name}`. The agents were trained by CI-LLM{facts.trained}.",
        _scores(facts),
        f"`{ADAPTER}` is added to `{base}`, which llama.cpp makes of the base's folder:" if made else "",
        made,
        "llama.cpp, and Ollama with both files in this folder:",
        _block("bash", "\n".join(serving_lines(base, "."))),
        *facts.notes,
    )


def vllm_line(base: str, adapters: Mapping[str, Path], ranks: Sequence[int]) -> str:
    """The shell command by which vLLM serves adapters on one base, each under its name."""
    modules = " ".join(shlex.quote(f"{name}={path}") for name, path in adapters.items())
    options = f"--enable-lora --max-loras {len(adapters)} --max-lora-rank {allowed_rank(ranks)}"
    return f"vllm serve {shlex.quote(base)} {options} --lora-modules {modules}"


def allowed_rank(ranks: Sequence[int]) -> int:
    """The smallest --max-lora-rank of vLLM that serves all of these ranks."""
    return next((allowed for allowed in RANKS if allowed >= max(ranks)), max(ranks))


def make_base(base: str) -> str:
    """The line of shell that makes the GGUF file of the folder or hub id in `$BASE`."""
    return f"python llama.cpp/convert_hf_to_gguf.py $BASE --outfile {shlex.quote(base)}"


def serving_lines(base: str, folder: str) -> list[str]:
    """Lines of shell that answer with a GGUF adapter in a folder, its base being the file `base`."""
    adapter, recipe = (shlex.quote(str(Path(folder, name))) for name in (ADAPTER, MODELFILE))
    return [
        f"llama-cli -m {shlex.quote(base)} --lora {adapter}",
        f"ollama create crowd -f {recipe} && ollama run crowd",
    ]


def model_card(facts: CardFacts, title: str, what: str) -> str:
    """The card of a folder that is a whole model, with an adapter merged into its weights."""
    return _joined(
        _front(facts, "transformers"),
        f"# {title}",
        f"{what} It is merged into the weights of its base, `{facts.base_name}`."
        f" The agents were trained by CI-LLM{facts.trained}.",
        _scores(facts),
        "Run what follows in this folder. Transformers alone opens it:",
        _block(
            "python",
            f"from transformers import {facts.opened_with}, AutoTokenizer\n\n"
            f'model, tokenizer = (each.from_pretrained(".") for each in ({facts.opened_with}, AutoTokenizer))',
        ),
        "vLLM:",
        _block("bash", "vllm serve $PWD"),
        "llama.cpp, with its own converter:",
        _block("bash", "python llama.cpp/convert_hf_to_gguf.py . --outfile model.gguf"),
        *facts.notes,
    )


def _front(facts: CardFacts, library: str, *tags: str) -> str:
    """The front matter that the hub reads."""
    lines = [f"library_name: {library}", *([f"base_model: {facts.base_name}"] if facts.is_on_hub else [])]
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in (*tags, "ci-llm")), "---"])


def _scores(facts: CardFacts) -> str:
    return _block("", facts.scores) if facts.scores else ""


def _peft_of_head(facts: CardFacts, folder: str) -> str:
    """The Python lines that open an agent with a head.

    They set two things that a PEFT folder does not hold: the number of labels, and the pad token, by which Transformers
    pools.
    """
    named = f"  # {', '.join(facts.classes)}" if facts.classes else ""
    place = "" if facts.is_on_hub else "  # its folder on your machine"
    opened = f"\nbase = {_quoted(facts.base_name)}{place}\n"
    if facts.base_name == "embedded":
        opened = 'from ci_llm import load_base\n\nbase = load_base("embedded").name\n'
    return _block(
        "python",
        "from peft import PeftModel\nfrom transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"{opened}\nmodel = AutoModelForSequenceClassification.from_pretrained(base, num_labels={facts.num_labels})"
        f"{named}\nagent = PeftModel.from_pretrained(model, {_quoted(folder)})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({_quoted(folder)})\n"
        "if model.config.pad_token_id is None:\n    model.config.pad_token_id = tokenizer.pad_token_id",
    )


def _peft(facts: CardFacts, folder: str) -> str:
    if facts.num_labels:
        return _peft_of_head(facts, folder)
    return _block(
        "python",
        f"from peft import PeftModel\nfrom transformers import AutoTokenizer\n{facts.open_base}\n"
        f"agent = PeftModel.from_pretrained(base, {_quoted(folder)})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({_quoted(folder)})",
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
