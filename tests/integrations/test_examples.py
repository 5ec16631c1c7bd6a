"""The examples do what they say: DDP has the gradients of one process, own loops end with the same bits, and a callback
and a notebook get through."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ci_llm import Config
from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from examples import accelerate_loop, callback, own_loop, rows_in_memory
from tests.support.campaign import sampled_cases
from tools.testbed.events import DEADLINE_S, wait_until_committed
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import interfere

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 4
ROWS_PER_STEP = 8


def watched_loop(folder: str, rows_per_process: int) -> int:
    """In a process of its own: the example, and what the optimizer was given at every step."""
    seen: dict[str, Tensor] = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen[f"gradient{len(seen):02}"] = torch.cat([p.grad.flatten() for p in parameters])

    torch.set_num_threads(1)
    register_optimizer_step_pre_hook(look)
    config = Config(
        max_train_samples=STEPS * ROWS_PER_STEP, batch_size=rows_per_process, lora_rank=4, learning_rate=4e-3
    )
    losses = torch.tensor(accelerate_loop.train(config, Path(folder)))
    gradients = torch.stack(list(seen.values()))
    index = os.environ.get("RANK", "0")
    save_file({"losses": losses, "gradients": gradients}, Path(folder, f"process{index}.safetensors"))
    return 0


def told(server: ForkServer, folder: Path, processes: int) -> list[dict[str, Tensor]]:
    """What each process of a world saw."""
    folder.mkdir()
    codes = server.run(
        watched_loop, folder / "log", ranks=processes, folder=str(folder), rows_per_process=ROWS_PER_STEP // processes
    )
    assert codes == [0] * processes, (folder / "log").read_text()
    return [load_file(folder / f"process{index}.safetensors") for index in range(processes)]


def test_two_processes_under_ddp_have_the_gradients_of_the_union_batch(server: ForkServer, tmp_path: Path) -> None:
    (alone,) = told(server, tmp_path / "one", 1)
    zero, one = told(server, tmp_path / "two", 2)
    assert torch.equal(zero["gradients"], one["gradients"])
    assert alone["gradients"].shape[0] == STEPS
    assert float(alone["gradients"].norm(dim=1).min()) > 0
    for ours, theirs in zip(zero["gradients"], alone["gradients"], strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4  # Adam turns a rounded sign into a full step
    torch.testing.assert_close(zero["losses"], alone["losses"], rtol=1e-5, atol=0)
    assert alone["losses"][-1] < alone["losses"][0]


LAST = own_loop.STEPS - 1


def own(folder: str, loop: str, sent: str | None = None, step: int = 0) -> int:
    """In a process of its own: a loop of the example, which sends itself a signal when it has taken `step`."""
    torch.set_num_threads(1)
    place = "ci_llm.checkpoints.manager.CheckpointManager.reached_preemption"
    if sent is not None:
        interfere(place, step + 1, lambda: os.kill(os.getpid(), signal.Signals[sent]))
    getattr(own_loop, loop)(Path(folder, "run"))
    return 0


@pytest.fixture(scope="module")
def straight(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """The last checkpoint of each undisturbed loop."""
    last = {}
    for loop, processes in (("torch_loop", 1), ("accelerate_loop", 2)):
        folder = tmp_path_factory.mktemp("straight")
        codes = server.run(own, folder / "log", ranks=processes, folder=str(folder), loop=loop)
        assert codes == [0] * processes, (folder / "log").read_text()
        last[loop, processes] = folder / "run" / f"checkpoint_step_{LAST}"
    return last


LOOPS = [(*loop, sent) for loop in (("torch_loop", 1), ("accelerate_loop", 2)) for sent in ("SIGKILL", "SIGTERM")]


@pytest.mark.parametrize(("loop", "processes", "sent"), sampled_cases(LOOPS, LOOPS[1:3]))
def test_own_loops_end_with_the_same_bits(
    loop: str, processes: int, sent: str, server: ForkServer, straight: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    how = {"ranks": processes, "folder": str(tmp_path), "loop": loop}
    codes = server.run(own, tmp_path / "log", sent=sent, step=25, **how)
    if sent == "SIGKILL":
        assert codes[0] == -signal.SIGKILL
        assert (tmp_path / "run" / "checkpoint_step_10").is_dir()
    else:
        assert codes == [0] * processes, (tmp_path / "log").read_text()
        newest = max(int(path.name.rpartition("_")[2]) for path in (tmp_path / "run").glob("checkpoint_step_*"))
        assert newest in (25, 26), "the step in which the signal came, or the next"
    assert server.run(own, tmp_path / "log", **how) == [0] * processes, (tmp_path / "log").read_text()
    ended = load_checkpoint(tmp_path / "run" / f"checkpoint_step_{LAST}")
    assert compare(ended, load_checkpoint(straight[loop, processes])).identical


def rows_of_a_frame(folder: str, stop: int | None) -> int:
    """In a process of its own: the example, killed after a step, or to its end."""

    class Kill:
        def on_step_end(self, args: object, state: Any, control: object, **_: Any) -> None:
            if state.global_step == stop:
                wait_until_committed(Path(folder), 2)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    os.environ["CI_LLM_CACHE"] = str(Path(folder).parent / "cache")
    few = {"max_train_steps": 4, "generation_eval_samples": 0, "report_to": "none", "save_steps": 2}
    result = rows_in_memory.train(Path(folder), callbacks=[Kill()], **few)
    return 0 if (result.status, [*result.history.index][-1]) == ("completed", 4) else 1


def test_rows_in_memory_that_are_killed_and_called_again_end_with_the_same_bits(
    server: ForkServer, tmp_path: Path
) -> None:
    log, killed, plain = tmp_path / "log", tmp_path / "killed", tmp_path / "plain"
    assert server.run(rows_of_a_frame, log, folder=str(killed), stop=3) == [-signal.SIGKILL]
    assert server.run(rows_of_a_frame, log, folder=str(killed), stop=None) == [0], log.read_text()
    assert server.run(rows_of_a_frame, log, folder=str(plain), stop=None) == [0], log.read_text()
    assert all(line.startswith("warning: ") for line in log.read_text().splitlines()), "it is quiet"
    assert compare(*(load_checkpoint(run / "final_checkpoint") for run in (killed, plain))).identical


# A callback, and a notebook


def with_a_callback(folder: str) -> int:
    """In a process of its own: a run that the callback of the example ends, and the rest of it."""
    few = {"lora_rank": 2, "batch_size": 2, "eval_samples": 4, "generation_eval_samples": 0, "num_workers": 0}
    few |= {"max_train_samples": 12, "eval_steps": 2, "max_train_steps": 6}
    eager, patient = callback.EnoughForMe(nll=1e9), callback.EnoughForMe(nll=0.0)
    assert callback.train(Path(folder), eager, **few) == "interrupted"
    assert callback.train(Path(folder), patient, **few) == "completed"
    assert [step for step, _ in (*eager.history, *patient.history)] == [2, 4, 6]
    assert all(nll > 0 for _, nll in patient.history)
    return 0


def test_a_callback_ends_a_run_and_the_rest_is_trained_without_it(server: ForkServer, tmp_path: Path) -> None:
    codes = server.run(with_a_callback, tmp_path / "log", folder=str(tmp_path / "run"))
    said = (tmp_path / "log").read_text()
    assert codes == [0], said
    assert "2 agents, 2 of 6 steps: " in said
    assert re.search(r"2 agents, 6 of 6 steps: \d+\.\d+ at step 4, \d+\.\d+ at step 6", said)


def test_the_notebook_trains_asks_and_exports(tmp_path: Path) -> None:
    """The notebook runs unchanged, except for fewer steps and rows."""
    missing = "there is no nbclient or ipykernel; pip install nbclient ipykernel"
    nbclient, _ = pytest.importorskip("nbclient", reason=missing), pytest.importorskip("ipykernel", reason=missing)
    book = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    for key, fewer in {"max_train_steps": 4, "eval_samples": 4, "generation_eval_samples": 2}.items():
        book.cells[1].source, found = re.subn(rf"\b{key}=\d+", f"{key}={fewer}", book.cells[1].source)
        assert found == 1
    where = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(book, timeout=DEADLINE_S, kernel_name="python3", resources=where).execute()
    said = [
        "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in done.cells
        if cell.cell_type == "code"
    ]
    assert "status='completed', step=4" in said[0]
    assert re.fullmatch(r"agents( \d\.\d{3}){4}\ncrowd  \d\.\d{3}\n", said[1])
    assert re.search(r"^agreement .*, disagreement \d\.\d{3}$", said[2], re.MULTILINE)
    assert len(re.findall("^agent[0-3]: ", said[2], re.MULTILINE)) == 4
    assert said[3].count("/adapter_model.safetensors") == 4
    assert all((tmp_path / "agents" / f"agent{k}" / "adapter_config.json").is_file() for k in range(4))
