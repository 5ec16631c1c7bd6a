"""Runs a training until it is done, this project's or any other script: `python safe_train.py [key=value ...]`."""

import sys

from ci_llm.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script(["supervise", *sys.argv[1:]]))
