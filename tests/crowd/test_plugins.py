"""A diversity form and an aggregator are added by one file each: a copy of the package with the two files trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci_llm.config import load_config
from ci_llm.core.plugins import load_plugin, plugin_names
from ci_llm.crowd.aggregators import AGGREGATORS
from ci_llm.errors import BadInput, ConfigError

ROOT = Path(__file__).parents[2]

FORM = '''"""The variance of the agents' log-probabilities."""

from torch import Tensor

from ci_llm.crowd.diversity import DiversityForm, TermInputs


def term(inputs: TermInputs) -> Tensor:
    return inputs.log_probs[inputs.finite].var(0).sum()


form = DiversityForm(term)
'''

AGGREGATOR = '''"""The likeliest agent's word."""

from torch import Tensor


def aggregate(log_probs: Tensor) -> Tensor:
    return log_probs.amax(0).log_softmax(-1)
'''

USE = """
import sys
from ci_llm.config import load_config
config = load_config(None, ["diversity=variance", "aggregator=largest"])
assert "torch" not in sys.modules
import torch
from types import SimpleNamespace
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.generation import Decoding
from ci_llm.crowd.objective import Objective
log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -2.0]])
loss = Objective(config.diversity, weight=0.5)(SimpleNamespace(log_probs=log_probs, states=None), None, 0)
assert (float(loss.diversity), float(loss.total)) == (2.0, 8.0 - 0.5 * 2 * 2.0), loss
chosen = aggregate(torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(), Decoding(aggregator=config.aggregator).aggregator)
torch.testing.assert_close(chosen.exp(), torch.tensor([0.9, 0.8]) / 1.7)
"""


def test_one_file_adds_a_diversity_form_and_one_an_aggregator(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "ci_llm", tmp_path / "ci_llm", ignore=shutil.ignore_patterns("base", "__pycache__"))
    (tmp_path / "ci_llm" / "crowd" / "diversity" / "variance.py").write_text(FORM)
    (tmp_path / "ci_llm" / "crowd" / "aggregators" / "largest.py").write_text(AGGREGATOR)
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_modules_are_the_values_of_the_keys() -> None:
    assert plugin_names("ci_llm.crowd.diversity", first="none") == ("none", "joint", "swd", "swd_raw")
    assert AGGREGATORS == ("probability", "logit")
    for key in ("diversity", "aggregator"):
        with pytest.raises(ConfigError, match=f"{key}.*median"):
            load_config(None, [f"{key}=median"])
    with pytest.raises(BadInput, match=r"(?s)there is no .median.*logit, probability"):
        load_plugin("ci_llm.crowd.aggregators", "median", "aggregate")
