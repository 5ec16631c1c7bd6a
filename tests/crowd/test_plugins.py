"""The diversity forms and aggregators are the values of their keys."""

from __future__ import annotations

import pytest

from ci_llm.config import load_config
from ci_llm.core.imports import plugin_names
from ci_llm.crowd.aggregators import AGGREGATORS, find_vote
from ci_llm.crowd.diversity import DiversityForm, find_form
from ci_llm.crowd.metrics import METRICS
from ci_llm.errors import BadInput, ConfigError


def test_the_forms_are_the_values_of_the_keys() -> None:
    assert plugin_names("ci_llm.crowd.diversity") == ("none", "swd")
    voting = ("majority", "rerank", "weighted_vote")
    assert ("probability", "logit", *voting) == AGGREGATORS
    assert all(isinstance(find_form(name), DiversityForm) for name in plugin_names("ci_llm.crowd.diversity"))
    assert [name for name in AGGREGATORS if find_vote(name)] == [*voting]
    assert METRICS == ("exact_match", "string_match")
    for key in ("diversity", "aggregator"):
        with pytest.raises(ConfigError, match=f"{key}.*median"):
            load_config(None, [f"{key}=median"])
    with pytest.raises(ConfigError, match="majority takes one text of each agent"):
        load_config(None, ["aggregator=self_consistency"])
    with pytest.raises(BadInput, match=r"(?s)there is no .median.*logit, majority"):
        find_vote("median")
