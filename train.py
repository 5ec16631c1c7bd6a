"""Train a crowd: `python train.py [--config configs.yaml] [key=value ...]`, or under any launcher."""

import sys

from ci_llm.cli.entry import enter

if __name__ == "__main__":
    sys.exit(enter("main", ["train", *sys.argv[1:]]))
