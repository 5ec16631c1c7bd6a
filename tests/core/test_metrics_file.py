"""metrics.jsonl as every program reads it: whole records only, with strings for numbers that JSON does not have."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ci_llm.core.run_folder import METRICS_NAME, number, read_records, record_of

TORN = [
    b"",
    b'{"step": 1',
    b"[]",
    b"3",
    b'{"loss": 1}',
    b'{"step": "1"}',
    b"\xff",
    b'{"step": 1, "time": "late"}',
]


@pytest.mark.parametrize("line", [*TORN, b"[" * 100_000])
def test_a_line_that_is_torn_or_has_no_step_is_not_a_record(line: bytes) -> None:
    assert record_of(line) is None


@pytest.mark.parametrize("value", ["x", None, 10**400])
def test_a_value_that_is_no_number_counts_as_nan(value: object) -> None:
    assert math.isnan(number(value))


def test_records_come_in_order_and_torn_lines_are_counted(tmp_path: Path) -> None:
    assert read_records(tmp_path) == ([], 0)
    (tmp_path / METRICS_NAME).write_text('{"step": 2, "time": 1.5}\n{"step": 1}\n{"st\n{"step": 3}\n{"step": 4, "lo')
    records, torn = read_records(tmp_path)
    assert [record["step"] for record in records] == [2, 1, 3]
    assert torn == 2
