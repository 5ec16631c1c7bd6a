"""The functions of this package that compute in fp64 on a simulated GPU, in a run of two steps with an evaluation.

Devices such as Apple's have no fp64, and consumer cards a 64th of their speed. `wide.py WORDS` runs a command of ours
and prints the functions as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ci_llm.cli.main import main
from tools.testbed.accelerator.trace import place


class Wide(TorchDispatchMode):
    """Notes where a result is an fp64 tensor on the device.

    Attributes:
        places: the functions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.is_cuda and x.dtype == torch.float64 for x in tree_leaves(result)):
            self.places.add(place())
        return result


with Wide() as wide:
    code = main(sys.argv[1:])
print(f"\nfound {json.dumps(sorted(wide.places))}")
assert code == 0
