"""Try out whether a run will work here: `python dry_run_sanity_check.py [--config FILE] [key=value ...]`."""

import sys

from ci_llm.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script(["check", *sys.argv[1:]]))
