"""Try out whether a run will work here: `python dry_run_sanity_check.py [--config FILE] [key=value ...]`."""

import sys

from ci_llm.cli.entry import run_command

if __name__ == "__main__":
    sys.exit(run_command("main", ["check", *sys.argv[1:]]))
