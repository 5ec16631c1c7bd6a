"""What CONTRIBUTING.md says is so: each recipe is added to a copy of the package, by one file, and used; tests wait."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import START
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parent.parent
RECIPE = re.compile(r"<!-- recipe: (\S+) -->\n```python\n(.*?)```", re.DOTALL)

#: What a user does with each recipe: what loads no torch, and the rest.
USES = {
    "objectives/margin.py": (
        """
from ci_llm.config import load_config
config = load_config(None, ["objective=margin"])
""",
        """
import torch
from ci_llm.objectives import Evidence, objective_of
objective = objective_of(config.objective, [config])
losses = objective.losses(Evidence(torch.tensor([[-2.0, -6.0, -4.0, -4.0]]), torch.tensor([2, 2, 2, 2])))
assert losses.tolist() == [[0.0, 1.0]], losses
""",
    ),
    "diversity/spread.py": (
        """
from ci_llm.config import load_config
config = load_config(None, ["diversity=spread"])
""",
        """
from types import SimpleNamespace
import torch
from ci_llm.crowd.model import CrowdOutput
from ci_llm.crowd.objective import NextToken
log_probs, batch = torch.tensor([[-1.0, -2.0], [-3.0, -2.0]]), SimpleNamespace(num_targets=2)
loss = NextToken(config.diversity, weight=0.5)(CrowdOutput((0, 1), batch, log_probs, log_probs), 0)
assert (loss.diversity.item(), loss.total.item()) == (0.5, 7.5), loss
""",
    ),
    "aggregators/most_confident.py": (
        """
from ci_llm.config import load_config
name = load_config(None, ["aggregator=most_confident"]).aggregator
""",
        """
import torch
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.next_token import Decoding
chosen = aggregate(torch.tensor([[0.6, 0.4], [0.1, 0.9]]).log(), Decoding(aggregator=name).aggregator)
torch.testing.assert_close(chosen.exp(), torch.tensor([0.1, 0.9]))
""",
    ),
    "aggregators/unanimous.py": (
        """
from ci_llm.config import load_config
name = load_config(None, ["aggregator=unanimous"]).aggregator
""",
        """
from ci_llm import Crowd, LoraSettings, Prompter, load_base
loaded = load_base("embedded")
crowd = Crowd(loaded.model, LoraSettings(num_agents=2), loaded.name, loaded.tokenizer.pad_token_id)
crowd.prompter = Prompter(loaded.tokenizer)
[answer] = crowd.generate("Ann has 7 pens. Ann buys 5 more. How many pens are left?", aggregator=name, details=True)
assert answer.answer == answer.agents[0] and answer.agreement == 1, "untrained agents are all the base"
""",
    ),
    "metrics/first_line.py": (
        """
from ci_llm.crowd.metrics import METRICS, answer_reader
assert "first_line" in METRICS
assert answer_reader([], "first_line")(" \\n Paris \\nbecause") == "Paris"
""",
        "",
    ),
    "trackers/aim.py": (
        """
from types import SimpleNamespace
from ci_llm.config import load_config
from ci_llm.logs.trackers import find_kind
assert load_config(None, ["report_to=aim"]).report_to == ("aim",)
sent = []
kind = find_kind("aim")
kind.log(SimpleNamespace(log=lambda numbers, step: sent.append((step, numbers))), 3, {"loss": 1.0})
assert sent == [(3, {"loss": 1.0})]
""",
        "",
    ),
    "formats/sqlite.py": (
        "",
        """
import sqlite3, tempfile
from pathlib import Path
from ci_llm import load_config, load_rows
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "mine.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("create table rows (question, answer)")
        database.executemany("insert into rows values (?, ?)", [("1+1", "2"), ("2+2", "4")] * 4)
    database.close()
    rows = load_rows(load_config(None, [f"dataset_name={path}"]), "train")
    assert {row.messages[-1].content for row in rows} == {"2", "4"}
""",
    ),
}
#: A process that does all of it, and tells what went wrong with each.
USE_ALL = """
import json, sys, traceback
uses = json.load(sys.stdin)
names = {recipe: {} for recipe in uses}
wrong = {}
for part in (0, 1):
    for recipe, parts in uses.items():
        try:
            exec(parts[part], names[recipe])
            assert part or "torch" not in sys.modules
        except Exception:
            wrong[recipe] = traceback.format_exc()
print(json.dumps(wrong))
"""


def recipes() -> dict[str, str]:
    """The blocks of CONTRIBUTING.md by the path that each names."""
    return dict(RECIPE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What goes wrong with each recipe where the package has every recipe added, and no other change."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(ROOT / "ci_llm", folder / "ci_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for path, code in recipes().items():
        assert not (folder / path).exists()
        (folder / path).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(START)},
        input=json.dumps(USES),
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    told: dict[str, str] = json.loads(done.stdout)
    return told


def test_every_recipe_is_used() -> None:
    assert [Path(path).parts[-2] + "/" + Path(path).name for path in recipes()] == [*USES]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", USES)
def test_a_recipe_is_one_file(recipe: str, wrong: dict[str, str]) -> None:
    assert recipe not in wrong, wrong[recipe]


#: A wait that ends after seconds which somebody has guessed.
GUESSED = re.compile(r"(?:\btimeout=|\.wait\(|\.join\(|\bTIMEOUT_S(?:: Final)? = )[1-9]\d*\b")


def test_no_test_waits_for_fixed_seconds() -> None:
    """A busy machine takes longer than anybody guesses: what waits ends by an event, or by `DEADLINE_S`."""
    assert GUESSED.search("process.wait(10)")
    assert not GUESSED.search("event.wait(0.01), hang_timeout=3")
    files = [path for folder in ("tests", "tools/testbed") for path in (ROOT / folder).rglob("*.py")]
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files if path != Path(__file__)}
    assert {str(path): found for path, text in texts.items() if (found := GUESSED.findall(text))} == {}
