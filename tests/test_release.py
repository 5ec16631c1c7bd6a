"""What an installed package brings along, and the lower ends at which a release is rehearsed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.release import lowest

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()

#: In an empty folder: the configuration of `ci-llm train`, that of a preset, and what `ci-llm supervise` starts.
INSTALLED = """
import json
from ci_llm.cli.supervise import _target
from ci_llm.config import default_file, load_config, read_config
from ci_llm.supervisor.options import parse_options
preset = read_config(default_file(), ["--config", "configs/qwen2.5_0.5b_gsm8k.yaml"]).config
command = _target(parse_options(["num_agents=2"])).begin_attempt()[0]
print(json.dumps([str(default_file()), load_config(default_file()).batch_size, preset.model_name, [*command]]))
"""


def test_every_dependency_has_a_lower_end() -> None:
    declared = re.search(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert declared is not None
    pins = lowest(PYPROJECT)
    assert len(pins) == declared[1].count("\n") > 15
    assert all(pin.replace("==", ">=") in declared[1] for pin in pins)


def test_the_package_brings_every_configuration_along() -> None:
    data = PYPROJECT.partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    patterns = re.findall(r'"([^"]+)"', data)
    brought = {file.name: file.read_bytes() for pattern in patterns for file in (ROOT / "ci_llm").glob(pattern)}
    for file in (ROOT / "configs.yaml", *(ROOT / "configs").glob("*.yaml")):
        assert brought[file.name] == file.read_bytes()


@pytest.mark.slow
def test_an_installed_package_finds_them_and_supervises_without_train_py(tmp_path: Path) -> None:
    """Without the checkout around it."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    shutil.copytree(ROOT / "ci_llm", site / "ci_llm", ignore=shutil.ignore_patterns("__pycache__"))
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site)}
    said = subprocess.check_output([sys.executable, "-c", INSTALLED], cwd=empty, env=environment, text=True)
    file, batch_size, base, command = json.loads(said)
    assert file == str(site / "ci_llm/config/shipped/configs.yaml")
    assert (batch_size, base) == (12, "Qwen/Qwen2.5-0.5B")
    assert command[1:5] == ["-m", "ci_llm", "train", "num_agents=2"]
