"""lm-evaluation-harness runs on the crowd and on one agent, by its own command line, with a task of local files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.scoring import score
from ci_llm.data.batches import pack
from ci_llm.embedded import BASE_FOLDER
from ci_llm.embedded import rows as embedded_rows
from ci_llm.errors import BadInput
from ci_llm.integrations.lm_eval import CrowdLM, main
from tests.support.crowds import K, disturbed_crowd, save_crowd
from tools.testbed.forkserver import ForkServer

pytestmark = pytest.mark.slow

ROWS = embedded_rows("test")[:4]
LONG = " ".join(row["question"] for row in embedded_rows("test")[:40])

TASKS = {
    "stories_answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["####"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "stories_nats": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "stories_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_crowd(disturbed_crowd(), tmp_path_factory.mktemp("saved") / "crowd")


@pytest.fixture(scope="module")
def crowd(saved: Path) -> Crowd:
    return Crowd.from_pretrained(saved)


def of_crowd(saved: Path, **arguments: Any) -> CrowdLM:
    return CrowdLM(str(saved), **{"batch_size": 3, "device": "cpu", **arguments})


def requests(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, at) for at, each in enumerate(arguments)]


def expected(crowd: Crowd, ids: Sequence[int], first: int, who: int) -> tuple[float, bool]:
    """Nats of the tokens from `first` on, by the crowd's own scores."""
    row: Any = type("Row", (), {"input_ids": np.array(ids), "supervised": np.arange(len(ids)) >= first})()
    found = score(crowd, [pack([row], [0])], "probability")
    assert found is not None
    return -float(found.nll[who, 0]), bool(found.right[who, 0])


@pytest.mark.parametrize(("agent", "who"), [("crowd", K), (1, 1)])
def test_loglikelihood_is_the_crowd_s_own(saved: Path, crowd: Crowd, agent: int | str, who: int) -> None:
    model = of_crowd(saved, agent=agent)
    pairs = [(row["question"] + "\n", row["answer"]) for row in ROWS]
    found = model.loglikelihood(requests("loglikelihood", *pairs, ("", "Ann has 5 pens.")), disable_tqdm=True)
    for (context, continuation), (nats, greedy) in zip(pairs, found, strict=False):
        ids = model.tok_encode(context + continuation)
        wanted = expected(crowd, ids, len(model.tok_encode(context.rstrip())), who)
        assert (nats, greedy) == (pytest.approx(wanted[0], abs=1e-5), wanted[1])
    alone = [model.prefix_token_id, *model.tok_encode("Ann has 5 pens.", add_special_tokens=False)]
    assert found[-1][0] == pytest.approx(expected(crowd, alone, 1, who)[0], abs=1e-5)
    assert len({nats for nats, _ in found}) == 5


def test_the_crowd_is_the_mean_of_its_agents_distributions(saved: Path) -> None:
    asked = requests("loglikelihood", ("Ann has 5", " pens"), ("Jack has 7 cups. 3", " more"))
    *agents, together = (
        [nats for nats, _ in of_crowd(saved, agent=agent).loglikelihood(asked, disable_tqdm=True)]
        for agent in (*range(K), "crowd")
    )
    model = of_crowd(saved)
    for number, request in enumerate(asked):
        if len(model.tok_encode(request.args[1], add_special_tokens=False)) == 1:
            mean = torch.tensor([line[number] for line in agents]).exp().mean().log()
            assert together[number] == pytest.approx(float(mean), abs=1e-5)


def test_a_text_longer_than_the_base_is_scored_in_windows_and_each_token_once(saved: Path, crowd: Crowd) -> None:
    model = of_crowd(saved)
    ids = model.tok_encode(LONG, add_special_tokens=False)
    assert len(ids) > 2 * model.max_length
    [nats] = model.loglikelihood_rolling(requests("loglikelihood_rolling", (LONG,)))
    size = model.max_length - 1
    total = expected(crowd, [model.prefix_token_id, *ids[:size]], 1, K)[0]
    for end in (*range(2 * size, len(ids), size), len(ids)):
        begin = max(0, end - size - 1)
        known = (end - 1) // size * size
        total += expected(crowd, ids[begin:end], known - begin, K)[0]
    assert nats == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("agent", ["crowd", 2])
def test_generation_ends_at_the_first_stop_string(saved: Path, crowd: Crowd, agent: int | str) -> None:
    model = of_crowd(saved, agent=agent)
    prompts = [model.apply_chat_template([{"role": "user", "content": row["question"]}]) for row in ROWS]
    stopped, free = ({"until": until, "max_gen_toks": 20} for until in (["=", "+"], []))
    found = model.generate_until(requests("generate_until", *((text, stopped) for text in prompts)))
    answers = crowd.generate([row["question"] for row in ROWS], max_new_tokens=20, details=True)
    whole = [answer.answer if agent == "crowd" else answer.agents[2] for answer in answers]
    assert found == [text.split("=")[0].split("+")[0] for text in whole]
    assert model.generate_until(requests("generate_until", *((text, free) for text in prompts))) == whole


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"agent": 3}, "there is no agent 3"),
        ({"agent": "agent-1"}, "there is no agent 'agent-1'"),
        ({"agnt": 1}, "agnt is no option of ci-llm"),
        ({"batch_size": "auto"}, "batch_size auto is no number"),
    ],
)
def test_what_the_model_is_not_is_refused(saved: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        of_crowd(saved, **arguments)


@pytest.mark.parametrize(
    "wanted",
    [{"num_beams": 4}, {"max_gen_toks": 5000}, {"do_sample": True, "temperature": 0.7}],
    ids=lambda wanted: next(iter(wanted)),
)
def test_what_the_crowd_cannot_generate_is_refused(saved: Path, wanted: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        of_crowd(saved, agent=0).generate_until(requests("generate_until", ("Ann has", {"max_gen_toks": 4, **wanted})))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tasks, with their rows."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\ntest_split: test\n"
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{data}{task}")
    return folder


def run_harness(words: Sequence[str]) -> int:
    """A trial for the fork server: the harness's command line; returns its exit code."""
    sys.argv = ["lm_eval", *words]
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_its_command_line_runs_on_the_crowd(
    server: ForkServer, saved: Path, crowd: Crowd, tasks: Path, tmp_path: Path
) -> None:
    words = ["run", "--model", "ci-llm", "--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", "2"]
    words += ["--model_args", f"pretrained={saved}", "--output_path", str(tmp_path / "out")]
    assert server.run(run_harness, tmp_path / "log", words=words) == [0], (tmp_path / "log").read_text()
    [results] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    assert {*found} == {*TASKS}
    model = of_crowd(saved)
    nats = model.loglikelihood_rolling(requests("loglikelihood_rolling", *((row["question"],) for row in ROWS)))
    size = sum(len(row["question"].encode()) for row in ROWS)
    assert found["stories_text"]["bits_per_byte,none"] == pytest.approx(-sum(nats) / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--tasks", "stories_nats", "--model_args", "pretrained=FOLDER"],
            "error: there is no checkpoint at this path",
        ),
        (["--tasks", "stories_nats", "--model_args", "pretrained=FOLDER,agnt=1"], "error: agnt is no"),
    ],
)
def test_a_wrong_call_is_one_message(
    words: list[str], message: str, server: ForkServer, tasks: Path, tmp_path: Path
) -> None:
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    words = ["run", "--model", "ci-llm", "--include_path", str(tasks), *words]
    [code] = server.run(run_harness, tmp_path / "log", words=words)
    assert code > 0
    told = (tmp_path / "log").read_text()
    assert message in told
    assert "Traceback" not in told


def test_an_exported_agent_has_the_same_figures_under_the_harness_s_own_model(saved: Path) -> None:
    ours = of_crowd(saved, agent=1)
    theirs = HFLM(pretrained=str(BASE_FOLDER), peft=str(saved / "agent1"), dtype="float32", device="cpu", batch_size=3)
    pairs = requests("loglikelihood", *((row["question"] + "\n", row["answer"]) for row in ROWS))
    one, other = (model.loglikelihood(pairs, disable_tqdm=True) for model in (ours, theirs))
    assert [nats for nats, _ in one] == pytest.approx([nats for nats, _ in other], abs=1e-3)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in other]
    texts = requests("loglikelihood_rolling", *((row["question"],) for row in ROWS))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts, True), abs=1e-3)
    prompts = [(row["question"] + "\n", {"until": ["="], "max_gen_toks": 12}) for row in ROWS]
    generated = [model.generate_until(requests("generate_until", *prompts)) for model in (ours, theirs)]
    assert generated[0] == generated[1]
