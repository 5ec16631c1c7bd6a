"""`ci-llm evaluate`: the figures of the run's own evaluation, other rows, a kill in the middle, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm import embedded
from ci_llm.cli.evaluate import _Tenths
from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.core.durable import read_json
from ci_llm.core.work import Work
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.metrics import METRICS, answer_reader
from ci_llm.crowd.questions import Questions
from ci_llm.crowd.scoring import score
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Encoder
from ci_llm.data.rows import Completion
from ci_llm.embedded import rows as embedded_rows
from ci_llm.evaluation import loading
from ci_llm.evaluation.loading import Request
from ci_llm.evaluation.saved_crowd import _lines
from ci_llm.report.facts import RunFacts
from ci_llm.report.page import render
from tests.evaluation.trials import evaluate, train
from tests.support.crowds import bits_in_company
from tools.testbed.forkserver import ForkServer

SHORT = "max_new_tokens_eval=12"


def asked(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    """What `ci-llm evaluate ... --json` prints."""
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The message of a call that ends with exit code 2."""
    assert main(["evaluate", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.lstrip().startswith("error: ")  # older libraries end the line of a bar first
    return said.err


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


# Rows of the run


@pytest.mark.slow
def test_the_run_s_own_rows_give_the_run_s_own_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = json.loads((run / "evaluation.json").read_text())
    found = asked(capsys, run)
    of_the_run = {"last_step", "agent_steps", "stopped_early", "best", "warning"}
    assert {key: found[key] for key in recorded if key not in of_the_run} == {
        key: value for key, value in recorded.items() if key not in of_the_run
    }
    assert (found["metric"], found["left_out"], found["resumed"]) == ("exact_match", 0, 0)
    answered = lines(run / "predictions.jsonl")
    assert recorded["base"]["exact_match"] == sum(row["base_correct"] for row in answered) / 7
    assert recorded["base"]["nll"] > max(recorded["nll"]["agents"]), "two steps have taught them something"
    assert (recorded["data"], recorded["learning_rates"]) == (["embedded, split test"], [Config().learning_rate] * 2)
    assert [row["correct"] for row in answered].count(False) == found["failed"]
    again = asked(capsys, run / "final_checkpoint")
    assert again["resumed"] == 7
    assert {key: again[key] for key in ("exact_match", "nll", "failed")} == {
        key: found[key] for key in ("exact_match", "nll", "failed")
    }
    said = refusal(capsys, run, "--metric", "string_match")
    assert "the predictions in this file are of metric exact_match and not string_match" in said
    assert "begin again with --overwrite" in said


@pytest.mark.slow
def test_the_report_shows_what_an_evaluation_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked(capsys, run, "--max-samples", "3")
    wrong, right, third = lines(run / "predictions.jsonl")
    changed = [wrong | {"correct": False}, right | {"correct": True}, third | {"correct": False}]
    write(run / "predictions.jsonl", *changed)
    with (run / "predictions.jsonl").open("a") as file:
        file.write('{"prompt": "of a killed eval')
    facts = RunFacts(run)
    assert len(facts.predictions) == 3
    page = render(facts)
    assert "<h3>Solved</h3>" in page
    assert "<h3>Failed</h3>" in page
    assert wrong["prompt"] in page
    assert f"(confidence {right['confidence']})" in page
    assert f"Answers of step {facts.status.step} of {run}, to rows of " in page


def test_every_tenth_of_long_work_is_shown_also_where_it_goes_on_in_leaps(capsys: pytest.CaptureFixture[str]) -> None:
    work, show = Work("score", 100, "rows"), _Tenths()
    work.began_at -= 60
    for done in (0, 32, 33, 64, 96):
        work.done = done
        show(work)
    assert capsys.readouterr().err.splitlines() == [f"score: {done} of 100 rows" for done in (32, 64, 96)]


# A base alone


@pytest.mark.slow
def test_a_base_alone_has_the_scores_that_a_crowd_on_it_says_of_its_base(
    saved: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_crowd = asked(capsys, saved, "--data", questions, "--output", "crowd.jsonl", SHORT)
    folder = tmp_path / "plain" / "base"
    shutil.copytree(embedded.BASE_FOLDER, folder)
    found = asked(capsys, folder, "--data", questions, SHORT)
    assert found["base"] == of_crowd["base"]
    assert found["exact_match"] == found["nll"] == {"agents": [], "crowd": None}
    assert (found["task"], found["n"], found["step"], "learning_rates" in found) == (str(questions), 10, 0, False)
    answers, beside = lines(tmp_path / "predictions.jsonl"), lines(tmp_path / "crowd.jsonl")
    assert [row["answer"] for row in answers] == [row["base"] for row in beside]
    assert [row["correct"] for row in answers] == [row["base_correct"] for row in beside]
    assert {json.dumps([row["agents"], row["agents_correct"]]) for row in answers} == {"[[], []]"}
    assert main(["evaluate", str(folder), "--data", str(questions), SHORT]) == 0
    said = capsys.readouterr().out
    assert "\nbase " in said
    assert "crowd" not in said.partition("resumed")[0]
    assert "no run of this program trained it" in refusal(capsys, "embedded")
    assert "this is not a checkpoint of a run" in refusal(capsys, "embedded", "--data", questions, "--calibrate")


# Free text


@pytest.mark.slow
def test_free_text_is_judged_by_its_nll_and_no_answer_is_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "Leo goes home and takes all of the books that are in the box"
    data = write(tmp_path / "long.jsonl", *({"question": f"What does {who} do?", "answer": answer} for who in "AB"))
    found = asked(capsys, run, "--data", data, SHORT, "--failed")
    assert (found["judged_by"], found["measured_by"], found["failed"], found["failed_rows"]) == (
        *("nll", "teacher_forcing"),
        *(0, []),
    )
    assert found["perplexity"]["base"] == pytest.approx(math.exp(found["base"]["nll"]))
    kept = lines(run / "predictions.jsonl")
    assert [(row["correct"], row["base_correct"], row["agents_correct"]) for row in kept] == [
        (None, None, [None] * 2)
    ] * 2
    assert main(["evaluate", str(run), "--data", str(data), SHORT]) == 0
    said = capsys.readouterr().out
    assert "perplexity" in said
    assert not [word for word in ("exact match", "failed", "confidence:") if word in said]
    page = render(RunFacts(run))
    assert '<h2 id="examples">Answers</h2>' in page
    assert "<h3>Failed</h3>" not in page
    told = refusal(capsys, run, "--data", data, "--calibrate", "--output", tmp_path / "other.jsonl")
    assert "neither right nor wrong" in told
    judged = asked(capsys, run, "--data", data, SHORT, "--metric", "exact_match", "--output", tmp_path / "exact.jsonl")
    assert (judged["judged_by"], judged["measured_by"], judged["failed"]) == ("exact_match", "generation", 2)


# Other rows


@pytest.mark.slow
def test_other_rows_are_asked_and_every_answer_is_kept(
    saved: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "mine.jsonl"
    found = asked(capsys, saved, "--data", questions, "--output", output, "--batch-size", "4", SHORT, "--failed", "2")
    rows = embedded_rows("test")[:10]
    assert (found["task"], found["n"], found["measured_by"]) == (str(questions), 10, "generation")
    kept = lines(output)
    assert [row["prompt"] for row in kept] == [row["question"] for row in rows]
    assert [row["reference"] for row in kept] == [row["answer"] for row in rows]
    crowd = Crowd.from_pretrained(saved)
    expected = crowd.generate([row["question"] for row in rows[:4]], max_new_tokens=12, details=True)
    for row, answer in zip(kept, expected, strict=False):
        assert (row["answer"], row["agents"]) == (answer.answer, [*answer.agents])
        assert row["confidence"] == pytest.approx(answer.confidence, abs=1e-5)
    read = answer_reader([row["answer"] for row in rows])
    for row in kept:
        wanted = read(row["reference"])
        assert row["correct"] == (read(row["answer"]) == wanted)
        assert row["agents_correct"] == [read(text) == wanted for text in row["agents"]]
    assert found["exact_match"]["crowd"] == sum(row["correct"] for row in kept) / 10
    failed = sorted((row for row in kept if not row["correct"]), key=lambda row: -row["confidence"])
    assert found["failed_rows"] == failed[:2]
    assert found["exact_match"]["crowd_minus_mean"]["interval95"] is None, "of ten rows"


@pytest.mark.slow
def test_the_table_names_who_answered_and_the_failed_rows(
    saved: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "mine.jsonl"
    words = ["evaluate", str(saved), "--data", str(questions), "--output", str(output), SHORT, "--max-samples", "5"]
    assert main([*words, "--failed", "1"]) == 0
    told = capsys.readouterr().out
    for name in ("agent0 ", "agent2 ", "agents, mean ", "majority vote ", "crowd ", "crowd - the agents' mean: "):
        assert f"\n{name}" in told
    kept = lines(output)
    drawn = [row["row"] for row in kept]
    assert len(drawn) == 5
    assert drawn == sorted({*drawn}), "in the order of the file"
    failed = max((row for row in kept if not row["correct"]), key=lambda row: row["confidence"])
    assert f"row {failed['row']} " in told
    assert f"failed: {sum(not row['correct'] for row in kept)} of 5 rows" in told
    assert " to 0." not in told, "five rows give no interval"
    assert main(words) == 0
    again = capsys.readouterr().out
    assert "resumed: 5 of 5 rows" in again
    assert "; --failed lists them" in again


@pytest.mark.slow
def test_the_metric_decides_what_is_right(
    saved: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [saved, "--data", questions, "--max-samples", "4", SHORT]
    whole = asked(capsys, *words, "--output", tmp_path / "a.jsonl", "--metric", "string_match")
    final = asked(capsys, *words, "--output", tmp_path / "b.jsonl")
    texts, read = lines(tmp_path / "a.jsonl"), answer_reader([], "string_match")
    assert [row["answer"] for row in texts] == [row["answer"] for row in lines(tmp_path / "b.jsonl")]
    assert [row["correct"] for row in texts] == [read(row["answer"]) == read(row["reference"]) for row in texts]
    assert whole["nll"] == final["nll"]
    assert (whole["metric"], final["metric"]) == ("string_match", "exact_match")


def test_string_match_looks_past_case_articles_punctuation_and_space() -> None:
    read = answer_reader(["anything"], "string_match")
    assert read(" The  Denver\nBroncos. ") == read("denver broncos") == "denver broncos"
    assert read("There") == "there"
    assert read("a-b") != read("a b")
    assert METRICS[0] == "exact_match"


@pytest.mark.slow
def test_plain_text_gives_perplexity_and_bits_per_byte(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["Ann has 5 pens. Leo goes home.", "There are 4 books in the box of Jack. The day is warm."]
    data = write(tmp_path / "plain.jsonl", *({"text": text} for text in texts))
    found = asked(capsys, saved, "--data", data)
    crowd = Crowd.from_pretrained(saved)
    assert crowd.prompter is not None
    examples = [Encoder(crowd.prompter.tokenizer).encode(Completion(None, text)) for text in texts]
    expected = score(crowd, [pack(examples, [0, 1])], "probability")
    assert expected is not None
    nats, count = expected.nll.sum(1), int(expected.tokens.sum())
    size = sum(len(crowd.prompter.text(each.input_ids[1:].tolist()).encode()) for each in examples)
    assert (found["n"], found["tokens"], found["bytes"]) == (2, count, size)
    assert size <= sum(len(text.encode()) for text in texts)
    everyone = [*found["perplexity"]["agents"], found["perplexity"]["crowd"]]
    assert everyone == pytest.approx((nats / count).exp().tolist(), rel=1e-5)
    bits = [*found["bits_per_byte"]["agents"], found["bits_per_byte"]["crowd"]]
    assert bits == pytest.approx((nats / math.log(2) / size).tolist(), rel=1e-5)
    assert found["predictions"] is None
    assert main(["evaluate", str(saved), "--data", str(data)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert "plain text has no answers" in refusal(capsys, saved, "--data", data, "--output", tmp_path / "p.jsonl")


@pytest.mark.slow
def test_rows_that_leave_no_place_are_counted_and_not_asked(
    saved: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*lines(questions)[:2], {"question": "Ann has 1 pen. " * 200, "answer": "#### 1"}]
    data = write(tmp_path / "long.jsonl", *rows, {"question": "Ann has 1 pen?", "answer": ""})
    words = ["evaluate", str(saved), "--data", str(data), "--output", str(tmp_path / "p.jsonl"), SHORT]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "left out: 2 of 4 rows: 1 without an answer to learn, 1 whose answer begins after max_seq_length 512" in told
    assert len(lines(tmp_path / "p.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "kind"), [(0, "none"), (1, "some"), (2, "all")])
def test_copies_of_training_rows_do_not_count_as_held_out(
    copies: int, kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*embedded_rows("train")[:copies], *embedded_rows("test")[: 2 - copies]]
    found = asked(capsys, run, "--data", write(tmp_path / "rows.jsonl", *rows))
    assert found["rows_trained_on"] == kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "told"),
    [
        (0, "No row is left to evaluate: 1 of 1 rows: 1 whose answer begins after max_seq_length"),
        (2, "none of 1 rows has place for its answer within"),
    ],
)
def test_where_no_row_has_place_nothing_is_scored(
    place: int, told: str, saved: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = lines(questions)[0]
    data = write(tmp_path / "one.jsonl", row)
    prompter = Crowd.from_pretrained(saved).prompter
    assert prompter is not None
    limit = len(prompter.ids(row["question"])) + place
    assert told in refusal(capsys, saved, "--data", data, f"max_seq_length={limit}")


# A kill


@pytest.mark.slow
@bits_in_company
def test_a_killed_evaluation_resumes_and_leaves_the_same_bytes(
    server: ForkServer, saved: Path, questions: Path, tmp_path: Path
) -> None:
    whole, killed, log = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl", tmp_path / "log"
    words = [str(saved), "--data", str(questions), "--batch-size", "3", "max_new_tokens_eval=30", "--output"]
    assert server.run(evaluate, log, words=[*words, str(whole)]) == [0], log.read_text()
    for line, complete in ((4, 4), (3, 7)):  # in the middle of a batch; then again, after the resume
        assert server.run(evaluate, log, words=[*words, str(killed)], dies_at_line=line) == [-9], log.read_text()
        assert killed.read_bytes().count(b"\n") == complete
        assert not killed.read_bytes().endswith(b"\n")
    assert server.run(evaluate, log, words=[*words, str(killed)]) == [0], log.read_text()
    assert "resumed: 7 of 10 rows" in log.read_text()
    assert killed.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_continues_in_smaller_batches(
    server: ForkServer, saved: Path, questions: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = [str(saved), "--data", str(questions), "--batch-size", "8", SHORT, "--json", "--output"]
    assert server.run(evaluate, tmp_path / "ample", words=[*words, str(tmp_path / "ample.jsonl")]) == [0]
    assert server.run(evaluate, log, words=[*words, str(tmp_path / "short.jsonl")], most=2) == [0], log.read_text()
    assert "5 -> 2 at a time" in log.read_text()
    ample, found = (json.loads(path.read_text()[path.read_text().index("{\n") :]) for path in (tmp_path / "ample", log))
    assert found["exact_match"] == ample["exact_match"]
    assert found["nll"]["agents"] == pytest.approx(ample["nll"]["agents"])
    answers = [[row["answer"] for row in lines(tmp_path / f"{name}.jsonl")] for name in ("short", "ample")]
    assert answers[0] == answers[1]
    assert server.run(evaluate, log, words=[*words, str(tmp_path / "none.jsonl")], most=0) == [1]
    assert "memory ran out with one row at a time" in log.read_text()


# What is refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-samples", "0"], "--max-samples: must be at least 1"),
        (["--metric", "bleu"], "--metric: invalid choice: 'bleu'"),
        (["--abstain-below", "2"], "--abstain-below: must be from 0 to 1"),
        (["--agents-per-prompt", "2"], "leave it out: all agents answer"),
        (["more"], "'more' is neither a key nor a value"),
        (["learning_rate=1"], "learning_rate cannot be changed for an evaluation"),
        (["rewards=final_number"], "rewards judge the answers of agents that learned by rewards, and these did not"),
        (["agregator=logit"], "agregator is not a key"),
        (["--data", "missing.jsonl"], "the data set does not exist\n  where: --data: "),
        ([], "does not say which rows it is evaluated on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_call_is_one_message(
    words: list[str], told: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, saved, *words)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"question": "1+1?"}], "has no columns that can be used; it has: question."),
        ([{"question": "1+1?", "answer": ""}], "No row is left to evaluate: 1 of 1 rows: 1 "),
        ([], "The data set is empty."),
    ],
)
def test_rows_without_answers_are_refused_by_their_column(
    rows: list[dict[str, Any]], told: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.jsonl", *rows)
    said = refusal(capsys, saved, "--data", data, "--output", tmp_path / "p.jsonl")
    assert told in said
    assert not (tmp_path / "p.jsonl").exists()


def test_a_split_that_is_not_there_is_refused(saved: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, saved, "--data", questions, "--split", "tset")
    assert "has no split 'tset'" in said
    assert "--split" in said


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, tmp_path)
    assert "there is no checkpoint at this path" in told
    assert "evaluate, generate and chat also take a base" in told
    assert "there is no checkpoint at this path: it does not exist" in refusal(capsys, tmp_path / "missing")
    assert "not the URL of a mirror" in refusal(capsys, "ftp://bucket/run")


def test_a_file_of_something_else_is_refused_before_anything_is_loaded(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.jsonl").write_text("mine\n")
    monkeypatch.setattr(loading, "open_pretrained", None)
    said = refusal(capsys, saved, "--data", "embedded", "--output", tmp_path / "notes.jsonl")
    assert "not the predictions file of an evaluation" in said
    assert (tmp_path / "notes.jsonl").read_text() == "mine\n"


def test_agents_with_data_of_their_own_are_asked_the_rows_of_all_and_that_is_said() -> None:
    rows = SimpleNamespace(description=["2 rows"])
    job: Any = SimpleNamespace(
        tokenized=SimpleNamespace(rows=rows, description=["2 rows", "a template", "tokens", "an example"]),
        request=Request(run=""),
        questions=Questions([], [], [], str, frozenset()),
        config=Config(num_agents=2, agents=({"dataset_name": "a.jsonl"}, {"dataset_name": "b.jsonl"})),
    )
    assert any("each agent answers the rows of all agents" in line for line in _lines(job))
    job.config = job.config.model_copy(update={"eval_dataset_name": "c.jsonl"})
    assert _lines(job) == ["2 rows"], "one set scores all, here as in the run"


@pytest.mark.slow
def test_agents_with_data_of_their_own_are_asked_as_many_rows_as_in_the_run_by_their_names(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("a", 0), ("b", 100)):
        write(tmp_path / f"{name}.jsonl", *embedded_rows("train")[number : number + 40])
    agents = "[{name: easy, dataset_name: a.jsonl}, {name: rev, dataset_name: b.jsonl}]"
    keys = {"agents": agents, "val_set_size": 10, "generation_eval_samples": 3}
    log = tmp_path / "log"
    assert server.run(train, log, folder=str(tmp_path), **keys) == [0], log.read_text()
    own = read_json(tmp_path / "run/evaluation.json")
    assert (own["n"], [each["measured_by"] for each in own["sets"]]) == (6, ["teacher_forcing"] * 2)
    monkeypatch.chdir(tmp_path)
    record = asked(capsys, "run")
    assert (record["n"], record["names"]) == (6, ["easy", "rev"])
    assert main(["generate", "run", "hi", "--max-new-tokens", "2", "--agents"]) == 0
    told = capsys.readouterr().out
    assert [name for name in ("crowd", "easy", "rev") if f"{name} " in told] == ["crowd", "easy", "rev"]
    assert record["exact_match"]["crowd"] == own["exact_match"]["crowd"]
    asked_rows = [row["prompt"] for row in lines(tmp_path / "run/predictions.jsonl")]
    first = {row["question"] for row in lines(tmp_path / "a.jsonl")}
    assert [prompt in first for prompt in asked_rows] == [True] * 3 + [False] * 3, "three of each set"


# How sure it is


@pytest.mark.slow
def test_a_calibration_is_kept_with_the_run_and_used_by_every_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = asked(capsys, run)["sureness"]
    assert before["by"] == "confidence"
    found = asked(capsys, run, "--calibrate", "--abstain-below", "0")
    assert found["resumed"] == 7, "the answers that are there are used"
    assert found["calibration"] == str(run / "calibration.json")
    made = Calibration.of(read_json(run / "calibration.json"))
    assert (made.rows, made.aggregator) == (7, "probability")
    assert made.weights == json.loads((run / "predictions.source.json").read_text())["weights"]
    sure = found["sureness"]
    assert sure["by"] == "probability_right"
    assert sure["abstention"] == {"below": 0, "answered": 1, "exact_match": found["exact_match"]["crowd"]}
    again = asked(capsys, run)["sureness"]
    assert {key: again[key] for key in ("by", "auroc")} == {key: sure[key] for key in ("by", "auroc")}
    assert main(["evaluate", str(run), "--calibrate", "--batch-size", "1"]) == 0
    assert "\nprobability_right, " in capsys.readouterr().out
    [row] = lines(run / "predictions.jsonl")[:1]
    words = ["generate", str(run), row["prompt"], "--max-new-tokens", "12"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["probability_right"] == pytest.approx(made.right(row["signals"]), abs=1e-3)
    assert (answer["agents_asked"], answer["abstained"]) == (2, False)
    assert main([*words, "--abstain-below", "1"]) == 0
    assert capsys.readouterr().out == "\n", "a pipe gets a line per prompt"


def test_a_calibration_takes_rows_that_were_not_learned(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, run, "--split", "train", "--max-samples", "1", "--calibrate")
    assert "these rows were trained on" in said
    assert not (run / "calibration.json").exists()


def test_a_calibration_has_its_place_in_a_run_only(
    saved: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, saved, "--data", questions, "--calibrate")
    assert "a calibration is kept in the folder of a run" in said


@pytest.mark.slow
def test_a_distilled_agent_is_scored_beside_its_control(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{row['question']}\n" for row in embedded_rows("validation")[:3]))
    words = ["--merge", "distilled", "--steps", "2", "--prompts", str(prompts), "--to", str(tmp_path / "one")]
    assert main(["export", str(run), *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"agent0", "agent1", "crowd", "distilled", "own labels"} <= told["scores"].keys()
    assert (told["exported"], told["ranks"]) == ("distilled", [2])
    assert (tmp_path / "one" / "adapter_model.safetensors").is_file()
    card = (tmp_path / "one" / "README.md").read_text()
    assert "learned the distributions of 2 agents" in card
    assert "own labels" in card
