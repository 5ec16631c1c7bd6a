"""Rows of mapped files: the same as those of the data set, within bounded memory."""

from __future__ import annotations

import pickle
import re
import tracemalloc
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from ci_llm.config import Config
from ci_llm.data import files as mapped_rows
from ci_llm.data.files import MappedRows, mapped
from ci_llm.data.sources import load_rows, mix, recognised

COUNT = 1050
MEGABYTE = 1 << 20


@pytest.fixture
def saved(tmp_path: Path) -> Dataset:
    """Rows of 20 kB in two files, read in stretches of a quarter of a megabyte."""
    rows = Dataset.from_dict({"number": range(COUNT), "text": [f"{n} {'word ' * 4000}" for n in range(COUNT)]})
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=2)
    return datasets.load_from_disk(str(tmp_path / "rows"))


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_rows, "STRETCH_BYTES", MEGABYTE // 4)


@pytest.mark.slow
@pytest.mark.usefixtures("short_stretches")
def test_rows_are_those_of_the_data_set(saved: Dataset) -> None:
    rows = mapped(saved)
    assert isinstance(rows, MappedRows)
    assert list(rows) == list(saved)
    assert [rows[3], rows[COUNT - 1]] == [saved[3], saved[COUNT - 1]]
    assert len(rows) == COUNT
    assert rows.column_names == ("number", "text")
    texts = rows.select_columns(["text"]).select([7, COUNT - 1, 0])
    assert list(texts) == [{"text": saved[n]["text"]} for n in (7, COUNT - 1, 0)]
    assert list(texts.select([2])) == [{"text": saved[0]["text"]}]
    assert list(pickle.loads(pickle.dumps(texts))) == list(texts)  # noqa: S301 - for a worker that is not forked


@pytest.mark.slow
def test_a_part_of_files_and_rows_in_memory_stay_as_they_are(saved: Dataset) -> None:
    shuffled = (saved.shuffle(seed=1), saved.shuffle(seed=1, keep_in_memory=True))
    for data in (*shuffled, saved.select(range(5)), saved.select([3, 1]), Dataset.from_list([{"text": "a"}])):
        assert list(mapped(data)) == list(data)


@pytest.mark.slow
@pytest.mark.usefixtures("short_stretches")
def test_pages_that_were_read_do_not_stay_resident(saved: Dataset) -> None:
    rows = mapped(saved)
    files = [Path(file["filename"]) for file in saved.cache_files]
    assert sum(file.stat().st_size for file in files) > 20 * MEGABYTE
    most = max(resident_of_mappings(files[0].parent) for number, _ in enumerate(rows) if number % 150 == 149)
    assert most < 8 * MEGABYTE


def resident_of_mappings(folder: Path) -> int:
    """Bytes that this process has resident of the files of a folder that it has mapped."""
    text = Path("/proc/self/smaps").read_text()
    return 1024 * sum(map(int, re.findall(rf" {re.escape(str(folder))}/.*\n(?:\w+:.*\n)*?Rss: +(\d+) kB", text)))


@pytest.mark.slow
def test_a_choice_of_rows_takes_a_few_bytes_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million rows then take megabytes, whether they are held out, joined or weighted."""
    Dataset.from_dict({"text": ["word"] * 20_000}).save_to_disk(str(tmp_path / "rows"))
    splits = {"train": mapped(datasets.load_from_disk(str(tmp_path / "rows")))}
    monkeypatch.setattr("ci_llm.data.sources.open_splits", lambda *_: splits)
    config = Config(val_set_size=0.4)  # the first one builds its schema
    tracemalloc.start()
    try:
        rows = load_rows(config, "train")
        kept, _ = tracemalloc.get_traced_memory()
        joined = mix([rows, rows], (1, 2), seed=1)
        with_both, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / len(rows) < 30
    assert (with_both - kept) / len(joined) < 40
    assert len(joined) == 2 * len(rows) == 24_000


@pytest.mark.slow
def test_a_mixture_of_files_keeps_order_and_places(saved: Dataset) -> None:
    parts = [recognised(mapped(saved), "a"), recognised(mapped(saved), "b").select([5, 4])]
    joined = mix(parts, None, seed=1)
    assert list(joined) == [*parts[0], *parts[1]]
    assert joined[COUNT + 1] == parts[1][1]
    assert joined.place(COUNT + 1) == "b, row 4 (counted from 0)"
