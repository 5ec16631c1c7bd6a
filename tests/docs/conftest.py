"""The folder in which pages are run: like a checkout in which a few short runs have ended."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import ci_llm
from ci_llm.embedded import BASE_FOLDER
from tests.support.markdown import ROOT

#: A chat template that shows tools, their calls and their results, as those of instruct bases do.
SHOWS_TOOLS = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished runs that the pages use."""
    stage = tmp_path_factory.mktemp("stage")
    for name in ("configs.yaml", "train.py", "safe_train.py", "dry_run_sanity_check.py", "Makefile"):
        shutil.copy(ROOT / name, stage)
    for name in ("configs", "slurm", "examples"):
        shutil.copytree(ROOT / name, stage / name)
    keys: dict[str, Any] = {
        "max_train_samples": 9,
        "max_train_steps": 4,
        "batch_size": 2,
        "save_steps": 2,
        "eval_samples": 12,
        "num_workers": 0,
        "max_seq_length": 256,
        "report_to": "none",
        "generation_eval_samples": 4,
        "max_new_tokens_eval": 8,
        "logging_steps": 1,
    }
    run = ci_llm.train(keys, output_dir=stage / "ci_llm_output").folder
    for name in ("ci_llm_output/a", "ci_llm_output/b", "ci_llm_output/mine", "straight", "resumed"):
        shutil.copytree(run, stage / name, ignore=shutil.ignore_patterns("a", "b", "mine"))
    for k, name in enumerate(("my_adapter", "other_adapter")):
        shutil.copytree(run / f"final_checkpoint/agent{k}", stage / name)
    shutil.copytree(BASE_FOLDER, stage / "tool_base")
    (stage / "tool_base/chat_template.jinja").write_text(SHOWS_TOOLS)
    (stage / "fit.py").write_text("print('loss 0.1')\n")
    (stage / "my.yaml").write_text("optim:\n  lr: 1e-3\n")
    (stage / "my.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 20)
    (stage / "questions.jsonl").write_text('{"prompt": "Ann has 7 pens. Ann breaks 6. How many pens are left?"}\n')
    (stage / "my_test.jsonl").write_text('{"question": "2+1?", "answer": "3"}\n' * 4)
    (stage / "test.jsonl").write_text('{"question": "2+1?", "answer": "3"}\n' * 4)
    return stage


@pytest.fixture
def stage(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the current folder, with an adapter as another trainer leaves one."""
    shutil.copytree(finished, tmp_path / "stage", symlinks=True)
    shutil.copytree(tmp_path / "stage/ci_llm_output/final_checkpoint/agent0", tmp_path / "stage/trl_output")
    monkeypatch.chdir(tmp_path / "stage")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return tmp_path / "stage"
