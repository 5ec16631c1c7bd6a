"""A real tqdm bar, bytes that are no text, and both streams."""

from __future__ import annotations

import os
import sys

from tqdm import tqdm

print(sys.stdout.isatty(), sys.stderr.isatty())
for _ in tqdm(range(3), mininterval=0, ascii=True):
    pass
sys.stdout.flush()
os.write(1, b"\xff\x00 \x1b[31mred\x1b[0m caf\xc3\xa9 no newline")
