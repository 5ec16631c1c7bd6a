"""Answers with details equal what K plain PEFT models give; stop strings and streams give the same text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from ci_llm import Crowd
from ci_llm.crowd import next_token
from ci_llm.crowd.answering import Answer, answers, options_of
from ci_llm.crowd.next_token import Decoding
from ci_llm.crowd.questions import Questions
from ci_llm.data.encoder import Encoder
from ci_llm.data.rows import Completion
from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.errors import BadInput, DataError, ModelError
from ci_llm.lora.passes import Head
from tests.support.crowds import K, save_crowd

QUESTIONS: list[Any] = [row["question"] for row in rows("test")[:5]]
SHORT: Any = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def detailed(crowd: Crowd) -> list[Answer]:
    return crowd.generate(QUESTIONS, details=True, **SHORT)


@pytest.mark.slow
def test_details_change_no_answer_and_hold_the_answer_of_each_agent(crowd: Crowd, detailed: list[Answer]) -> None:
    assert [answer.prompt for answer in detailed] == QUESTIONS
    assert [answer.answer for answer in detailed] == crowd.generate(QUESTIONS, **SHORT)
    prompter = crowd.prompter
    decoding = Decoding(24, prompter.ends)
    own = crowd.generate_ids([prompter.ids(q) for q in QUESTIONS], decoding, include_agents=True)
    for found, answer in zip(own, detailed, strict=True):
        assert answer.agents == tuple(map(prompter.text, found.agents))
    assert len({text for answer in detailed for text in (*answer.agents, answer.answer)}) > len(QUESTIONS)


def test_texts_alone_cost_no_entropies(crowd: Crowd, detailed: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary they cost more than the choice of the token."""
    monkeypatch.setattr(next_token, "token_uncertainty", None)
    assert crowd.generate(QUESTIONS, **SHORT) == [answer.answer for answer in detailed]
    with pytest.raises(TypeError, match="NoneType"):
        crowd.generate(QUESTIONS[:1], details=True, **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{}, {"aggregator": "logit"}, {"do_sample": True, "temperature": 2.0, "seed": 4}])
def test_the_numbers_equal_k_plain_peft_passes(crowd: Crowd, tmp_path: Path, choices: dict[str, Any]) -> None:
    """Every token is compared with full passes over one prompt, by formulas that are written again here."""
    folder = save_crowd(crowd, tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    agents = [peft.PeftModel.from_pretrained(plain, folder / "agent0", adapter_name="agent0").eval()]
    for k in range(1, K):
        agents[0].load_adapter(folder / f"agent{k}", adapter_name=f"agent{k}")
    prompter = crowd.prompter
    prompts = [prompter.ids(question) for question in QUESTIONS]
    decoding = Decoding(ends=prompter.ends, **SHORT, **choices)
    generated = crowd.generate_ids(prompts, decoding, uncertainty=True)
    ended = 0
    for prompt, found in zip(prompts, generated, strict=True):
        text, tokens = found.ids, found.uncertainties
        log_probs = []
        for k in range(K):
            agents[0].set_adapter(f"agent{k}")
            with torch.no_grad():
                logits = agents[0](input_ids=torch.tensor([prompt + text])).logits[0, len(prompt) - 1 :]
            log_probs.append(logits.double().log_softmax(-1))
        each = torch.stack(log_probs).exp()  # [K, T+1, V]
        mean = each.mean(0)
        together = mean if "aggregator" not in choices else torch.stack(log_probs).mean(0).softmax(-1)
        entropies = -(each * each.log()).sum(-1).mean(0)
        whole = -(mean * mean.log()).sum(-1)
        assert len(tokens) in (len(text), len(text) + 1)
        for at, token in enumerate(tokens):
            if at < len(text):
                assert token.probability == pytest.approx(float(together[at, text[at]]), abs=1e-4)
            else:
                ended += 1
                ends = [float(together[at, end]) for end in prompter.ends]
                assert any(token.probability == pytest.approx(p, abs=1e-4) for p in ends)
            assert token.entropy == pytest.approx(float(whole[at]), abs=2e-4)
            assert token.expected_entropy == pytest.approx(float(entropies[at]), abs=2e-4)
            assert token.disagreement == pytest.approx(float(whole[at] - entropies[at]), abs=2e-4)
    assert ended, "no text has an end, so its probability was not compared"


@pytest.mark.slow
def test_answers_arrive_by_batch_and_do_not_depend_on_its_size(crowd: Crowd, detailed: list[Answer]) -> None:
    found = answers(crowd, QUESTIONS, options_of(crowd, seed=0, **SHORT), batch_size=2, include_agents=False)
    assert isinstance(found, Iterator)
    first = next(found)
    assert (first.answer, first.agents, first.agreement) == (detailed[0].answer, (), None)
    assert first.confidence == pytest.approx(detailed[0].confidence, abs=1e-4)
    assert [answer.answer for answer in found] == [answer.answer for answer in detailed[1:]]
    assert crowd.generate([], details=True) == []


# Stop strings


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["####", ["=1", "=2", "0\n"]])
def test_a_stop_string_cuts_the_answer_of_the_crowd_and_of_every_agent(
    crowd: Crowd, detailed: list[Answer], stop: Any
) -> None:
    strings = [stop] if isinstance(stop, str) else stop

    def cut(text: str) -> str:
        return min((text.partition(string)[0] for string in strings), key=len)

    found = crowd.generate(QUESTIONS, details=True, stop_strings=stop, **SHORT)
    for answer, whole in zip(found, detailed, strict=True):
        assert answer.answer == cut(whole.answer)
        assert answer.agents == tuple(map(cut, whole.agents))
        assert len(answer.tokens) <= len(whole.tokens)
        assert answer.tokens == pytest.approx(whole.tokens[: len(answer.tokens)]) or answer.answer == whole.answer
        assert answer.complete or answer.answer == whole.answer
    assert [answer.answer for answer in found] == crowd.generate(QUESTIONS, stop_strings=stop, **SHORT)
    assert any(a.answer != whole.answer for a, whole in zip(found, detailed, strict=True))


@pytest.mark.parametrize("prompts", [None, 5, [5], {"role": "user", "content": "a"}])
def test_a_value_that_is_not_a_prompt_is_refused(crowd: Crowd, prompts: Any) -> None:
    with pytest.raises(BadInput, match="a prompt is neither text nor a chat"):
        crowd.generate(prompts)


def test_an_answer_ends_where_transformers_ends_it(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at each token of the base's list, and at a stop string that is a special token hidden in the text."""
    pad = crowd.base_model.pad_id
    settings, prompter = crowd.model.generation_config, crowd.prompter
    row = Encoder(prompter.tokenizer).encode(Completion("2+3=", "5"))

    def tokens_and_ends(**choices: Any) -> tuple[int, bool, bool]:
        [answer] = crowd.generate(QUESTIONS[0], max_new_tokens=4, details=True, **choices)
        ends = Questions.of([row], crowd, 1, 64).ends
        return len(answer.tokens), answer.complete, pad in ends

    crowd.generate(QUESTIONS[0], max_new_tokens=1)  # after it the crowd knows who writes its texts
    monkeypatch.setattr(Head, "shape_logits", lambda _, z: z.index_fill(-1, torch.tensor([pad]), 100.0))
    with monkeypatch.context() as patch:
        assert tokens_and_ends() == (4, False, False)
        assert tokens_and_ends(stop_strings=["Q:", prompter.tokenizer.pad_token]) == (1, True, False)
        patch.setattr(settings, "eos_token_id", [settings.eos_token_id, pad])
        assert tokens_and_ends() == (1, True, True)
    assert prompter.ends == {settings.eos_token_id}, "what training shows as the end of an answer"


# Streams


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "error"),
    [({"stop_strings": ""}, BadInput), ({"max_tokens": 5}, TypeError), ({"min_p": None}, TypeError)],
)
def test_options_that_do_not_exist_or_stop_at_once_are_refused(
    choices: dict[str, Any], error: type[Exception], crowd: Crowd
) -> None:
    with pytest.raises(error, match=r"stop string is empty|no option of a generation"):
        crowd.generate(QUESTIONS, **choices)


@pytest.mark.parametrize("choices", [{"stop_strings": ["####"]}, {"do_sample": True, "seed": 5}])
def test_the_pieces_of_a_stream_are_the_answer(crowd: Crowd, choices: dict[str, Any]) -> None:
    for question in QUESTIONS[:3]:
        stream = crowd.stream(question, **SHORT, **choices)
        pieces = list(stream)
        [whole] = crowd.generate(question, **SHORT, **choices)
        assert "".join(pieces) == whole == stream.result.answer
        assert len(pieces) > 1
        assert all(pieces)
        assert list(stream) == [], "it is at its end"
    assert stream.result.confidence > 0
    assert (stream.result.agents, stream.result.agreement) == ((), None)


@pytest.mark.slow
def test_a_stream_that_is_closed_writes_no_further_token(
    crowd: Crowd, detailed: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    with (
        crowd.model.model.norm.register_forward_hook(lambda *_: passes.append(1)),  # called once in every pass
        crowd.stream(QUESTIONS[0], max_new_tokens=200) as stream,
    ):
        first = next(stream)
    assert len(passes) < len(detailed[0].tokens)
    assert detailed[0].answer.startswith(first)
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="closed before"):
        _ = stream.result
    assert crowd.generate(QUESTIONS[0], **SHORT) == [detailed[0].answer], "the crowd is free again"


def test_an_error_is_one_message_where_the_stream_is_read(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.base_model, "decodes", True)
    monkeypatch.setattr(crowd.model.model.norm, "forward", lambda *_, **__: {}["cache"])
    with pytest.raises(ModelError, match="cannot generate"):
        list(crowd.stream(QUESTIONS[0]))
    with pytest.raises(DataError, match="the base reads"):
        crowd.stream("Ann has 3 pens. " * 300)


def test_a_base_that_reads_no_packed_rows_streams_in_one_piece(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd.base_model, "decodes", False)
    stream = crowd.stream(QUESTIONS[0], **SHORT)
    assert [stream.result.answer] == crowd.generate(QUESTIONS[0], **SHORT)
