"""`python -m tools.simulate`: goodput and lost work of a job on a cluster of failing nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ci_llm.cli.command import Parser, run_guarded
from ci_llm.errors import BadInput

_EXAMPLE = """example: python -m tools.simulate nodes=1000 node_mtbf=300d restart=90
         python -m tools.simulate --config cluster.yaml

exit codes: 0 done; 2 bad call

keys, in the YAML file or as key=value; times are in seconds or written as 90, 1h30m, 300d:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tools.simulate ...`; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_guarded(lambda: simulate(words), debug="--debug" in words)


def simulate(words: Sequence[str]) -> int:
    """Print a study of one cluster.

    Raises:
        BadInput: the call is wrong, or simpy is missing.
        SystemExit: with 0, after `--help`.
    """
    from tools.simulate.model import describe_keys, read_cluster

    does = "Simulate a job on nodes that fail: when to save, what a failure costs, what another cluster would change."
    parser = Parser("python -m tools.simulate", description=does, epilog=_EXAMPLE + describe_keys())
    parser.add_argument("keys", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="keys of the cluster, in YAML")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    call, others = parser.parse_known_args(words)
    cluster = read_cluster(call.config, [*call.keys, *others])
    from rich.console import Console

    try:
        from tools.simulate.study import show, study
    except ImportError as error:
        what = f"a simulation needs simpy, which cannot be imported: {error}"
        raise BadInput(what, hint="pip install simpy") from error
    told = study(cluster)
    if call.json:
        print(json.dumps(told.as_json(), indent=2, allow_nan=False))
        return 0
    show(told, Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
