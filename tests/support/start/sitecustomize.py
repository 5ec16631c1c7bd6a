"""How a Python starts that has this folder on its path: as if nothing but what `pip install ci-llm` brings were there.

Libraries import others where they find them: those that only extras bring cost each start of a trainer seconds. Then
runs the file that AT_START names, if it names one.
"""

import os
import sys

for name in ("bitsandbytes", "boto3", "scipy", "sklearn"):
    sys.modules[name] = None  # type: ignore[assignment]  as if it were not installed

if path := os.environ.get("AT_START"):
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), {"__name__": path})
