"""Plain text files: every line is a row."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".txt",), partial(with_builder, "text"))
