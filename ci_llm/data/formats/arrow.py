"""Arrow, as `datasets` writes it."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".arrow",), partial(with_builder, "arrow"))
