"""Aggregators on numbers known by hand; a crowd that votes elects what reading every text again would elect."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ci_llm import Crowd
from ci_llm.crowd.aggregators import AGGREGATORS, aggregate, find_vote, is_mean
from ci_llm.crowd.answering import Answer
from ci_llm.crowd.generation import read_texts
from ci_llm.crowd.metrics import final_answer
from ci_llm.crowd.next_token import Decoding
from ci_llm.embedded import rows
from tests.support.crowds import K

QUESTIONS = [row["question"] for row in rows("test")[:2]]
SHORT: Any = {"max_new_tokens": 24}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_mean_of_an_aggregator_is_the_plain_mean(name: str) -> None:
    """Otherwise confidence would be that of another distribution, or the mean would be computed twice."""
    log_probs = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    found = aggregate(log_probs, name)
    assert is_mean(name) == torch.allclose(found, log_probs.exp().mean(0).log(), atol=1e-6)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregators_return_a_distribution_and_keep_one_that_all_agents_share(name: str) -> None:
    log_probs = torch.randn(3, 2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    torch.testing.assert_close(aggregate(log_probs, name).exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))
    alike = log_probs[:1].expand(3, -1, -1, -1)
    torch.testing.assert_close(aggregate(alike, name), log_probs[0])


@pytest.mark.parametrize(
    ("name", "answers", "probabilities", "wins"),
    [
        ("majority", ["3", "5", "3"], [0.1, 0.9, 0.2], 2),
        ("majority", ["3", "5", "5", "3"], [0.1, 0.5, 0.3, 0.6], 1),
        ("majority", ["3", "", ""], [0.1, 0.9, 0.9], 0),
        ("majority", ["", ""], [0.1, 0.9], 1),
        ("weighted_vote", ["3", "5", "3"], [0.1, 0.9, 0.2], 1),
        ("weighted_vote", ["3", "5", "3"], [0.4, 0.6, 0.3], 0),
        ("weighted_vote", ["", "5"], [0.9, 0.01], 1),
        ("rerank", ["3", "5", "3"], [0.4, 0.6, 0.3], 1),
        ("rerank", ["", "5"], [0.9, 0.01], 1),
        ("rerank", ["", ""], [0.9, 0.01], 0),
    ],
)
@pytest.mark.parametrize("rest", [0.0, -1000.0])
def test_a_vote_on_answers_known_by_hand(
    name: str, answers: list[str], probabilities: list[float], wins: int, rest: float
) -> None:
    """This holds also for texts so long that their probabilities are 0 as floats."""
    vote = find_vote(name)
    assert vote is not None
    assert vote(answers, [math.log(each) + rest for each in probabilities]) == wins


@torch.no_grad()
def log_probability(crowd: Crowd, prompt: list[int], text: list[int]) -> float:
    """The log-probability of a text under the mean of the agents, by K full passes over this text alone."""
    each = []
    for k in range(K):
        with crowd.base_model.active_agent(k) as model:
            logits = model(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        each.append(logits.double().log_softmax(-1))
    mean = torch.stack(each).exp().mean(0).log()
    return float(mean.gather(-1, torch.tensor(text)[:, None]).sum())


@pytest.mark.slow
def test_the_crowd_reads_given_texts_as_full_passes_do(crowd: Crowd) -> None:
    prompter = crowd.prompter
    prompt = prompter.ids(QUESTIONS[0])
    texts = [prompter.tokenizer(text)["input_ids"] for text in ("3+4=7", "#### 12", "3+4=7")]
    read = read_texts(crowd, prompt, texts, "probability")
    for text, tokens in zip(texts, read, strict=True):
        assert len(tokens) == len(text)
        found = sum(math.log(token.probability) for token in tokens)
        assert found == pytest.approx(log_probability(crowd, prompt, text), abs=1e-3)
    assert read[0] == read[2]
    crowd.train()
    assert read_texts(crowd, prompt, texts, "probability") == read, "dropout, if there is any, is off"
    assert crowd.training
    crowd.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["majority", "rerank", "weighted_vote"])
def test_a_vote_elects_one_of_the_agents_own_texts(crowd: Crowd, name: str) -> None:
    prompter, vote = crowd.prompter, find_vote(name)
    assert vote is not None
    found: list[Answer] = crowd.generate(QUESTIONS, aggregator=name, details=True, **SHORT)
    plain = crowd.generate_ids([prompter.ids(q) for q in QUESTIONS], Decoding(24, prompter.ends), include_agents=True)
    for number, answer in enumerate(found):
        own = plain[number].agents
        assert answer.agents == tuple(map(prompter.text, own)), "votes change nothing in what agents write"
        [end] = prompter.ends
        whole = [[*text, end][:24] for text in own]
        prompt = prompter.ids(QUESTIONS[number])
        nats = [log_probability(crowd, prompt, text) for text in whole]
        wins = vote([final_answer(prompter.text(t), "marked") for t in own], nats)
        assert answer.answer == prompter.text(own[wins])
        assert answer.log_probability == pytest.approx(nats[wins], abs=1e-2)
        assert (
            answer.agreement
            == sum(final_answer(t, "marked") == final_answer(answer.answer, "marked") for t in answer.agents) / K
        )
    assert [answer.answer for answer in found] == crowd.generate(QUESTIONS, aggregator=name, **SHORT)
    assert any(len({*answer.agents}) > 1 for answer in found), "the agents differ, so there is something to elect"
    stream = crowd.stream(QUESTIONS[0], aggregator=name, **SHORT)
    assert "".join(stream) == found[0].answer == stream.result.answer
