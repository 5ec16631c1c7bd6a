"""Train a crowd: `python train.py [--config configs.yaml] [key=value ...]`, or under any launcher."""

import sys

from ci_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
