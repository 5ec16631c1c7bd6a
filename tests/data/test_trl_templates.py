"""Every chat template that TRL ships: what is learned is what its training version masks, but the two ends of turns."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from transformers import PreTrainedTokenizerFast

from ci_llm.base.load import load_base
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import pack
from ci_llm.data.cells import messages_of
from ci_llm.data.encoder import Encoder, Example, RefusedRowError
from ci_llm.data.prompts import Prompter, last_answer
from ci_llm.data.rendering import ChatTemplate
from ci_llm.data.rows import Chat, PromptForm
from ci_llm.lora.settings import LoraSettings
from tests.data.test_encoder import byte_tokenizer, learned
from tests.support.campaign import sampled

TEMPLATES = {file.stem: file.read_text() for file in sorted(Path(trl.__file__).parent.glob("chat_templates/*.jinja"))}
PAIRS = [name for name in TEMPLATES if f"{name}_training" in TEMPLATES]
DOCS = Path(__file__).parents[2] / "docs" / "own_data.md"

#: Tokens that the tokenizers of these templates have, and that end turns or texts.
SPECIAL = re.compile(r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜]+｜>|</?s>|<\w+_of_\w+>|<eos>|\[gMASK\]|<sop>")

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "unit": "kg"}}}
OTHER = {"type": "function", "function": {"name": "mul", "arguments": {"b": 2.5}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds weights.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "first"}}},
    },
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "content": content}


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


SYSTEM = {"role": "system", "content": "Be short."}
#: The thoughts of an earlier turn, and of the last one.
EARLIER, LATER = "Hm, well.", "Ah, so."
SHAPES: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("What is it?"), says("A cat.")],
    "turns": [user("q1"), says("one"), user("q2"), says("two"), user("q3"), says("one")],
    "system": [SYSTEM, user("q1"), says("one")],
    "system, turns": [SYSTEM, user("q1"), says("one"), user("q2"), says("two")],
    "tool": [user("q1"), says("", tool_calls=[CALL]), result("42 kg"), says("It is so.")],
    "tool, turns": [
        *(SYSTEM, user("q1"), says("Let me see.", tool_calls=[CALL]), result("42 kg"), says("It is so."), user("q2")),
        *(says("", tool_calls=[CALL]), result("43 kg"), says("Now other.")),
    ],
    "tools": [user("q1"), says("", tool_calls=[CALL, OTHER]), result("42 kg"), result("7 kg"), says("Both.")],
    "thoughts": [user("q1"), says("one", reasoning_content=LATER)],
    "thoughts, turns": [
        *(user("q1"), says("one", reasoning_content=EARLIER), user("q2"), says("two", reasoning_content=LATER)),
    ],
    "thoughts in content": [user("q1"), says(f"<think>\n{EARLIER}\n</think>\n\none")],
    "empty": [user("q1"), says("")],
    "parts": [user(part("q1")), says(part("one")), user(part("q2")), says(part("two"))],
    "thoughts, tool": [
        *(user("q1"), says("", tool_calls=[CALL], reasoning_content=EARLIER), result("42 kg")),
        says("It is so.", reasoning_content=LATER),
    ],
}
WITH_TOOLS = {name for name, turns in SHAPES.items() if any("tool_calls" in turn for turn in turns)}

ALTERNATE = "it fails: Conversation roles must alternate"
NO_CALLS = "it leaves out the calls of tools"
#: What a template cannot show: the shapes, and the reason that is given.
CANNOT: dict[str, dict[str, set[str]]] = {
    "cohere": {ALTERNATE: WITH_TOOLS},
    "cohere2": {ALTERNATE: WITH_TOOLS},
    "deepseek_r1_distill": {NO_CALLS: WITH_TOOLS},
    "gemma": {
        "it fails: System role not supported": {"system", "system, turns", "tool, turns"},
        ALTERNATE: WITH_TOOLS - {"tool, turns"},
    },
    "gemma3": {ALTERNATE: WITH_TOOLS},
    "gptoss": {"it leaves out all but one call": {"tools"}},
    "idefics3": {NO_CALLS: WITH_TOOLS},
    "lfm2": {NO_CALLS: WITH_TOOLS},
    "llama3": {NO_CALLS: WITH_TOOLS},
    "llama3_1": {"it fails: This model only supports single tool-calls at once!": {"tools"}},
    "llama3_2": {"it fails: This model only supports single tool-calls at once!": {"tools"}},
    "llava_next": {"it fails: Only user and assistant roles are supported!": WITH_TOOLS},
    "phi3": {NO_CALLS: WITH_TOOLS},
    "phi3_5": {NO_CALLS: WITH_TOOLS},
    "qwen2_5_vl": {NO_CALLS: WITH_TOOLS},
    "smolvlm": {NO_CALLS: WITH_TOOLS},
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    template = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    tokens = sorted({*SPECIAL.findall(template + TEMPLATES.get(f"{name}_training", ""))})
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(tokenizer_of(name), chat_date="2026-01-02")


def chat(shape: str) -> Chat:
    return Chat(messages_of(SHAPES[shape]), 0, (TOOL,) if shape in WITH_TOOLS else ())


def shown(name: str) -> list[str]:
    """The shapes that a template shows."""
    hidden = CANNOT.get(name.removesuffix("_training"), {}).values()
    return [shape for shape in SHAPES if not any(shape in shapes for shapes in hidden)]


def turns_for(name: str, shape: str) -> list[dict[str, Any]]:
    """The messages as a user of TRL gives them to this template: parts where it wants parts."""
    turns = [message.as_turn() for message in chat(shape).messages]
    wants_parts = name in ("idefics3", "smolvlm", "llava_next") or name.startswith(
        ("idefics3_", "smolvlm_", "llava_next_")
    )
    return [turn | ({"content": part(turn["content"])} if wants_parts else {}) for turn in turns]


def masked_by_trl(name: str, shape: str) -> list[str]:
    tokenizer = tokenizer_of(name)
    found = tokenizer.apply_chat_template(
        turns_for(name, shape),
        tools=list(chat(shape).tools) or None,
        chat_template=TEMPLATES[f"{name}_training"],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    runs = [[0, 0]]
    for at, is_learned in enumerate(found["assistant_masks"]):
        if is_learned:
            runs = [*runs[:-1], [runs[-1][0], at + 1]] if runs[-1][1] == at else [*runs, [at, at + 1]]
    return [tokenizer.decode(found["input_ids"][begin:end]) for begin, end in runs if end > begin]


def asked_by(name: str) -> list[str]:
    """The tags, words and blanks that the template adds for generation, after a question and after a tool."""
    added = []
    in_text = name.startswith("deepseek")  # it takes the arguments of calls as text
    for shape in ("one turn", *({"tool"} & {*shown(name)} if not in_text else ())):
        turns = turns_for(name, shape)[:-1]
        plain, asking = (
            tokenizer_of(name).apply_chat_template(turns, tokenize=False, add_generation_prompt=asks)
            for asks in (False, True)
        )
        added += re.findall(r"<[^<>]*>|\s|[^<\s]+", asking[common(plain, asking) :])
    return [*added, "<think>", "</think>", "<｜tool▁outputs▁end｜>"]


def common(one: str, other: str) -> int:
    """Characters that both begin with."""
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def between(name: str, run: str) -> str:
    """A run without its ends: what generation finds there already, an empty thought, and the end of the turn."""
    asked = "|".join(map(re.escape, asked_by(name)))
    run = re.sub(r"<think>\s*</think>", "", run)
    return re.sub(rf"(?:\s|{SPECIAL.pattern})*\Z", "", re.sub(rf"\A(?:\s|{asked})*", "", run))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", PAIRS)
def test_what_is_learned_is_what_trl_masks_but_its_two_ends(name: str) -> None:
    for shape in shown(name):
        encoder, tokenizer = encoder_of(name), tokenizer_of(name)
        runs = learned(encoder.encode(chat(shape)), tokenizer)
        theirs = masked_by_trl(name, shape)
        if EARLIER not in encoder.turns.text(chat(shape)):  # the template drops them, and the other version may not
            theirs = [re.sub(rf"<think>\s*{EARLIER}\s*</think>\s*", "", run) for run in theirs]
        assert [between(name, run) for run in runs] == [between(name, run) for run in theirs], shape
        ends = [SPECIAL.findall(run)[-1:] for run in runs]
        assert all(run.endswith(end[0]) for run, end in zip(runs, ends, strict=True) if end), shape
        assert ends[-1], f"{shape}: the end of the last turn"
        for words in ("kg</", "42 kg", "q1", "q2", "Be short", "Adds weights"):
            assert not any(words in run for run in runs if "unit" not in run), f"{shape}: {words}"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_reads_as_transformers_writes_it(name: str) -> None:
    """But for an end that is left open, which is added: and the date is that of the run."""
    today = Encoder(tokenizer_of(name))
    for shape in shown(name):
        tools = list(chat(shape).tools) or None
        try:
            whole = tokenizer_of(name).apply_chat_template(turns_for(name, shape), tools=tools, tokenize=False)
        except TypeError:  # DeepSeek-V3 takes the arguments of calls as text
            assert name.startswith("deepseekv3")
            continue
        assert today.turns.text(chat(shape)) == whole, shape
    if today.has_clock:
        assert re.search("2026-01-02|02 Jan 2026", encoder_of(name).turns.text(chat("one turn")))


def form_of(example: Example) -> PromptForm:
    """How prompts are worded for an agent that learned such chats."""
    if "without thoughts" in example.remarks:
        return "chat without thoughts"
    return "chat with thoughts" if "with thoughts" in example.remarks else "chat"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_of_generation_is_what_training_saw_before_the_last_answer(name: str) -> None:
    tokenizer, encoder, prompters = tokenizer_of(name), Encoder(tokenizer_of(name)), {}
    for shape in shown(name):
        row = chat(shape)
        example = encoder.encode(row)
        form = form_of(example)
        turns = [message.as_turn() for message in row.messages[:-1]]
        seen = example.input_ids[: last_answer(example).start].tolist()
        prompter = prompters.setdefault(form, Prompter(tokenizer, form))
        assert prompter.ids({"messages": turns, "tools": [*row.tools]} if row.tools else turns) == seen, shape
        # DeepSeek's takes calls as text, and gpt-oss's drops the thoughts before a call once the answer stands.
        if form == "chat" and not name.startswith("deepseek") and (name[:6], shape) != ("gptoss", "thoughts, tool"):
            asked = tokenizer.apply_chat_template(
                turns_for(name, shape)[:-1],
                tools=[*row.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert tokenizer.decode(seen).startswith(asked), shape


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_stops_at_the_end_of_turn_that_is_learned(name: str) -> None:
    ends = Prompter(tokenizer_of(name)).ends
    for shape in shown(name):
        ids = encoder_of(name).encode(chat(shape))
        end = int(ids.input_ids[last_answer(ids).stop - 1])
        assert end in ends or end not in tokenizer_of(name).all_special_ids, (shape, tokenizer_of(name).decode(end))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", CANNOT)
def test_a_template_that_cannot_show_a_chat_says_why(name: str) -> None:
    for reason, shapes in CANNOT[name].items():
        for shape in shapes:
            with pytest.raises(RefusedRowError) as caught:
                encoder_of(name).encode(chat(shape))
            assert str(caught.value).startswith(reason), shape


def counted(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often chats of more than a few messages are rendered, and texts are tokenised."""
    counts, render, ids = {"renderings": 0, "texts": 0}, ChatTemplate.render, encoder._ids

    def rendering(template: ChatTemplate, view: Any, **options: Any) -> Any:
        counts["renderings"] += len(view["messages"]) > 10
        return render(template, view, **options)

    def tokenising(text: str) -> Any:
        counts["texts"] += 1
        return ids(text)

    monkeypatch.setattr(ChatTemplate, "render", rendering)
    monkeypatch.setattr(encoder, "_ids", tokenising)
    return counts


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma4_v5", "muse_glimmer"])
def test_a_long_chat_with_tools_is_rendered_four_times_at_most(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(tokenizer_of(name))
    turns = [turn for _ in range(25) for turn in SHAPES["tool"]]
    counts = counted(encoder, monkeypatch)
    example = encoder.encode(Chat(messages_of(turns), 0, (TOOL,)))
    assert counts["renderings"] <= 4
    assert counts["texts"] == 1
    text = "".join(learned(example, tokenizer_of(name)))
    assert (text.count("It is so."), text.count("42 kg")) == (25, 0)


def test_no_token_goes_across_the_end_of_the_prompt() -> None:
    """A real tokenizer has tokens of several line breaks, and a prompt may end with one of them."""
    tokenizer = byte_tokenizer(TEMPLATES["qwen3_5_think"])
    tokenizer.add_tokens(["\n\n"])
    encoder = Encoder(tokenizer)
    for shape, form in (("one turn", "chat"), ("thoughts", "chat")):
        example = encoder.encode(chat(shape))
        prompt = Prompter(tokenizer, form).ids([message.as_turn() for message in chat(shape).messages[:-1]])  # type: ignore[arg-type]
        assert example.input_ids[: len(prompt)].tolist() == prompt
        assert example.supervised.argmax() == len(prompt)


def test_marked_answers_are_context_under_every_kind_of_template() -> None:
    for name in ("qwen3", "gemma3", "lfm2_2_5", "qwen3_training"):
        row = chat("turns")
        first = replace(row.messages[1], learned=False)
        row = replace(row, messages=(row.messages[0], first, *row.messages[2:]))
        runs = learned(encoder_of(name).encode(row), tokenizer_of(name))
        assert [re.sub("<think>\\s*</think>\\s*|" + SPECIAL.pattern, "", run).strip() for run in runs] == ["two", "one"]


def base_with_tokens_of(name: str) -> Any:
    """The embedded base with the tokens of a template, as bases that come with the template have them.

    Transformers gives new tokens embeddings so alike that a frozen base cannot tell them apart; here each has its own.
    """
    base = load_base("embedded")
    base.tokenizer.chat_template = TEMPLATES[name]
    base.tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(TEMPLATES[name])})})
    base.tokenizer.add_tokens(["<think>", "</think>", "final"])
    known = base.model.config.vocab_size
    base.model.resize_token_embeddings(len(base.tokenizer), mean_resizing=False)
    embeddings = base.model.get_input_embeddings().weight.data
    embeddings[known:].normal_(0, float(embeddings[:known].std()), generator=torch.Generator().manual_seed(0))
    return base


def learn(crowd: Crowd, batch: Any, *, at_most: int) -> None:
    """Overfit until every target is the most probable token."""
    parameters = [each for each in crowd.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0, betas=(0.9, 0.95))
    for step in range(at_most):
        log_probs = crowd(batch).log_probs
        if float(log_probs.detach().min()) > math.log(0.5):
            return
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 10)
        (-log_probs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"not learned in {at_most} steps: {log_probs.detach().min()} nats")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sampled(["deepseekv3", "gemma3", "glm4moe", "gptoss", "lfm2", "qwen3"], ["deepseekv3", "gemma3", "glm4moe"])
)
def test_an_agent_that_learned_twelve_chats_ends_its_turn(name: str) -> None:
    """By an end of its own, by that of a text, or by the token that begins the next turn, as in GLM."""
    base = base_with_tokens_of(name)
    encoder = Encoder(base.tokenizer)
    turns = [
        [user(f"Ann has {n} pens."), says(f"{n}"), user(f"Ben has {17 - n} pens."), says(f"{17 - n}")]
        for n in range(3, 15)
    ]
    examples = [encoder.encode(Chat(messages_of(each))) for each in turns]
    crowd = Crowd(base.model, LoraSettings(num_agents=1, rank=16), base.name, base.tokenizer.pad_token_id)
    crowd.prompter = Prompter(base.tokenizer, form_of(examples[0]))
    learn(crowd.train(), pack(examples, range(12)), at_most=100)
    found = crowd.eval().generate([each[:-1] for each in turns], max_new_tokens=24, details=True)
    runs = [example.input_ids[last_answer(example)].tolist() for example in examples]
    assert [answer.answer for answer in found] == [crowd.prompter.text(run) for run in runs]
    assert [answer.complete for answer in found] == [True] * 12
    assert [len(answer.tokens) for answer in found] == [*map(len, runs)]
    assert all(run[-1] in crowd.prompter.ends for run in runs)


def test_the_table_of_what_templates_cannot_show_is_in_the_docs() -> None:
    table: Sequence[str] = [line for line in DOCS.read_text().splitlines() if line.startswith("| cannot show")]
    assert 1 <= len(table) <= 10
    told = "".join(table)
    named = ("Cohere", "Gemma", "Idefics", "SmolVLM", "LFM2", "Llama 3", "Llava", "Phi", "Qwen2.5-VL", "gpt-oss", "R1")
    assert [name for name in named if name not in told] == []
