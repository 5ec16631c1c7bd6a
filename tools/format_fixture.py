"""Write the checkpoint that a later version of the program has to read: two steps of a small run on the embedded base.

    python -m tools.format_fixture      writes tests/fixtures/checkpoint_step_2

To be run once for each format; tests/run/test_beginnings.py resumes it.
"""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ci_llm import train
from ci_llm.embedded import BASE_FOLDER

FIXTURE: Final = Path(__file__).parent.parent / "tests/fixtures/checkpoint_step_2"
#: The run; a resume gives the same keys with more steps.
KEYS: Final = {
    "num_agents": 2,
    "lora_rank": 1,
    "lora_target_modules": ["q_proj"],
    "max_train_samples": 16,
    "batch_size": 2,
    "mixed_precision": "no",
    "cpu_threads": 1,
    "eval_samples": 2,
    "generation_eval_samples": 0,
    "report_to": "none",
}


def main() -> None:
    """Train for two steps, and keep the checkpoint."""
    with TemporaryDirectory() as folder, chdir(folder):
        shutil.copytree(BASE_FOLDER, "base")  # a checkpoint names the place of its base
        train(**KEYS, model_name="base", max_train_steps=2, output_dir="run")
        shutil.rmtree(FIXTURE, ignore_errors=True)
        shutil.copytree("run/checkpoint_step_2", FIXTURE)
    print(FIXTURE)


if __name__ == "__main__":
    main()
