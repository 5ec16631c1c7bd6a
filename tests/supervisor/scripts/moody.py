"""Fails in another way at each launch: NaN, out of memory, a crash with a child left behind; then it is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from settings import read

counter = Path("launches")
launch = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(launch))
print(f"lr {read('learning_rate')} batch {read('meta_batch_size'):.0f}", flush=True)
if launch == 1:
    print("step 1 Loss=nan")
elif launch == 2:
    print("torch.OutOfMemoryError: CUDA out of memory.")
    sys.exit(1)
elif launch == 3:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    sys.exit("no weights found")
else:
    print("trained")
