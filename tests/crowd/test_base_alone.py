"""A base without its agents: scored and asked by the same code as they, and left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ci_llm.base.load import load_base
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.pretrained import open_base
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.prompts import Prompter
from ci_llm.lora.settings import LoraSettings
from tests.support.crowds import disturbed_crowd
from tools.testbed.tiny import base, batch


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("route", ["packed", "padded"])
def test_the_nll_is_that_of_the_plain_model(family: str, route: Any) -> None:
    plain = base(family)
    crowd = Crowd(copy.deepcopy(plain), LoraSettings(num_agents=2, agents=({"rank": 2}, {"rank": 4})), "toy").eval()
    with torch.no_grad():
        crowd.storage.weights.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    crowd.base_model.route = route
    before, rows = crowd.storage.weights.clone(), batch((7, 5))
    with crowd.without_agents():
        found = score(crowd, [rows], "logit")
    assert found is not None
    wanted = []
    for start, end in zip(rows.bounds, rows.bounds[1:], strict=False):
        logits = plain(input_ids=rows.input_ids[None, start:end]).logits[0].detach().log_softmax(-1)
        own = [at for at, where in enumerate(rows.predict_from.tolist()) if start <= where < end]
        wanted.append(-sum(float(logits[rows.predict_from[at] - start, rows.targets[at]]) for at in own))
    assert found.nll.shape == (2, 2), "the base as the only agent, and a crowd of it"
    assert found.nll[0].tolist() == pytest.approx(wanted, rel=1e-4)
    assert torch.equal(crowd.storage.weights, before)
    assert crowd.num_agents == 2
    with_agents = score(crowd, [rows], "probability")
    assert with_agents is not None
    assert abs(float(with_agents.nll[0, 0]) - wanted[0]) > 1e-3


@pytest.mark.slow
def test_a_base_that_was_opened_answers_as_the_plain_model_does() -> None:
    loaded = load_base("embedded")
    prompt = "Ann has 7 pens. She buys 5. How many pens are there?"
    ids = torch.tensor([Prompter(loaded.tokenizer).ids(prompt)])
    written = loaded.model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=0)
    alone = Crowd.of(open_base("embedded"))
    [answer] = alone.generate(prompt, max_new_tokens=12, details=True)
    wanted = loaded.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.answer == wanted
    assert (answer.agents, answer.agreement, answer.agents_asked, alone.names) == ((), None, 0, [])
    crowd = disturbed_crowd()
    with crowd.without_agents():
        assert crowd.generate(prompt, max_new_tokens=12) == [wanted]


def test_the_gain_in_nll_is_the_difference_of_the_nlls() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 9, (40,), generator=generator)
    nll = torch.rand(4, 40, dtype=torch.float64, generator=generator) * tokens
    scores = Scores(torch.zeros(4, 40, dtype=torch.bool), nll, tokens)
    *agents, crowd = scores.mean_nll
    assert scores.nll_gain("best").value == pytest.approx(crowd - min(agents))
    assert scores.nll_gain("mean").value == pytest.approx(crowd - sum(agents) / 3)
    # A crowd that is better by the same amount in every token is surely so, however long the rows are.
    scores = Scores(scores.right, torch.stack([nll[0], nll[0], nll[0], nll[0] - 0.1 * tokens.double()]), tokens)
    gain = scores.nll_gain("best")
    assert gain.value == pytest.approx(-0.1)
    assert gain.interval95 == pytest.approx(0.0, abs=1e-12)
    nll[0, 3] = float("nan")
    assert Scores(scores.right, nll, tokens).nll_gain("mean").interval95 is None
