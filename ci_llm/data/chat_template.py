"""Which chat template is in force: the tokenizer's own, a built-in one, a file or a text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from ci_llm.errors import DataError, ModelError

#: For a tokenizer without a chat template: BOS if it has one, what the user says and a line break, what the
#: assistant says and EOS. It is saved with the adapters.
BUILT_IN_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)

#: A header says who speaks, so that the turns of a long chat can be told apart; needs no special token but EOS.
_ROLES: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '### ' ~ message['role'] | capitalize ~ ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] ~ '\\n\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}"
)
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] ~ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] ~ '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

#: The built-in templates by the name that `chat_template` takes.
BUILT_IN: Final[Mapping[str, str]] = {"plain": BUILT_IN_TEMPLATE, "roles": _ROLES, "chatml": _CHATML}


#: The line about a template that is none of these. It is kept with the tokens, which do not know where it is from.
OWN_TEMPLATE: Final = "chat template: the tokenizer's own"


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template in force: the tokenizer's own, else the built-in one.

    Raises:
        ModelError: it has several, and none of them is the default.
    """
    if not tokenizer.chat_template:
        return BUILT_IN_TEMPLATE
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ModelError(
            "The tokenizer has several chat templates and no default.",
            where=tokenizer.name_or_path,
            hint=f"choose one by chat_template: {', '.join(tokenizer.chat_template)}",
        ) from error


def use_chat_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> None:
    """Give the tokenizer the template that `wanted` names, for training, generation and its saved files.

    Args:
        wanted: one of the tokenizer's own by name, a built-in one by name, a file, or the template itself;
            None: what the tokenizer has.

    Raises:
        DataError: it is none of these, or the file cannot be read.
    """
    if wanted is None:
        return
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    tokenizer.chat_template = {**BUILT_IN, **own}.get(wanted) or _written(wanted)


def naming_template(line: str, wanted: str | None) -> str:
    """A line about rows; if it says that the template is the tokenizer's own, and it is another, it says which.

    Args:
        wanted: what `use_chat_template` was given.
    """
    if line != OWN_TEMPLATE or wanted is None:
        return line
    return "chat template: the text that the configuration gives" if _is_text(wanted) else f"chat template: {wanted}"


def _is_text(wanted: str) -> bool:
    return "{{" in wanted or "{%" in wanted


def _written(wanted: str) -> str:
    """The template in a file, or the text of one."""
    if _is_text(wanted):
        return wanted
    try:
        return Path(os.path.expanduser(wanted)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            "There is no such chat template: neither a name, nor a readable file, nor a text with {{ }} or {% %}.",
            where=f"chat_template: {wanted}",
            hint=f"give one of {', '.join(BUILT_IN)}, a file such as chat_template.jinja, or the template itself",
        ) from error
