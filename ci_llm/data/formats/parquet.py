"""Parquet files: every row of the file is a row."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".parquet",), partial(with_builder, "parquet"))
