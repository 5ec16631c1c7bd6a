"""The order of the data for anyone's DataLoader: shuffled, computed and never remembered.

sampler = StatefulSampler(rows, seed=1)
loader = DataLoader(rows, batch_size=8, sampler=sampler)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for batch in loader: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from ci_llm.data.order import permute
from ci_llm.errors import ForeignCheckpoint


class StatefulSampler(Sampler[int]):
    """Row numbers of a data set, shuffled: a pure function of (seed, epoch, position), so that nothing is skipped over.

    Each epoch holds each row once and has an order of its own. Unlike a `RandomSampler` it draws nothing from the
    generators of torch, and the row at any position costs the same. A pass that ends moves on to the next epoch, so
    that a loop without `set_epoch` is right too.

    Args:
        data_source: anything with a length.
        seed: of the order.

    Attributes:
        pass_ended: called with the epoch when the last row of a pass was asked for.
    """

    def __init__(self, data_source: Sized, *, seed: int = 42) -> None:
        self.num_rows = len(data_source)
        self.seed = seed
        self.epoch = 0
        self.pass_ended: Callable[[int], object] = lambda epoch: None
        self._start = 0
        self._ended = False

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        if self._ended:
            self.set_epoch(self.next_epoch)
        epoch, start = self.epoch, self._start
        for position in range(start, self.num_rows):
            yield permute(position, self.num_rows, seed=self.seed, epoch=epoch)
        self._start, self._ended = 0, True
        self.pass_ended(epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass belongs to, once every row of this one that was asked for is used."""
        return self.epoch + 1 if self._ended else self.epoch

    def set_epoch(self, epoch: int, *, start: int = 0) -> None:
        """Order the next pass as `epoch`.

        Args:
            start: rows of it that were used already, over all processes: the pass begins behind them.
        """
        self.epoch, self._start, self._ended = epoch, start, False

    def state_dict(self) -> dict[str, Any]:
        """Seed, number of rows and epoch. Where in the epoch is for the loop to say: loaders read ahead."""
        return {"seed": self.seed, "num_rows": self.num_rows, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Order as the saved one did, from the beginning of its epoch.

        Raises:
            ForeignCheckpoint: the data set has another number of rows.
        """
        if state["num_rows"] != self.num_rows:
            raise ForeignCheckpoint(
                f"the checkpoint was made over {state['num_rows']} rows, and there are {self.num_rows}",
                where="StatefulSampler",
                hint="give the data set that it was trained on",
            )
        self.seed = int(state["seed"])
        self.set_epoch(int(state["epoch"]))
