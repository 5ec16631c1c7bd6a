"""The modules of the packages of diversity forms and aggregators are the values of their keys."""

from __future__ import annotations

import pytest

from ci_llm.config import load_config
from ci_llm.core.imports import load_plugin, plugin_names
from ci_llm.crowd.aggregators import AGGREGATORS
from ci_llm.crowd.diversity import DiversityForm, find_form
from ci_llm.errors import BadInput, ConfigError


def test_the_modules_are_the_values_of_the_keys() -> None:
    assert plugin_names("ci_llm.crowd.diversity", first="none") == ("none", "swd")
    voting = ("majority", "rerank", "self_consistency", "weighted_vote")
    assert sorted(AGGREGATORS) == sorted(("probability", "confidence", "dirichlet", "logit", *voting))
    assert AGGREGATORS[0] == "probability"
    for name in plugin_names("ci_llm.crowd.diversity"):
        assert isinstance(find_form(name), DiversityForm)
    for key in ("diversity", "aggregator"):
        with pytest.raises(ConfigError, match=f"{key}.*median"):
            load_config(None, [f"{key}=median"])
    with pytest.raises(BadInput, match=r"(?s)there is no .median.*logit, .*probability"):
        load_plugin("ci_llm.crowd.aggregators", "median", "aggregate")
