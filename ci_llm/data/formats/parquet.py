"""Parquet, one row of the file for each row."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".parquet",), partial(with_builder, "parquet"))
