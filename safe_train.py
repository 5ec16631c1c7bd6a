"""Runs a training until it is done, this project's or any other script: `python safe_train.py [key=value ...]`."""

import sys

from ci_llm.cli.entry import run_command

if __name__ == "__main__":
    sys.exit(run_command("safe_train", sys.argv[1:]))
