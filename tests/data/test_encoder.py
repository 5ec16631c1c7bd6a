"""Which tokens of a row are learned: answers and their ends, under any chat template, or a reason why not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ci_llm.data.encoder import Encoder, Example, RefusedRowError, chat_template
from ci_llm.data.rows import Chat, Completion, Labelled, Message, Pair, Rated, Tokens
from ci_llm.data.tokens import tokenizer_fingerprint
from ci_llm.errors import ModelError

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
CHATML_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}"
) + f"{TURN}{{% endif %}}{{% endfor %}}{PROMPT}"
#: As Qwen3: an answer after the last question shows its (empty) thoughts, earlier ones do not.
THOUGHTS_AT_THE_END = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)
#: As Llama 2: no header before an answer, EOS after it.
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
#: Plain words for the speakers and nothing at the end of a turn.
WORDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of the templates here."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        **({"bos_token": "<s>", "eos_token": "</s>"} | special),
    )
    tokenizer.chat_template = template
    return tokenizer


def learned(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The runs of learned tokens, as text."""
    runs = groupby(zip(example.supervised, example.input_ids, strict=True), key=lambda pair: bool(pair[0]))
    return [tokenizer.decode([token for _, token in run]) for is_learned, run in runs if is_learned]


def talk(*turns: str, trained_from: int = 0) -> Chat:
    """A chat of these turns, of user and assistant in alternation."""
    roles = ["user", "assistant"] * len(turns)
    return Chat(tuple(map(Message, roles, turns)), trained_from)


LONG = talk("q1", "a1", "q2", " a2é\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ["a1</s>", " a2é\n</s>"]),
        (CHATML, ["a1<|im_end|>", " a2é\n<|im_end|>"]),
        (CHATML_MARKED, ["a1<|im_end|>", " a2é\n<|im_end|>"]),
        (THOUGHTS_AT_THE_END, ["a1<|im_end|>", "<think>\n\n</think>\n\n a2é\n<|im_end|>"]),
        (INSTRUCTIONS, [" a1 </s>", " a2é </s>"]),
        (WORDS, [" a1", "  a2é\n"]),
    ],
    ids=["built in", "chatml", "marked", "thoughts", "instructions", "words"],
)
def test_every_answer_and_its_end_is_learned(template: str | None, expected: list[str]) -> None:
    tokenizer = byte_tokenizer(template)
    example = Encoder(tokenizer).encode(LONG)
    assert learned(example, tokenizer) == expected
    turns = [{"role": message.role, "content": message.content} for message in LONG.messages]
    whole = tokenizer.apply_chat_template(turns, chat_template=chat_template(tokenizer), tokenize=False)
    assert tokenizer.decode(example.input_ids) == whole


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("template", [CHATML, WORDS])
def test_the_answers_of_any_chat_are_found(template: str) -> None:
    """Turns may begin or end alike, be empty, or hold a character of several tokens."""
    tokenizer, chance = byte_tokenizer(template), random.Random(0)
    encoder = Encoder(tokenizer)
    for _ in range(50):
        turns = ["".join(chance.choices("aaab\n é🙂", k=chance.randrange(9))) for _ in range(chance.randrange(2, 20))]
        begin, end = ("", "<|im_end|>") if template == CHATML else (" ", "")
        answers = [f"{begin}{turn}{end}" for turn in turns[1::2]]
        found = learned(encoder.encode(talk(*turns)), tokenizer)
        if not end:  # blanks alone have no end
            answers, found = ([text for text in texts if text.strip()] for texts in (answers, found))
        assert found == answers


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, None])
def test_tokens_of_the_prompt_are_not_learned(template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    end = "<|im_end|>" if template else "</s>"
    example = Encoder(tokenizer).encode(talk("q1", "a1", "q2", "a2", trained_from=2))
    assert learned(example, tokenizer) == ["a2" + end]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, None])
def test_a_marked_answer_is_not_learned(template: str | None) -> None:
    tokenizer = byte_tokenizer(template)
    end = "<|im_end|>" if template else "</s>"
    chat = talk("q1", "a1", "q2", "a2")
    chat = replace(chat, messages=(chat.messages[0], replace(chat.messages[1], learned=False), *chat.messages[2:]))
    assert learned(Encoder(tokenizer).encode(chat), tokenizer) == ["a2" + end]
    everything = Encoder(tokenizer, train_on_prompt=True).encode(chat)
    assert [tokenizer.decode(everything.input_ids[~everything.supervised][1:])] == ["a1" + end]
    assert not everything.supervised[0]


def test_thoughts_that_the_template_shows_until_the_answer_follows() -> None:
    """Templates such as that of gpt-oss show the thoughts before a tool call until the final answer exists."""
    thoughts = "{% if m.thinking and loop.last or m.thinking and not messages[-1].role == 'assistant' %}"
    shown = TURN.replace(
        "{{ m.content }}", f"{thoughts}<think>{{{{ m.thinking }}}}</think>{{% endif %}}{{{{ m.content }}}}"
    )
    tokenizer = byte_tokenizer(f"{{% for m in messages %}}{shown}{{% endfor %}}{PROMPT}")
    first, last = (Message("assistant", text, more={"thinking": f"of {text}"}) for text in ("call", "answer"))
    chat = Chat((Message("user", "q"), first, Message("tool", "2"), last))
    example = Encoder(tokenizer).encode(chat)
    assert learned(example, tokenizer) == ["call<|im_end|>", "<think>of answer</think>answer<|im_end|>"]


def test_thoughts_of_the_answer_itself_are_learned() -> None:
    """R1-like: the prompt opens the thoughts, the answer continues them."""
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    tokenizer = byte_tokenizer(CHATML.replace(PROMPT, prompt))
    example = Encoder(tokenizer).encode(talk("q", "<think>\nhm</think>a"))
    assert learned(example, tokenizer) == ["hm</think>a<|im_end|>"]
    without = Encoder(tokenizer).encode(talk("q", "a"))
    assert (learned(without, tokenizer), without.remarks) == (["a<|im_end|>"], ("without thoughts",))


def test_a_prompt_that_the_chat_does_not_begin_with_is_refused() -> None:
    other = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ ' (last)' if loop.last and m.role == 'user' }}")
    with pytest.raises(RefusedRowError, match="not what precedes the answer"):
        Encoder(byte_tokenizer(other)).encode(talk("q", "a"))


@pytest.mark.parametrize("last", ["m.content | trim", "m.content | replace('/x', '')", "m.content.split('/x')[0]"])
def test_a_chat_is_proved_for_what_the_template_looks_for_in_its_words(last: str) -> None:
    other = CHATML.replace(
        "{{ m.content }}", "{% if loop.last %}{{ " + last + " }}{% else %}{{ m.content }}{% endif %}"
    )
    encoder = Encoder(byte_tokenizer(other))
    assert encoder.encode(talk("q", "a")).supervised.any()
    with pytest.raises(RefusedRowError, match="not what precedes the answer"):
        encoder.encode(talk("q " if "trim" in last else "q/x", "a"))


def test_an_answer_may_come_first_or_repeat_the_question() -> None:
    tokenizer = byte_tokenizer(CHATML)
    first = Chat((Message("assistant", "hi"), Message("user", "hi"), Message("assistant", "hi")))
    assert learned(Encoder(tokenizer).encode(first), tokenizer) == ["hi<|im_end|>", "hi<|im_end|>"]


def test_a_template_that_fails_gives_its_reason() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML
    chat = Chat((Message("system", "s"), Message("user", "q"), Message("assistant", "a")))
    with pytest.raises(RefusedRowError, match="it fails: no system turn"):
        Encoder(byte_tokenizer(strict)).encode(chat)
    with pytest.raises(RefusedRowError, match="it fails: "):
        Encoder(byte_tokenizer("{% for m in messages %}")).encode(LONG)
    with pytest.raises(RefusedRowError, match="it fails: can only concatenate str"):
        Encoder(byte_tokenizer("{{ messages[0].content + 1 }}")).encode(LONG)


def test_a_template_that_hides_answers_is_refused() -> None:
    questions = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(RefusedRowError, match="leaves out what the assistant says"):
        Encoder(byte_tokenizer(questions)).encode(talk("q", "a"))


@pytest.mark.parametrize(
    ("row", "text", "expected"),
    [
        (Completion("2+2=", "4"), "<s>2+2=4</s>", ["4</s>"]),
        (Completion("<s>2+2=", "4</s>"), "<s>2+2=4</s>", ["4</s>"]),
        (Completion("", "4"), "<s>4</s>", ["4</s>"]),
        (Completion(None, "once"), "<s>once</s>", ["once</s>"]),
        (Completion(None, "<s>once"), "<s>once</s>", ["once</s>"]),
    ],
)
def test_text_that_no_template_touches(row: Completion, text: str, expected: list[str]) -> None:
    tokenizer = byte_tokenizer(CHATML)
    example = Encoder(tokenizer).encode(row)
    assert tokenizer.decode(example.input_ids) == text
    assert learned(example, tokenizer) == expected


def test_without_bos_the_first_token_is_not_learned() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    example = Encoder(tokenizer).encode(Completion(None, "once"))
    assert learned(example, tokenizer) == ["nce</s>"]
    assert learned(Encoder(tokenizer).encode(talk("q", "a")), tokenizer) == ["a</s>"]


def with_tools(template: str) -> str:
    call = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    return template.replace("{{ m.content }}", "{{ m.content }}" + call)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING = Chat(
    (
        Message("user", "1+?"),
        Message("assistant", "", (CALL,)),
        Message("tool", "2", more={"name": "add"}),
        Message("assistant", "two"),
    )
)


def test_calls_of_tools_are_learned_where_the_template_shows_them() -> None:
    tokenizer = byte_tokenizer(with_tools(CHATML))
    called = '<call>{"name": "add", "arguments": {"a": 1}}</call><|im_end|>'
    assert learned(Encoder(tokenizer).encode(CALLING), tokenizer) == [called, "two<|im_end|>"]
    marked = byte_tokenizer(with_tools(CHATML_MARKED))
    assert learned(Encoder(marked).encode(CALLING), marked) == [called, "two<|im_end|>"]


def test_prompts_are_learned_on_request() -> None:
    tokenizer = byte_tokenizer(CHATML)
    encoder = Encoder(tokenizer, train_on_prompt=True)
    for row in (talk("q", "a"), Completion("q", "a")):
        example = encoder.encode(row)
        assert example.supervised.tolist() == [False] + [True] * (len(example.input_ids) - 1)
        assert encoder.unlearned_end(row, example) is None
    assert not encoder.encode(Tokens((1, 2), (-100, -100))).supervised.any()


def test_tokens_are_learned_as_their_labels_say() -> None:
    encoder = Encoder(byte_tokenizer())
    assert encoder.encode(Tokens((5, 6, 7))).supervised.tolist() == [False, True, True]
    assert encoder.encode(Tokens((5, 6, 7), (-100, -100, 7))).supervised.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("template", "follows"),
    [
        (CHATML, None),
        (CHATML_MARKED, None),
        (None, None),
        (CHATML.replace("im_end", "end"), "<|end|>\n"),
        (CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"), None),
        (WORDS, "\n"),
        (WORDS.replace("}\n{%", "}{%"), ""),
    ],
)
def test_an_end_of_turn_that_is_not_learned_is_noticed(template: str | None, follows: str | None) -> None:
    encoder = Encoder(byte_tokenizer(template))
    row = talk("q", "a")
    assert encoder.unlearned_end(row, encoder.encode(row)) == follows


def test_turns_without_speakers_are_noticed() -> None:
    assert Encoder(byte_tokenizer()).lacks_roles(LONG)
    assert not Encoder(byte_tokenizer()).lacks_roles(talk("q", "a"))
    assert not Encoder(byte_tokenizer()).lacks_roles(Completion("q", "a"))
    assert not Encoder(byte_tokenizer(CHATML)).lacks_roles(LONG)


def test_the_template_in_force_is_described() -> None:
    assert Encoder(byte_tokenizer()).describe(LONG) == "chat template: built in, as the tokenizer has none"
    assert Encoder(byte_tokenizer(CHATML)).describe(LONG) == "chat template: the tokenizer's, or that of chat_template"
    text, chat = Completion(None, "x"), talk("q", "a")
    for row in (text, Pair(text, text), Rated(text, good=True), Labelled(text, "x")):
        assert Encoder(byte_tokenizer(CHATML)).describe(row).startswith("no chat template")
    assert Encoder(byte_tokenizer()).describe(Pair(chat, chat)).startswith("chat template: built in")


def test_the_fingerprint_knows_the_tokenizer_and_not_how_it_was_last_called() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bb"], truncation=True, max_length=1)
    assert tokenizer_fingerprint(tokenizer) == before
    assert tokenizer_fingerprint(byte_tokenizer()) == before
    assert tokenizer_fingerprint(byte_tokenizer(eos_token="<|im_end|>")) != before


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=byte_tokenizer().backend_tokenizer)
    with pytest.raises(ModelError, match="which characters a token stands for"):
        Encoder(slow)
