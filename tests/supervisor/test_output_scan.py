"""The exception that ended a script is found, whatever launchers and peers print around it."""

from __future__ import annotations

import pytest

from ci_llm.supervisor.output_scan import Evidence

HYDRA = """\
Error executing job with overrides: ['lr=1']
Traceback (most recent call last):
  File "/x/fit.py", line 4, in main
    raise ValueError(f"bad value {cfg.lr}")
ValueError: bad value 1

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."""

HYDRA_BEFORE_THE_SCRIPT = """\
Could not override 'foo'.
To append to your config use +foo=3
Key 'foo' is not in struct
    full_key: foo
    object_type=dict

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."""

HYDRA_CHOICE = """\
In 'config': Could not find 'db/oracle'

Available options in 'db':
\tmysql
Config search path:
\tprovider=hydra, path=pkg://hydra.conf"""

HYDRA_INSTANTIATE = """\
Traceback (most recent call last):
  File "/x/hydra/_internal/instantiate/_instantiate2.py", line 92, in _call_target
    return _target_(*args, **kwargs)
ImportError: no flash_attn

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/fit.py", line 4, in main
    hydra.utils.instantiate(cfg.model)
hydra.errors.InstantiationException: Error in call to target 'net.Net':
ImportError('no flash_attn')
full_key: model

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."""

CHAINED = """\
Traceback (most recent call last):
  File "/x/fit.py", line 2, in <module>
    import nothing
ModuleNotFoundError: No module named 'nothing'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/fit.py", line 4, in <module>
    raise RuntimeError("cannot start")
RuntimeError: cannot start"""

RICH = """\
╭─────────────────────────────── Traceback (most recent call last) ────────────────────────────────╮
│ /x/fit.py:5 in <module>                                                                          │
│                                                                                                  │
│ ❱ 5 f()                                                                                          │
│ ╭─ locals ─╮                                                                                     │
│ │ a = 3    │                                                                                     │
│ ╰──────────╯                                                                                     │
╰──────────────────────────────────────────────────────────────────────────────────────────────────╯
ValueError: bad value"""

TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/x/fit.py", line 4, in <module>
[rank1]:     f()
[rank1]: ValueError: bad value
[rank0]: Traceback (most recent call last):
[rank0]:   File "/x/fit.py", line 9, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711
E0325 20:57:34.620000 26 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/x/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
fit.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_12:00:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================"""

TORCHRUN_ALONE = TORCHRUN[TORCHRUN.index("E0325") :]

ACCELERATE = """\
Traceback (most recent call last):
  File "/x/fit.py", line 4, in <module>
    f()
ValueError: bad value
Traceback (most recent call last):
  File "/x/bin/accelerate", line 8, in <module>
    sys.exit(main())
  File "/x/accelerate/commands/launch.py", line 986, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['/x/bin/python', 'fit.py']' returned non-zero exit status 1."""

SPAWN = """\
Traceback (most recent call last):
  File "/x/torch/multiprocessing/spawn.py", line 200, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:\x20

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/x/fit.py", line 4, in main
    f()
ValueError: bad value
"""

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/x/fit.py", line 4, in <module>
  |     raise ExceptionGroup("two", [ValueError("bad value")])
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: bad value
    +------------------------------------"""

JAX = """\
jax._src.traceback_util.UnfilteredStackTrace: ValueError: bad value

The stack trace below excludes JAX-internal frames.
--------------------
Traceback (most recent call last):
  File "/x/fit.py", line 4, in <module>
    f()
ValueError: bad value
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception."""

AT_EXIT = """\
Traceback (most recent call last):
  File "/x/fit.py", line 4, in <module>
    f()
ValueError: bad value
Exception ignored in: <function Bar.__del__ at 0x7f00>
Traceback (most recent call last):
  File "/x/bar.py", line 9, in __del__
    self.close()
AttributeError: 'Bar' object has no attribute 'fp'
wandb: 🚀 View run calm-sky-3 at: https://wandb.ai/team/project/runs/abc"""

STATE_DICT = """\
Traceback (most recent call last):
  File "/x/fit.py", line 4, in <module>
    model.load_state_dict(weights)
RuntimeError: Error(s) in loading state_dict for Net:
\tMissing key(s) in state_dict: "head.weight".
\tUnexpected key(s) in state_dict: "tail.weight"."""

ARGPARSE = """\
usage: fit.py [-h] [--lr LR]
fit.py: error: unrecognized arguments: --rate 3"""

OTHERS_BETWEEN = """\
Traceback (most recent call last):
INFO: saving
  File "/x/fit.py", line 4, in <module>
epoch 3, loss 0.5
    f()
pkg.errors.Boom: bad value"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (HYDRA, "ValueError: bad value 1"),
        (HYDRA_BEFORE_THE_SCRIPT, "Could not override 'foo'."),
        (
            "Cannot find primary config 'nope'. Check it.\n\nConfig search path:\n\tprovider=x",
            "Cannot find primary config 'nope'. Check it.",
        ),
        (HYDRA_CHOICE, "In 'config': Could not find 'db/oracle'"),
        (HYDRA_INSTANTIATE, "hydra.errors.InstantiationException: Error in call to target 'net.Net'"),
        (CHAINED, "RuntimeError: cannot start"),
        (RICH, "ValueError: bad value"),
        (TORCHRUN, "ValueError: bad value"),
        (TORCHRUN_ALONE, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"),
        (ACCELERATE, "ValueError: bad value"),
        (SPAWN, "ValueError: bad value"),
        (GROUP, "ValueError: bad value"),
        (JAX, "ValueError: bad value"),
        (AT_EXIT, "ValueError: bad value"),
        (STATE_DICT, "RuntimeError: Error(s) in loading state_dict for Net"),
        (ARGPARSE, "fit.py: error: unrecognized arguments: --rate 3"),
        (OTHERS_BETWEEN, "pkg.errors.Boom: bad value"),
        ("Traceback (most recent call last):\n  File x\nAssertionError", "AssertionError"),
        ("Traceback (most recent call last):\n  File x\nsocket.timeout: timed out", "socket.timeout: timed out"),
        ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f:", "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_exception_is_found(output: str, told: str) -> None:
    evidence = heard(output)
    assert evidence.exception == told
    assert evidence.last_words == told


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("half way\nno such luck", "no such luck"),
        ("no weights\nwandb: 🚀 View run at https://wandb.ai/a/b/runs/c\n======\n", "no weights"),
        ("Error: 3\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "Error: 3"),
        ("/x/a.py:3: UserWarning: old\n  warnings.warn('old')\ndone: nothing", "done: nothing"),
        ("    except ValueError: pass\n    raise Boom", "raise Boom"),
        ("", "it said nothing"),
    ],
)
def test_without_an_exception_the_last_words_count(output: str, words: str) -> None:
    evidence = heard(output)
    assert evidence.exception is None
    assert evidence.last_words == words


def test_an_exception_of_long_ago_did_not_end_the_script() -> None:
    evidence = heard(CHAINED + "\nnext epoch" * 1000)
    assert evidence.exception is None
    assert evidence.last_words == "next epoch"


def heard(output: str) -> Evidence:
    evidence = Evidence()
    for line in output.splitlines():
        evidence.note(line)
    return evidence
