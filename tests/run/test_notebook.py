"""`ci_llm.train` in a notebook: rows and a model in memory, a live bar, the report inline, and two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.run.test_given import SHORT
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import free_port

KEYS = {key: value for key, value in SHORT.items() if key != "quiet"}
ROWS = 'rows = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(30)]'


def outputs_of(*cells: str) -> list[list[Any]]:
    """What each cell of a notebook shows."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return [cell.outputs for cell in NotebookClient(book, timeout=DEADLINE_S, kernel_name="python3").execute().cells]


def html_of(outputs: list[Any]) -> list[str]:
    return [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]


@pytest.mark.slow
def test_a_notebook_trains_on_two_processes_and_by_itself_with_a_bar_and_a_result_as_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    two, one = ({**KEYS, "output_dir": str(tmp_path / name)} for name in ("two", "one"))
    function = (
        "def work(rows):\n    import json, os\n    import ci_llm\n"
        f"    result = ci_llm.train(dataset=rows, **{two!r})\n"
        f"    with open(os.path.join({str(tmp_path)!r}, 'told' + os.environ['RANK']), 'w') as file:\n"
        "        json.dump([result.status, result.step, result.metrics['nll']], file)"
    )
    bars = (
        "from ci_llm.logs import terminal\nseen = []\n"
        "class Seen(terminal.NotebookArea):\n    def draw(self, draw):\n"
        "        text = super().draw(draw)\n        seen.append(self._shown)\n        return text\n"
        "terminal.NotebookArea = Seen"
    )
    _, launched, _, trained, shown, counted = outputs_of(
        f"from accelerate import notebook_launcher\n{ROWS}\n{function}",
        f"notebook_launcher(work, args=(rows,), num_processes=2, use_port='{free_port()}')",
        f"import ci_llm\n{bars}",
        f"result = ci_llm.train(dataset=rows, **{one!r})",
        "result",
        'sum("step" in each and "━" in each for each in seen) > 0',
    )
    told = [json.loads((tmp_path / f"told{index}").read_text()) for index in (0, 1)]
    assert told[0] == told[1]
    assert told[0][:2] == ["completed", 4], launched
    assert "2 process(es) x" in (tmp_path / "two" / "training.log").read_text()
    assert any("completed at step 4" in output.get("text", "") for output in trained)
    assert {*html_of(trained)} == {""}, "the bars are gone at the end"
    (report,) = html_of(shown)
    assert "<iframe srcdoc=" in report
    assert "nats per token" in report
    assert counted[0]["data"]["text/plain"] == "True"
