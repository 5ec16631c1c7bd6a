"""Python runs this file when it starts, because its folder is on PYTHONPATH. It waits for torch, then starts the probe.

It imports nothing of this project: the script under audit may run in another environment.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """A finder that finds nothing itself; once torch has been imported, it starts the probe."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # a library may only have asked whether there is a torch
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                import ci_llm_probe

                ci_llm_probe.install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_the_next_sitecustomize() -> None:
    """The one that would have run without this one."""
    others = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_next_sitecustomize()
if os.environ.get("CI_LLM_AUDIT_RECORD"):
    sys.meta_path.insert(0, _AfterTorch())
