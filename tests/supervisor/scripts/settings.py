"""What the scripts of these tests share: they read their configuration as a stranger would, by regular expressions."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def read(key: str) -> float:
    """The value of `key` in the configuration that the command line names; an override wins."""
    words = sys.argv[1:]
    folder, name = words[words.index("--config-path") + 1], words[words.index("--config-name") + 1]
    text = Path(folder, f"{name}.yaml").read_text()
    overridden = [word.partition("=")[2] for word in words if word.partition("=")[0].endswith(key)]
    found = re.search(rf"\b{key}: ([^\s,}}]+)", text)
    assert found
    return float(overridden[-1] if overridden else found[1])
