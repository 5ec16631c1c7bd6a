"""A run of which every call of Accelerate is counted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from tests.support.asked import train_asked

#: What the loop is built from, in the order of Accelerate's documentation.
CALLS = ("prepare", "skip_first_batches", "no_sync", "autocast", "backward", "reduce", "gather", "log", "init_trackers")


def train_traced(folder: str, arguments: list[str], asks: Sequence[Any] = (), fate: Any = None) -> int:
    """A trial for the fork server: `train_asked`, which leaves `calls_<rank>.json` in the folder.

    The file has how often each of `CALLS` was called, by name; `model`, the class of the prepared one; and `held`, how
    many models, optimizers and loaders the accelerator knew after each `prepare` of a model.
    """
    calls, model, held = Counter[str](), list[str](), list[tuple[int, int, int]]()

    def counted(name: str) -> Any:
        call = getattr(Accelerator, name)

        @wraps(call)
        def count(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            found = call(accelerator, *args, **kwargs)
            if name == "prepare" and isinstance(found, tuple):
                model[:] = [type(found[0]).__name__]
                held.append((len(accelerator._models), len(accelerator._optimizers), len(accelerator._dataloaders)))
            return found

        return count

    for name in CALLS:
        setattr(Accelerator, name, counted(name))
    code = train_asked(folder, arguments, asks, fate)
    told = {"calls": calls, "model": model, "held": held}
    Path(folder, f"calls_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))
    return code
