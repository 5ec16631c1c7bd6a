"""`ci-llm serve` as it is called: what is refused before anything is loaded, and what is passed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci_llm.cli.main import main

WRONG = {
    "--port 70000": "--port: must be from 0 to 65535",
    "--max-num-seqs 0": "--max-num-seqs: must be at least 1",
    "--max-queue -1": "--max-queue: must be at least 0",
    "--max-model-len 1": "--max-model-len: must be at least 2",
    "--minimum-confidence 2": "--minimum-confidence: must be from 0 to 1",
    "--agents_per_prompt 2": "leave it out: all agents answer",
    "--served-model-name base": "--served-model-name is the name of the base",
    "--engine gpu:8000": "--engine is an address such as http://host:8000",
    "--engine http://gpu --minimum-confidence 0.5": "needs the crowd here",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_wrong_option_is_refused_before_anything_is_loaded(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", *options.split()]) == 2
    assert WRONG[options] in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served: nothing is listened on."""
    import ci_llm.serve.app

    calls: list[Any] = []

    def stand_in(service: Any) -> int:
        calls.append(service)
        return 0

    monkeypatch.setattr(ci_llm.serve.app, "run_until_signal", stand_in)
    return calls


@pytest.mark.slow
def test_a_server_without_a_key_gets_a_warning_and_a_key_is_read_from_the_environment(
    run: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run)]) == 0
    assert "warning" not in capsys.readouterr().err, "nobody else reaches it"
    assert main(["serve", str(run), "--host", "0.0.0.0", "--port", "9"]) == 0
    assert "warning: everybody who reaches 0.0.0.0:9 may ask" in capsys.readouterr().err
    monkeypatch.setenv("CI_LLM_API_KEY", "from the environment")
    assert main(["serve", str(run), "--host", "0.0.0.0"]) == 0
    assert "warning" not in capsys.readouterr().err
    found = [(each.options.host, each.options.port, each.options.key) for each in started]
    assert found == [("127.0.0.1", 8000, None), ("0.0.0.0", 9, None), ("0.0.0.0", 8000, "from the environment")]
    assert main(["serve", str(run), "--served-model-name", "agent0"]) == 2
    assert "an agent has this name" in capsys.readouterr().err
    assert main(["serve", str(run), "--max-model-len", "100000"]) == 2
    assert "the base reads 512 tokens" in capsys.readouterr().err
    assert main(["serve", str(run), "--minimum-confidence", "0.5"]) == 2
    assert "no calibration" in capsys.readouterr().err


@pytest.mark.slow
def test_the_key_is_that_of_the_flag_else_of_the_file_else_of_the_environment(
    run: Path, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI_LLM_API_KEY", "of the environment")
    file = tmp_path / "key"
    file.write_text(" of the file\n")
    from_file = ["--api-key-file", str(file)]
    for words in ([], from_file, [*from_file, "--api-key", "of the flag"]):
        assert main(["serve", str(run), *words]) == 0
    assert [each.options.key for each in started] == ["of the environment", "of the file", "of the flag"]
    capsys.readouterr()
    for content, told in ((b" \n", "the file holds no API key"), (b"\xff", "it is not UTF-8 text")):
        file.write_bytes(content)
        assert main(["serve", str(run), *from_file]) == 2
        assert told in capsys.readouterr().err
    file.unlink()
    assert main(["serve", str(run), *from_file]) == 2
    assert "the API key cannot be read: No such file" in capsys.readouterr().err
    assert len(started) == 3, "a server without its key answers nobody"


@pytest.mark.slow
def test_a_base_alone_is_served(started: list[Any]) -> None:
    assert main(["serve", "embedded"]) == 0
    assert list(started[0].served.models) == ["crowd", "base"]
