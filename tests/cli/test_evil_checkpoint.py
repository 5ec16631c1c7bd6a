"""A checkpoint with code and unlisted files, through every verb that takes a RUN: from disk, a mirror and a hub."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ci_llm.base.load import load_base
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.config.parsing import kinds_of
from ci_llm.config.schema import AllKeys
from ci_llm.core import imports
from ci_llm.crowd import given_path, pretrained
from ci_llm.crowd.adapter_files import read_adapters
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import META
from ci_llm.data.prompts import tokenizer_files

EVIL = "evil_module:f"
VERBS = {
    "generate RUN hi --max-new-tokens 2": 0,
    "chat RUN --max-new-tokens 2": 0,
    "score RUN hi": None,
    "evaluate RUN --max-samples 2 max_new_tokens_eval=2 --output NEW": 0,
    "serve RUN": 0,
    "export RUN --to NEW": 0,
    "report RUN": None,
    "compare RUN RUN": None,
    "status RUN": None,
    "watch RUN": None,
    "push RUN --to hub:user/name": None,
    "agents stop RUN 0": None,
    "checkpoints list RUN": None,
    "checkpoints verify RUN": None,
    "checkpoints diff RUN RUN": None,
    "checkpoints import RUN --to NEW": None,
    "checkpoints pull RUN --to NEW": None,
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the attacker's module writes when it is imported."""
    code = tmp_path / "code"
    code.mkdir()
    text = f"open({str(tmp_path / 'marker')!r}, 'w').close()\ndef f(e):\n    return -e.means[:, 0::2]\n"
    (code / "evil_module.py").write_text(text)
    monkeypatch.syspath_prepend(code)
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    monkeypatch.setattr(imports, "_NAMED", set())
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "marker"


@pytest.fixture
def run(crowd: Crowd, marker: Path, tmp_path: Path) -> Path:
    """A run whose only checkpoint names code; its digests are right."""
    rows = tmp_path / "pairs.jsonl"
    pair = {"prompt": "Ann has 3 pens.", "chosen": "She has 3.", "rejected": "She has 4."}
    rows.write_text("".join(json.dumps({**pair, "prompt": f"{k} pens"}) + "\n" for k in range(4)))
    keys = {"dataset_name": str(rows), "eval_dataset_name": str(rows), "max_seq_length": 64}
    text = Config(objective="dpo", num_agents=3, **keys).dump()
    assert 'objective: "dpo"' in text
    assert crowd.prompter is not None
    tokenizer = {f"tokenizer/{name}": data for name, data in tokenizer_files(crowd.prompter.tokenizer).items()}
    state: dict[str, Any] = {**crowd.adapter_files(), META: crowd.meta(load_base("embedded").fingerprint), **tokenizer}
    state |= {"config.yaml": text.replace('objective: "dpo"', f'objective: "{EVIL}"').encode(), "README.md": b"hello"}
    write_checkpoint(tmp_path / "run/checkpoint_step_7", state, step=7)
    return tmp_path / "run"


def add_unlisted(checkpoint: Path) -> None:
    templates = checkpoint / "tokenizer/additional_chat_templates"
    templates.mkdir()
    (templates / "default.jinja").write_text("evil")
    (checkpoint / "tokenizer/special_tokens_map.json").write_text('{"eos_token": "evil"}')
    (checkpoint / "evil.pkl").write_bytes(b"evil")


def call(verb: str, run: object, new: Path) -> int:
    return main([str(run) if word == "RUN" else str(new) if word == "NEW" else word for word in verb.split()])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("source", ["disk", "mirror", "hub"])
def test_no_verb_runs_code_or_reads_unlisted_files_of_a_checkpoint(
    source: str,
    run: Path,
    marker: Path,
    crowd: Crowd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    import ci_llm.serve.app

    monkeypatch.setattr(ci_llm.serve.app, "run_until_signal", lambda _: 0)
    given: object = run
    if source == "mirror":
        given = f"file://{tmp_path}/mirror"
        assert main(["checkpoints", "push", str(run), str(given)]) == 0
    else:
        add_unlisted(run / "checkpoint_step_7")
    if source == "hub":
        given = "somebody/crowd"
        for module in (given_path, pretrained):
            monkeypatch.setattr(module, "fetch", lambda *_: run / "checkpoint_step_7")
    for number, (verb, code) in enumerate(VERBS.items()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        try:
            found = call(verb, given, tmp_path / f"new{number}")
        except SystemExit as left:
            found = int(left.code or 0)
        told = capsys.readouterr()
        assert not marker.exists(), verb
        assert code is None or found == code, (verb, told.err)
    opened = pretrained.open_pretrained(str(given) if source != "disk" else run)
    assert crowd.prompter is not None
    assert opened.prompter.tokenizer.eos_token == crowd.prompter.tokenizer.eos_token
    assert opened.prompter.tokenizer.chat_template == crowd.prompter.tokenizer.chat_template
    if source != "mirror":
        assert "evil.pkl" in caplog.text


def test_adapters_of_a_checkpoint_are_those_of_its_manifest(run: Path, marker: Path) -> None:
    agents = run / "checkpoint_step_7"
    shutil.copytree(agents / "agent0", agents / "agent3")
    assert len(read_adapters(agents)) == 3
    assert not marker.exists()


def test_the_loss_of_a_checkpoint_is_taken_from_the_command_line(run: Path, marker: Path, tmp_path: Path) -> None:
    words = "evaluate RUN --max-samples 2 max_new_tokens_eval=2 --output NEW"
    assert call(f"{words} objective=dpo", run, tmp_path / "new") == 2
    assert not marker.exists()
    assert call(f"{words} objective={EVIL}", run, tmp_path / "new") == 0
    assert marker.exists()


#: Keys of free text that name no code, file or command.
WORDS = {
    *("lora_target_modules", "loss_type", "dataset_subset", "dataset_split", "eval_split", "prompt_column"),
    *("answer_column", "text_column", "chat_date", "label_names"),
}


def test_every_key_that_may_name_code_or_a_file_is_in_the_table_of_security() -> None:
    text = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for cell in table for name in cell.split(",")}
    free = {
        key
        for key, field in AllKeys.model_fields.items()
        if any(str in (kind.type, kind.item and kind.item.type) for kind in kinds_of(field))
    }
    assert free - WORDS == named - {"CI_LLM_PUBLISH", "callbacks"}
