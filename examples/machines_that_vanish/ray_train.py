"""A crowd under Ray Train: TorchTrainer starts the processes, and starts them again when one of them is lost.

python examples/machines_that_vanish/ray_train.py [key=value ...]      the keys of train.py

`output_dir` must be a folder that all nodes share. CI_LLM_WORKERS says how many processes there are, 2 by default.
"""

from __future__ import annotations

import os
import sys

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_crowd(keys: dict[str, str]) -> None:
    """One process of the run. Every call resumes from the newest checkpoint in `output_dir`."""
    import ci_llm

    result = ci_llm.train(**keys)
    ray.train.report({"step": result.step, "status": result.status})


def main() -> None:
    keys = dict(word.split("=", 1) for word in sys.argv[1:])
    keys["output_dir"] = os.path.abspath(keys.get("output_dir", "ci_llm_output"))  # workers have a folder of their own
    ray.init()
    on_gpus = "GPU" in ray.cluster_resources()
    trainer = TorchTrainer(
        train_crowd,
        train_loop_config=keys,
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("CI_LLM_WORKERS", "2")), use_gpu=on_gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
