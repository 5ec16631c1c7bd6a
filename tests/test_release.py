"""What an installed package brings along, and the lower ends at which a release is rehearsed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.release import dependencies

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


def test_the_package_brings_every_configuration_along() -> None:
    data = PYPROJECT.partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    patterns = re.findall(r'"([^"]+)"', data)
    brought = {file.name: file.read_bytes() for pattern in patterns for file in (ROOT / "ci_llm").glob(pattern)}
    for file in (ROOT / "configs.yaml", *(ROOT / "configs").glob("*.yaml")):
        assert brought[file.name] == file.read_bytes()


#: The oldest Python that pyproject.toml promises.
LEAST = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]  # type: ignore[index]
#: Packages whose private names are used: only minor releases that were tried are let in.
PRIVATE = ("accelerate", "peft", "torch")


OLDEST = {**default_environment(), "python_version": LEAST, "python_full_version": f"{LEAST}.0", "extra": ""}


def pins() -> dict[str, str]:
    """The version of every package in constraints.txt, as the oldest Python reads them."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = [Requirement(line) for line in lines if line]
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in pinned
        if one.marker is None or one.marker.evaluate(OLDEST)
    }


def test_the_pins_can_be_installed_on_the_oldest_python_promised() -> None:
    """Each one as its own metadata say, and everything that it needs there is a pin that it takes."""
    pinned, wrong, seen = pins(), list[str](), set[str]()
    for found in metadata.distributions():
        name = canonicalize_name(found.metadata["Name"])
        if pinned.get(name) != found.version.partition("+")[0] or name in seen:
            continue
        seen.add(name)
        needed = found.metadata["Requires-Python"] or ""
        if f"{LEAST}.0" not in SpecifierSet(needed):
            wrong.append(f"{name}: Python {needed}")
        needs = [one for one in map(Requirement, found.requires or []) if not one.marker or one.marker.evaluate(OLDEST)]
        versions = [(one, pinned.get(canonicalize_name(one.name))) for one in needs]
        wrong += [f"{name}: {one}" for one, pin in versions if pin and not one.specifier.contains(pin, True)]
    assert seen >= {canonicalize_name(each.name) for each in dependencies(PYPROJECT)}, "the pins are installed here"
    assert wrong == []


def test_packages_whose_private_names_are_used_have_an_upper_end_after_what_was_tried() -> None:
    pinned = pins()
    for each in dependencies(PYPROJECT):
        if each.name in PRIVATE:
            tried = Version(pinned[each.name])
            assert f"<{tried.major}.{tried.minor + 1}" in str(each.specifier), each
        if each.name in ("datasets", "transformers"):
            assert f"<{Version(pinned[each.name]).major + 1}" in str(each.specifier), each


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
