"""Python runs this file when it starts, because its folder is on PYTHONPATH. It waits for torch, then starts the probe.

It imports nothing of this project: the script under audit may run in another environment.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """A finder that finds nothing itself; once torch has been imported, it starts the probe."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import ci_llm_probe

                ci_llm_probe.install(module)

            spec.loader.exec_module = exec_module
        return spec


def _run_the_next_sitecustomize():
    """The one that would have run without this one."""
    others = [place for place in sys.path if os.path.abspath(place) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_next_sitecustomize()
if os.environ.get("CI_LLM_AUDIT_RECORD"):
    sys.meta_path.insert(0, _AfterTorch())
