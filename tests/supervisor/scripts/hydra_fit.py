"""A script of Hydra as people write them: groups, a defaults list, structured access."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="elsewhere", config_name="nothing")
def main(config: DictConfig) -> None:
    training, model = config.training, config.model
    print(f"model={model.name} lr={training.learning_rate:.3g} batch={training.meta_batch_size}", end=" ")
    print(f"product={training.schedule.constant_product}")
    if training.learning_rate > model.stable_below:
        print("training/loss: nan")
    elif training.meta_batch_size > model.fits:
        raise MemoryError("CUDA out of memory")
    else:
        print("trained")


if __name__ == "__main__":
    main()
