"""Keys of a run that is over in seconds, for tests of how runs begin and resume."""

from __future__ import annotations

WORDS = [
    "num_agents=2",
    "lora_rank=2",
    "batch_size=2",
    "max_train_samples=8",
    "max_seq_length=256",
    "eval_samples=4",
    "generation_eval_samples=0",
    "eval_steps=null",
    "num_workers=0",
    "report_to=none",
]
