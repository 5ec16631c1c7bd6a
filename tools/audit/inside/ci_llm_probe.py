"""The probe writes down what a training script does at its optimizer steps, through hooks of torch.

The script is not changed. The record is one file per process, one JSON object per line: `begin` before the first step,
then one `step` after each.

The probe imports nothing of this project: the script under audit may run in another environment.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TextIO

import ci_llm_digests as digests

RECORD, WATCH = "CI_LLM_AUDIT_RECORD", "CI_LLM_AUDIT_WATCH"
STEPS, STRIKE = "CI_LLM_AUDIT_STEPS", "CI_LLM_AUDIT_STRIKE"
#: What a script writes beside checkpoints.
_NO_CHECKPOINT = (".log", ".txt", ".json", ".jsonl", ".csv", ".yaml", ".md", ".py", ".pyc", ".lock", ".html")
_FRAMEWORKS = (
    ("ci_llm.run.loop", "ci_llm"),
    ("lightning.pytorch.trainer.trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "lightning"),
    ("transformers.trainer", "trainer"),
    ("accelerate.accelerator", "accelerate"),
)


def install(torch: Any) -> None:
    """Set the hooks. Called once, right after torch was imported."""
    Probe(torch).install()


class Probe:
    """What has been seen since the last optimizer step."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.file: TextIO | None = None
        self.pending: list[dict[str, Any]] = []
        self.pid = os.getpid()
        self.step, self.depth = 0, 0
        self.roots: list[Any] = []
        self.inside: set[int] = set()
        self.begun: set[int] = set()  # optimizers
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.cache = digests.Cache()
        self.limit = int(os.environ.get(STEPS, "0"))
        number, _, at = os.environ.get(STRIKE, "0@0").partition("@")
        self.strike, self.strike_at = int(number), int(at)
        self.files = self._checkpoints()
        self._forget()

    def _forget(self) -> None:
        self.rows: list[str] = []
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}

    def install(self) -> None:
        """Set every hook."""
        torch = self.torch
        from torch.nn.modules import module
        from torch.optim import optimizer

        module.register_module_forward_pre_hook(self._enter)
        module.register_module_forward_hook(self._leave, always_call=True)
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._watch_backward(torch.autograd.backward)
        self._note_places()

    # The forward pass

    def _enter(self, module: Any, arguments: Any) -> None:
        self.depth += 1
        if self.depth == 1 and self.torch.is_grad_enabled() and os.getpid() == self.pid:
            self._at_root(module, arguments)

    def _leave(self, module: Any, arguments: Any, output: Any) -> None:
        self.depth = max(0, self.depth - 1)

    def _at_root(self, module: Any, arguments: Any) -> None:
        if id(module) not in self.inside:
            if next(module.parameters(), None) is None:
                return  # a loss
            self.roots.append(module)
            self.inside |= {id(each) for each in module.modules()}
            if self.step == 0:
                buffers = [name for name, _ in module.named_buffers()]
                begun = {"state": self._state([module]), "buffers": buffers, "rounded": self._rounded(module)}
                self._write({"kind": "begin", **begun})
        elif not any(module is root for root in self.roots):
            return  # a part that is computed again, for its gradient
        if not self.seen:
            self.seen = {
                "generators": digests.generators(),
                "mode": digests.of_bytes(*(b"%d" % each.training for each in module.modules())),
                "dropout": any("Dropout" in type(each).__name__ and getattr(each, "p", 0) for each in module.modules()),
            }
        self.rows += self._rows_of(module, arguments)

    def _rows_of(self, module: Any, arguments: Any) -> list[str]:
        # Global hooks are given the positional arguments only: those by name come through the frame of the call.
        frame: FrameType | None = sys._getframe()
        named: dict[str, Any] = {}
        while frame is not None:
            if frame.f_code.co_name in ("_call_impl", "inner") and frame.f_locals.get("self") is module:
                named = frame.f_locals.get("kwargs") or {}
                break
            frame = frame.f_back
        rows: list[str] = digests.rows_of({"": arguments, **named})
        return rows

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *rest: Any, **named: Any) -> Any:
            if os.getpid() == self.pid:
                for tensor in [tensors] if isinstance(tensors, self.torch.Tensor) else tensors:
                    if tensor.numel() == 1:
                        self.losses.append(float(tensor.detach()))
            return original(tensors, *rest, **named)

        return backward

    # The step

    def _before_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if id(optimizer) not in self.begun and os.getpid() == self.pid:
            self.begun.add(id(optimizer))
            if self.step == 0 or len(self.begun) > 1:
                self._write({"kind": "begin", "moments": digests.moments(optimizer)})

    def _after_step(self, optimizer: Any, arguments: Any, named: Any) -> None:
        if os.getpid() != self.pid:
            return
        self.step += 1
        files = self._checkpoints()
        grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        line = {
            "kind": "step",
            "step": self.step,
            "time": time.time(),
            "rows": self.rows,
            "losses": self.losses,
            **self.seen,
            "scale": [[scaler.get_scale(), scaler._get_growth_tracker()] for scaler in self.scalers],
            "lr": [float(group["lr"]) for group in optimizer.param_groups],
            "settings": digests.settings(optimizer),
            "moments": digests.moments(optimizer),
            "grads": digests.of_bytes(*(digests.of_tensor(grad).encode() for grad in grads if grad is not None)),
            "state": self._state(self.roots) | self._loose(optimizer),
            "saved_before": files != self.files,
        }
        self.files = files
        self._forget()
        self._write(line)
        if self.step == self.strike_at:
            os.kill(os.getpid(), self.strike)
        if self.step == self.limit:
            self._write({"kind": "enough"})
            sys.stdout.flush()
            os._exit(0)

    def _state(self, roots: Sequence[Any]) -> dict[str, str]:
        """{name: digest} of all parameters and buffers that the model has."""
        found = {}
        for number, root in enumerate(roots):
            prefix = f"{type(root).__name__}{number}." if len(self.roots) > 1 else ""
            for name, tensor in (*root.named_parameters(), *root.named_buffers()):
                found[prefix + name] = self.cache.of(tensor)
        return found

    def _loose(self, optimizer: Any) -> dict[str, str]:
        """Parameters that belong to no module that was seen."""
        known = {id(parameter) for root in self.roots for parameter in root.parameters()}
        listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            f"parameter {number}": self.cache.of(each) for number, each in enumerate(listed) if id(each) not in known
        }

    def _rounded(self, module: Any) -> list[str]:
        return [name for name, each in module.named_parameters() if digests.is_rounded(each)]

    # Around it

    def _checkpoints(self) -> dict[str, tuple[int, int]]:
        """What lies in the folder of the run, but for logs: {path: (time, size)}."""
        found = {}
        for folder, folders, names in os.walk(os.environ.get(WATCH, "")):
            folders[:] = [each for each in folders if each not in ("__pycache__", ".git")]
            for name in names:
                if name.endswith(_NO_CHECKPOINT) or name.startswith("events.out"):
                    continue
                try:
                    about = os.stat(os.path.join(folder, name))
                except OSError:
                    continue  # it was there a moment ago
                found[os.path.join(folder, name)] = (about.st_mtime_ns, about.st_size)
        return found

    def _note_places(self) -> None:
        """Note which lines of the script make loaders, optimizers, schedulers and scalers, save, and load."""
        torch = self.torch
        from torch.amp import grad_scaler
        from torch.optim import lr_scheduler, optimizer
        from torch.utils.data import dataloader

        for owner, name, what in (
            (dataloader.DataLoader, "__init__", "data"),
            (optimizer.Optimizer, "__init__", "optimizer"),
            (lr_scheduler.LRScheduler, "__init__", "scheduler"),
            (grad_scaler.GradScaler, "__init__", "scaler"),
            (torch, "save", "save"),
            (torch, "load", "load"),
        ):
            setattr(owner, name, self._noting(getattr(owner, name), what))

    def _noting(self, original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(*arguments: Any, **named: Any) -> Any:
            if what == "scaler":
                self.scalers.add(arguments[0])
            place = _their_line()
            if place and os.getpid() == self.pid:
                self._write({"kind": "place", "what": what, "at": place}, opens=False)
            return original(*arguments, **named)

        return noting

    def _write(self, line: dict[str, Any], opens: bool = True) -> None:
        """One line. The file is made when the first thing worth a file is seen: a launcher leaves none."""
        if self.file is None:
            if not opens:
                self.pending.append(line)
                return
            rank = os.environ.get("RANK", "0")
            self.file = open(os.path.join(os.environ[RECORD], f"process_{rank}.jsonl"), "a")  # noqa: SIM115
            for earlier in self.pending:
                self.file.write(json.dumps(earlier) + "\n")
        if line["kind"] == "begin":
            loaded = [name for module, name in _FRAMEWORKS if module in sys.modules]
            line["framework"] = loaded[0] if loaded else "torch"
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def _their_line() -> str | None:
    """The innermost line outside of installed packages: file:line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not ("site-packages" in file or file.startswith((sys.base_prefix, "<")) or "ci_llm_" in file):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return None
