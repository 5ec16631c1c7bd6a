"""Train until it is done, whatever happens: `python safe_train.py [key=value ...]`, for our trainer or any other."""

import sys

from ci_llm.cli.entry import enter

if __name__ == "__main__":
    sys.exit(enter("safe_train", sys.argv[1:]))
