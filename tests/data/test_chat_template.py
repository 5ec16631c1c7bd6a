"""Which chat template is in force: the tokenizer's, a built-in one, a file or a text; and what they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.data.encoder import BUILT_IN, Encoder, chat_template, use_chat_template
from ci_llm.errors import DataError, ModelError
from tests.data.test_encoder import CHATML, LONG, WORDS, byte_tokenizer, learned


def test_several_templates_need_a_default_or_a_choice() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"tool_use": CHATML}
    with pytest.raises(ModelError, match="no default") as caught:
        chat_template(tokenizer)
    assert caught.value.hint == "choose one by chat_template: tool_use"
    use_chat_template(tokenizer, "tool_use")
    assert chat_template(tokenizer) == CHATML
    tokenizer.chat_template = {"tool_use": CHATML, "default": WORDS}
    assert chat_template(tokenizer) == WORDS


def test_a_file_or_a_text_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(WORDS)
    for wanted in (str(file), WORDS):
        tokenizer = byte_tokenizer(CHATML)
        use_chat_template(tokenizer, None)
        assert chat_template(tokenizer) == CHATML
        use_chat_template(tokenizer, wanted)
        assert chat_template(tokenizer) == WORDS


@pytest.mark.parametrize("wanted", ["chatlm", "no/such/file.jinja", "a\0b", "/", "x" * 5000])
def test_a_value_that_is_not_a_template_is_refused(wanted: str) -> None:
    with pytest.raises(DataError, match="There is no such chat template") as caught:
        use_chat_template(byte_tokenizer(), wanted)
    assert caught.value.where == f"chat_template: {wanted}"
    assert "plain, roles, chatml" in str(caught.value.hint)


WHOLE = {
    "plain": "<s>q1\na1</s>q2\n a2é\n</s>",
    "roles": "<s>### User:\nq1\n\n### Assistant:\na1</s>\n### User:\nq2\n\n### Assistant:\n a2é\n</s>\n",
    "chatml": (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n a2é\n<|im_end|>\n"
    ),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_shows_turns_and_answers(name: str) -> None:
    tokenizer = byte_tokenizer()
    use_chat_template(tokenizer, name)
    encoder = Encoder(tokenizer)
    example = encoder.encode(LONG)
    end = "<|im_end|>" if name == "chatml" else "</s>"
    assert encoder.decode(example.input_ids) == WHOLE[name]
    assert learned(example, tokenizer) == [f"a1{end}", f" a2é\n{end}"]
    assert encoder.describe(LONG) == f"chat template: {name}, built in"
    turns = [message.as_turn() for message in LONG.messages[:-1]]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert WHOLE[name].startswith(prompt + " a2")
