"""A run on rows and a model that are in memory, from a script or a notebook.

    python examples/rows_in_memory.py FOLDER

Call it again after a Ctrl-C or a kill: the rows are the same, so the run resumes with the bits that it would have had.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

import ci_llm

KEYS: dict[str, Any] = {"num_agents": 2, "max_train_steps": 8, "batch_size": 4, "eval_samples": 8, "num_workers": 0}


def frame() -> pd.DataFrame:
    """Rows as they come out of an analysis."""
    numbers = range(48)
    return pd.DataFrame(
        {
            "prompt": [f"Ann has {n} pens. Ann finds 3. How many pens are there?" for n in numbers],
            "completion": [f"{n} + 3 = {n + 3}" for n in numbers],
        }
    )


def train(folder: Path, **keys: Any) -> Any:
    """Train two agents on the frame, on a model that is loaded already, and return the result."""
    base = ci_llm.load_base("embedded")  # or AutoModelForCausalLM.from_pretrained(...), and its tokenizer
    return ci_llm.train(
        dataset=frame,  # a function is called once; a list of dicts or a Dataset would do as well
        model=base.model,
        tokenizer=base.tokenizer,
        output_dir=folder,
        quiet=True,
        **{**KEYS, **keys},
    )


if __name__ == "__main__":
    result = train(Path(sys.argv[1]))
    print(result.scores[["exact_match", "nll"]])
    print(result.history[["train/task_loss", "tokens_per_s"]])
    question = "Ann has 5 pens. Ann finds 3. How many pens are there?"
    print(result.crowd.generate(question, max_new_tokens=16)[0])
    print(f"8 is {result.crowd.log_probs(question, '5 + 3 = 8')[-1].exp().item():.1%} probable")
