"""Train a crowd: `python train.py [--config FILE] [key=value ...]`, alone or under any launcher."""

import sys

from ci_llm.cli.entry import run_command

if __name__ == "__main__":
    sys.exit(run_command("main", ["train", *sys.argv[1:]]))
