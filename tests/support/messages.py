"""What this package says to people, in one golden file: a test asserts what an error is, and the file has its text.

    python -m tests.support.messages tests/config tests/data tests/cli

runs the tests of these paths and writes what they are told now into tests/messages.yaml, where a diff shows it. Any
other run of the tests compares, and has no option that writes. Type, place and exit code of an error are asserted in
the tests themselves; that its hint can be typed is asserted here.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from ci_llm.cli.main import COMMANDS, main
from ci_llm.config.foreign import FIELDS, resolve
from ci_llm.config.parsing import UNREADABLE, Entry, Scalar, read_value
from ci_llm.config.sweep import SweepKeys

ROOT: Final = Path(__file__).parents[2]
GOLDEN: Final = ROOT / "tests" / "messages.yaml"
HOW: Final = "python -m tests.support.messages {} writes it; read its diff"

_HINT = re.compile(r"^  hint:  (.*)", re.MULTILINE)
_COMMAND = re.compile(r"ci-llm ([a-z]+)((?: [^\s;,`]+)*)")
_OPTION = re.compile(r"(?<=\s)--[a-z][\w-]*")
_SETTING = re.compile(r"(?<![\w(.{-])(?!key=)([a-z][a-z0-9_]*)=([^\s,;:?`)]*)")
_LEFT_OPEN = re.compile(r"[A-Z|]*|.*\.\.\.|[\[{].*|.*\(.*")  # FILE, N, or the beginning of a list or a range


@cache
def golden(path: Path = GOLDEN) -> dict[str, dict[str, str]]:
    """By file of tests and test: what is told. Of several messages of a test the later ones have a number."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    texts: dict[str, dict[str, str]] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return texts


class Messages:
    """What one test is told, compared with the golden file.

    Args:
        file, test: the place in the golden file.
        places: texts that differ between runs, such as a temporary folder, and what stands for each in the file.
        recorded: takes the texts instead, where they are to be written.
    """

    def __init__(
        self, file: str, test: str, places: Mapping[str, str], recorded: dict[str, dict[str, str]] | None = None
    ) -> None:
        self._file, self._test, self._places, self._recorded, self._count = file, test, places, recorded, 0

    def same(self, told: BaseException | str, theirs: str | None = None) -> None:
        """Assert that this is what stands in the file, and that what its hint says to type can be typed.

        Args:
            theirs: a pattern of what another library says, which is not compared: its releases differ. The first group
                of the pattern stays.
        """
        self._count += 1
        name = self._test if self._count == 1 else f"{self._test} ({self._count})"
        text = str(told)
        for place, known in self._places.items():
            text = text.replace(place, known)
        text = re.sub(theirs, r"\1(...)", text) if theirs else text
        for hint in _HINT.findall(text):
            require_typable(hint)
        if self._recorded is not None:
            self._recorded.setdefault(self._file, {})[name] = text
            return
        known_text = golden().get(self._file, {}).get(name)
        assert text == known_text, f"{self._file} {name}: another message; {HOW.format(self._file)}"


def require_typable(hint: str) -> None:
    """Assert that commands, their options, and keys with their values, as a hint names them, are read here."""
    for verb, rest in _COMMAND.findall(hint):
        assert verb in COMMANDS, f"ci-llm {verb} in: {hint}"
        for option in _OPTION.findall(rest):
            assert option in _help(verb), f"ci-llm {verb} {option} in: {hint}"
    for key, value in _SETTING.findall(hint):
        if key in SweepKeys.model_fields:
            continue
        is_open = _LEFT_OPEN.fullmatch(value) is not None
        found = resolve(Entry(key, Scalar("null" if is_open else value), "hint"))
        assert found is not None, f"{key}={value} cannot be typed, in: {hint}"
        if found[0] in FIELDS and not is_open:
            assert read_value(FIELDS[found[0]], found[1].raw) is not UNREADABLE, (
                f"{key}={value} is read by nobody: {hint}"
            )


@cache
def _help(verb: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        main([verb, "--help", "all"])
    return told.getvalue()


class Recorder:
    """The plugin of pytest that lets the fixture `messages` record."""

    NAME: Final = "messages to be written"

    def __init__(self) -> None:
        self.recorded: dict[str, dict[str, str]] = {}


@pytest.fixture
def messages(request: pytest.FixtureRequest, tmp_path: Path) -> Messages:
    """Compares what the test is told with tests/messages.yaml."""
    recorder: Any = request.config.pluginmanager.get_plugin(Recorder.NAME)
    file = request.path.relative_to(ROOT).as_posix()
    places = {str(tmp_path): "TMP", str(ROOT): "HERE"}
    return Messages(file, request.node.name, places, recorder.recorded if recorder else None)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read, everything else as short as it can be."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def written(texts: Mapping[str, Any]) -> str:
    """The golden file that holds these texts."""
    return yaml.dump(dict(texts), Dumper=_Dumper, sort_keys=True, allow_unicode=True, width=10**6)


def record(paths: Sequence[str]) -> int:
    """Run the tests of these paths, and write what they are told; nothing is written if one fails."""
    recorder = Recorder()

    class Plugin:
        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(recorder, Recorder.NAME)

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = [item for item in items if "messages" in getattr(item, "fixturenames", ())]

    if code := pytest.main([*paths, "-q"], plugins=[Plugin()]):
        return int(code)
    before = golden() if GOLDEN.is_file() else {}
    GOLDEN.write_text(written({**before, **recorder.recorded}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
