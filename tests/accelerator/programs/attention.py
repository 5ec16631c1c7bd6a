"""Which kernels attention takes on a simulated GPU, in each way, for each dtype, with grouped heads and with a window.

It prints as JSON, for each case, the way that a run takes there, the kernels of that way, and those of a call for each
row, which it falls back to.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from ci_llm.lora.attention import choose_way, trial_inputs, trial_windows, with_gradients
from tools.testbed.accelerator.face import TRACE

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def taken(dtype: torch.dtype, groups: int, window: int | None) -> dict[str, Any]:
    """The way, and its kernels."""
    device = torch.device("cuda")
    shape: Any = SimpleNamespace(
        num_attention_heads=4, num_key_value_heads=groups, head_dim=32, hidden_size=128, sliding_window=window
    )
    TRACE.phase = "choosing"
    way, _ = choose_way(shape, device, dtype)
    kernels = {}
    for each in (way, "rows"):
        TRACE.phase = f"{dtype} {groups} {window} {each}"
        for own in trial_windows(shape):
            with_gradients(each, trial_inputs(shape, device, dtype), own)
        kernels[each] = sorted({kernel for phase, kernel, *_ in TRACE.attention if phase == TRACE.phase})
    return {"way": way, "kernels": kernels[way], "fallback": kernels["rows"]}


found = {
    f"{name}, {4 // groups} head(s) a key{', window' if window else ''}": taken(dtype, groups, window)
    for name, dtype in DTYPES.items()
    if name != "bf16" or torch.cuda.is_bf16_supported()
    for groups in (4, 2)
    for window in (None, 8)
}
print(f"\nfound {json.dumps(found)}")
