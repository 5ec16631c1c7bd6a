"""Ray Train starts the processes of a run, on this machine, and starts them again after one was killed."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from ci_llm.core.run_status import read_status
from tests.support.children import ROOT, Child, hold_at
from tools.testbed.events import wait_until_committed
from tools.testbed.moments import arguments

pytest.importorskip("ray", reason="there is no ray; make install-dev, with a Python for which ray has a wheel")
pytestmark = pytest.mark.slow

RECIPE = ROOT / "examples/machines_that_vanish/ray_train.py"
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # 15 by default: other tests on the same cores would leave it next to nothing
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # a machine under load starts Python slowly
}


def test_a_run_under_ray_resumes_after_a_process_was_killed(tmp_path: Path) -> None:
    run, killed = tmp_path / "run", tmp_path / "killed"
    words = arguments(max_train_steps=12, eval_steps="null", save_steps=4, global_batch_size=4, output_dir=run)
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # the path of a socket has at most 107 bytes
        environment = {**ENVIRONMENT, "RAY_TMPDIR": short, "HOME": str(tmp_path)}
        held = hold_at("ci_llm.run.loop:agree_on_gradients", call=10, until=killed)
        with Child(*(sys.executable, RECIPE, *words), env={**environment, **held}) as child:
            wait_until_committed(run, 8)
            psutil.Process(read_status(run).pid).send_signal(signal.SIGKILL)
            killed.touch()
            code = child.wait()
        assert code == 0, child.seen
    status = read_status(run)
    assert (status.status, status.step) == ("completed", 12)
    log = (run / "training.log").read_text()
    assert "verified, from" in log, log
    assert "resume    step 8" in log, log
