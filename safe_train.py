"""Runs a training until it is done, this project's or any other script: `python safe_train.py [key=value ...]`."""

import sys

from ci_llm.cli.entry import enter

if __name__ == "__main__":
    sys.exit(enter("safe_train", sys.argv[1:]))
