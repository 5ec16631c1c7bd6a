"""The tests stand alone: they hear nothing of the job, launcher or account that they run in, and leave no rows at home.

A run that a test interrupts would else put the job of whoever tests back into SLURM's queue.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from ci_llm.core.imports import importing, set_library_defaults
from tests.support import campaign, skips
from tests.support.messages import messages as messages
from tools.testbed.forkserver import ForkServer

if TYPE_CHECKING:
    from tools.testbed.trials import Trials  # with torch, which most files do without

os.environ.setdefault("OMP_NUM_THREADS", "1")  # else a run would try how many are fastest, and bits follow the number
set_library_defaults()  # before a test imports what reads them, as every command does

# How long an example takes is the machine's affair; the first one of a fresh checkout reads all of Unicode.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell starts a job in the background with SIGINT ignored, which programs inherit: Ctrl-C would do nothing in a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "OMPI_", "ACCELERATE_", "TORCHELASTIC_", "TORCH_ELASTIC_", "WANDB_", "CI_LLM_")
WORLD = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
OF_A_TERMINAL = {"FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "COLUMNS"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run in full what is a sample otherwise")
    parser.addoption("--note-skips", type=Path, metavar="FILE", help="append what is skipped, and why, to a file")
    parser.addoption(
        "--fast-elsewhere", nargs="*", default=[], metavar="PATH", help="another process runs the fast tests of these"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of slow tests alone is not even imported for the fast ones: what some import takes seconds."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    return True if SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Objects that the imports make live as long as the process, and no search for garbage visits them."""
    with importing():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):  # its start costs more than most tests
            item.add_marker(pytest.mark.slow)
    campaign.mark_slow_cases(items)
    elsewhere = [Path(path).resolve() for path in config.option.fast_elsewhere]
    kept, left_out = [], []
    for item in items:
        (left_out if is_left_out(item, elsewhere) else kept).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):  # side by side: what takes long comes first, and many small files fill the end
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def is_left_out(item: pytest.Item, elsewhere: list[Path]) -> bool:
    """True if only a campaign runs it, or another process."""
    if not campaign.in_full and item.get_closest_marker("campaign"):
        return True
    return not item.get_closest_marker("slow") and any(item.path.is_relative_to(path) for path in elsewhere)


def pytest_configure(config: pytest.Config) -> None:
    campaign.in_full = config.getoption("--campaign")
    if config.option.note_skips and not hasattr(config, "workerinput"):  # what a worker skips is told to its controller
        config.pluginmanager.register(skips.Notes(config.option.note_skips))
    foreign = [name for name in os.environ if name.startswith(FOREIGN) or name in WORLD]
    for name in (*foreign, *OF_A_TERMINAL):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # those share what the process has that started them
        cache = tempfile.mkdtemp(prefix="ci-llm-tests-")
        os.environ["HF_DATASETS_CACHE"] = cache
        config.add_cleanup(partial(shutil.rmtree, cache, ignore_errors=True))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """The fork server of all tests that need no environment of their own."""
    with ForkServer("tools.testbed.trials", "tools.testbed.warm") as started:
        yield started


@pytest.fixture(scope="session")
def narrow_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What runs train of which nothing is asked but their bits, at half the cost; in a campaign the embedded base."""
    from tools.testbed.worlds import toy_base

    return "embedded" if campaign.in_full else str(toy_base(tmp_path_factory.mktemp("base") / "narrow"))


@pytest.fixture(scope="module")
def narrow(narrow_base: str) -> Iterator[None]:
    """That base for the runs of a file on which faults and signals strike, and for its sweeps."""
    from tests.support import faults
    from tests.sweep import trials
    from tools.testbed import moments

    with pytest.MonkeyPatch.context() as patch:
        for keys in (faults.KEYS, moments.KEYS, trials.KEYS):
            patch.setitem(keys, "model_name", narrow_base)
        yield


@pytest.fixture(scope="session")
def trials(server: ForkServer, narrow_base: str, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """Cells of all files: a reference is trained once."""
    from tools.testbed.trials import Trials

    return Trials(server, tmp_path_factory.mktemp("trials"), narrow_base)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For bits that are compared across shapes: how many threads share a product may depend on its size."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool_of_threads(threads_as_they_were: None) -> None:
    """A pool of torch that a forked process starts again: its threads are there before any code of a worker."""
    import torch

    for threads in (2, 1, 2):
        torch.set_num_threads(threads)


@pytest.fixture
def threads_as_they_were() -> Iterator[None]:
    """For runs in the process of the tests: a run sets threads and determinism for all that comes after it."""
    import torch  # most files do without

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)
