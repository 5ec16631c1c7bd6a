"""Train until it is done, whatever happens: `python safe_train.py [key=value ...]`, for our trainer or any other."""

import sys

from ci_llm.cli import guarded
from ci_llm.supervisor.door import supervise

if __name__ == "__main__":
    sys.exit(guarded(lambda: supervise(sys.argv[1:]), debug="--debug" in sys.argv))
