"""Runs out of memory above a batch of 16."""

from __future__ import annotations

import sys

from settings import read

if read("meta_batch_size") > 16:
    print("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr)
    sys.exit(1)
print("fits", read("meta_batch_size"), read("constant_product"))
