"""Tells how wide the terminal is, whenever that changes, until it is 120 columns wide."""

from __future__ import annotations

import os

last = 0
while last != 120:
    columns = os.get_terminal_size(1).columns
    if columns != last:
        print(f"columns: {columns}", flush=True)
    last = columns
