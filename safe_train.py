"""Train until it is done, whatever happens: `python safe_train.py [key=value ...]`, for our trainer or any other."""

import sys

from ci_llm.cli.entry import run_command

if __name__ == "__main__":
    sys.exit(run_command("safe_train", sys.argv[1:]))
