"""An emergency save beside a step that the device has not finished: on which stream, and in which context, it saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ci_llm.run.emergency_save import EmergencySave

device = torch.device("cuda", 1)
torch.cuda.set_device(device)
weights = torch.ones(8, device=device)
processes = SimpleNamespace(is_main_process=True, num_processes=1, device=device)
attempt: Any = SimpleNamespace(
    config=None, processes=processes, interrupts=None, pace=None, finish_save_in_flight=lambda: None
)
saved: list[tuple[int, int]] = []


def save(_generators: list[Any]) -> None:
    stream = torch.cuda.current_stream()
    saved.append((stream.device_index, stream.stream_id))
    copy = torch.empty(8, pin_memory=True)
    copy.copy_(weights, non_blocking=True)
    stream.synchronize()
    assert copy.tolist() == [1.0] * 8


walltime: Any = SimpleNamespace(deadline=None)
emergency = EmergencySave(attempt, torch.optim.SGD([weights]), walltime, lambda: 1, save)
weights + 1  # work of the step that is given up, behind the boundary
emergency._save_boundary()
((index, stream),) = saved
assert index == 1
assert stream != 0, "the save is queued behind the step that is given up"
