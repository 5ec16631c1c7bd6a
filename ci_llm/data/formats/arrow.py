"""Arrow files, as `datasets` writes them."""

from functools import partial

from ci_llm.data.formats import FileFormat, with_builder

format = FileFormat((".arrow",), partial(with_builder, "arrow"))
