"""Train a crowd: `python train.py [--config FILE] [key=value ...]`, alone or under any launcher."""

import sys

from ci_llm.cli.main import run_script

if __name__ == "__main__":
    sys.exit(run_script(["train", *sys.argv[1:]]))
