"""JSON: a list of rows, or one row per line."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".json", ".jsonl", ".ndjson"), partial(with_builder, "json"))
