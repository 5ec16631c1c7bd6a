"""Runs that launchers start from their command line, watched from within their processes: rows, and what befalls them.

The processes of a launcher are no children that a test could forbid or tell anything. So a file that each Python reads
at its start (AT_START, see tests/support/start) waits until the run imports its loop, and looks at every micro-step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tests.support.children import ROOT, SCRIPTS, Child

#: `ACT` is called with the number of each micro-step of training, counted from 1, before it.
_WATCH = """
import json, os, signal, sys, time

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "ci_llm.run.loop":
            sys.meta_path.remove(self)
            import torch
            from torch.nn.modules.module import register_module_forward_pre_hook
            seen = []
            def look(module, inputs):
                if type(module).__name__ != "Crowd" or not torch.is_grad_enabled():
                    return
                from tools.testbed.events import new_rows
                if rows := new_rows(inputs[0]):
                    seen.append(rows)
                    with open({folder!r} + "/rows" + rank, "a") as file:
                        file.write(json.dumps(seen[-1]) + "\\n")
                    act(len(seen))
            register_module_forward_pre_hook(look)

def heard(kind):
    from ci_llm import interrupts
    while not getattr(interrupts._installed[0], kind):
        time.sleep(0.01)

def launcher():
    while not os.path.exists({folder!r} + "/launcher"):
        time.sleep(0.01)
    with open({folder!r} + "/launcher") as file:
        return int(file.read())

rank = os.environ.get("RANK", "")
def act(number):
    pass
{act}
if rank:
    sys.meta_path.insert(0, Watch())
"""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # a machine under load is slow, and nothing here is to be killed for it
}


def launch(folder: Path, launcher: list[str], words: list[str], act: str = "") -> Child:
    """Start train.py behind `launcher`, whose first word is a script of the environment.

    Args:
        act: source of `act(number)` in each process; it knows `rank`, `launcher()`, the pid of the launcher, and
            `heard("stop_reason")`, which returns when this process knows of the signal.
    """
    (folder / "watch.py").write_text(_WATCH.format(folder=str(folder), act=act))
    (folder / "launcher").unlink(missing_ok=True)
    environment = {**ENVIRONMENT, "AT_START": str(folder / "watch.py")}
    child = Child(SCRIPTS / launcher[0], *launcher[1:], ROOT / "train.py", *words, env=environment)
    (folder / "pid").write_text(str(child.pid))
    (folder / "pid").rename(folder / "launcher")
    return child


def micro_steps(folder: Path) -> list[list[list[int]]]:
    """The rows of each micro-step, by process."""
    found: dict[int, list[list[int]]] = defaultdict(list)
    for path in sorted(folder.glob("rows*")):
        for number, line in enumerate(path.read_text().splitlines()):
            found[number].append(json.loads(line))
    return [found[number] for number in sorted(found)]
