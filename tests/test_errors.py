"""The first line of an error, whatever its message is."""

from __future__ import annotations

import pytest

from ci_llm.errors import BadInput, first_line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("connection closed\nframe #0"), "connection closed"),
        (RuntimeError("\n  connection closed\n"), "connection closed"),
        (RuntimeError(""), "RuntimeError"),
        (RuntimeError("\n"), "RuntimeError"),
        (MemoryError(), "MemoryError"),
        (BadInput("no such file", where="data.json", hint="give another"), "no such file"),
    ],
)
def test_an_error_has_a_first_line_even_without_a_message(error: Exception, told: str) -> None:
    assert first_line(error) == told
