"""A script with a checkpoint of its own, from which it resumes at --init_from=resume, and writes over from scratch.

Settings are globals. A word without = is a file of assignments, another word must be --key=value of a key that is
known and a value of its type. Lines of the file `faults` say at which step an attempt crashes.
"""

from __future__ import annotations

import os
import sys
from ast import literal_eval
from pathlib import Path

init_from = "scratch"
learning_rate = 1e-3
stable_below = 1.0
max_iters = 40
save_interval = 10

for word in sys.argv[1:]:
    if "=" not in word:
        assert not word.startswith("--")
        exec(Path(word).read_text())
        continue
    assert word.startswith("--"), word
    key, _, text = word[2:].partition("=")
    try:
        value = literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    assert type(value) is type(globals()[key])
    globals()[key] = value

checkpoint, faults = Path("out", "ckpt"), Path("faults")
checkpoint.parent.mkdir(exist_ok=True)
first = int(checkpoint.read_text()) if init_from == "resume" else 0
crash, *later = [*(faults.read_text().split() if faults.exists() else []), "-1"]
faults.write_text(" ".join(later))
print(f"{init_from} at step {first}", flush=True)
for step in range(first, max_iters + 1):
    if step == int(crash):
        sys.exit(f"lost a device at step {step}")
    if step % save_interval == 0:
        part = checkpoint.with_suffix(".part")
        part.write_text(str(step))
        os.replace(part, checkpoint)  # a kill leaves the old or the new one, and never an empty file
    print(f"iter {step}: loss {'nan' if learning_rate > stable_below else 0.5}, lr {learning_rate:.2e}", flush=True)
print("trained")
