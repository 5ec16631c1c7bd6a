"""A sampler for any DataLoader: its shuffled order is computed, and continues inside an epoch after a resume.

    sampler = StatefulSampler(rows, seed=1)
    loader = DataLoader(rows, batch_size=8, sampler=sampler, num_workers=2)
    objects = {"model": model, "optimizer": optimizer, "sampler": sampler}
    for batch in sampler.batches(loader, epochs=3): ...

A checkpoint holds `objects`. After a resume the loop continues behind the last batch that was used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, Sampler

from ci_llm.data.order import permute
from ci_llm.errors import ConfigError, DataError, ForeignCheckpoint
from ci_llm.interrupts import shield_workers

_LOGGER = logging.getLogger(__name__)

_WAYS = (
    "iterate over sampler.batches(loader), which counts the rows that were used; or call set_epoch(epoch,"
    " start=rows_used) before the pass, with start=0 where skip_first_batches skips them"
)


class StatefulSampler(Sampler[int]):
    """Row numbers of a data set, shuffled: a pure function of (seed, epoch, position), so that nothing is skipped over.

    Each epoch holds each row once and has an order of its own. Unlike a `RandomSampler` it draws nothing from the
    generators of torch, and the row at any position costs the same. A pass that ends moves on to the next epoch, so
    that a loop without `set_epoch` is right too.

    A loader draws rows before they are used: with workers several batches ahead, under Accelerate one. So a sampler
    cannot know by itself where the training stands in an epoch. `batches` counts what it hands out, and `state_dict`
    then holds that position. A state saved inside an epoch that nobody counted is never continued by a guess: the
    next pass raises, unless `set_epoch` has said where it starts.

    Args:
        data_source: anything with a length.
        seed: the seed of the order.

    Attributes:
        epoch: the epoch of the batch that was handed out last.
        pass_ended: called with the epoch when the last row of a pass was asked for.

    Examples:
        >>> sampler = ci_llm.StatefulSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)  # an epoch each
        >>> sorted(first) == sorted(second) == [0, 1, 2, 3, 4], first == second
        (True, False)
    """

    def __init__(self, data_source: Sized, *, seed: int = 42) -> None:
        self.num_rows = len(data_source)
        self.seed = seed
        self.epoch = 0
        self.pass_ended: Callable[[int], object] = lambda epoch: None
        self._start: int | None = 0  # of the next pass; None: not known
        self._used: int | None = 0  # rows of this epoch; None: not counted
        self._ended = False
        self._warned = False

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        if self._ended:
            self.set_epoch(self.next_epoch)
        if self._start is None:
            what = f"the checkpoint was made inside epoch {self.epoch}, and does not say how many of its rows were used"
            raise ForeignCheckpoint(what, where="StatefulSampler", hint=_WAYS)
        epoch, start, self._used = self.epoch, self._start, None
        for position in range(start, self.num_rows):
            yield permute(position, self.num_rows, seed=self.seed, epoch=epoch)
        self._start, self._ended = 0, True
        self.pass_ended(epoch)

    def batches(self, loader: DataLoader[Any], *, epochs: int | None = None) -> Iterator[Any]:
        """The batches of `loader`, epoch after epoch, from behind the last one that was used.

        What was handed out counts as used as soon as the loop has it, so that a state saved after its step continues
        with the next batch, however many the workers have read ahead. Signals of the run do not end its workers.

        Args:
            loader: a `DataLoader` with this sampler.
            epochs: end after this many, those before a resume included; None: never.

        Raises:
            ConfigError: the loader has another sampler, or was prepared by Accelerate, which deals batches to
                processes: skip the used ones with its `skip_first_batches`.
            DataError: a whole epoch holds no batch.
        """
        rows_per_batch = self._rows_per_batch(loader)
        shield_workers(loader)
        while True:
            start = self._continue()
            if epochs is not None and self.epoch >= epochs:
                return
            number = 0
            for number, batch in enumerate(loader, start=1):
                self._used = min(start + number * rows_per_batch, self.num_rows)
                yield batch
            if number == 0 and start == 0:
                raise DataError(f"an epoch of {self.num_rows} rows holds no batch", where="StatefulSampler.batches")
            self.set_epoch(self.epoch + 1)

    def _continue(self) -> int:
        """Make the next pass begin behind what was used; returns where."""
        if self._used is not None:
            self.set_epoch(self.epoch, start=self._used)
        if self._ended or (self._start is not None and self._start >= self.num_rows):
            self.set_epoch(self.epoch + 1)
        return self._start or 0

    def _rows_per_batch(self, loader: DataLoader[Any]) -> int:
        batches = loader.batch_sampler
        rows = 1 if batches is None else getattr(batches, "batch_size", None)
        sampler = getattr(loader if batches is None else batches, "sampler", None)
        if sampler is not self or hasattr(loader, "base_dataloader") or not rows:
            raise ConfigError(
                f"this {type(loader).__name__} does not say which rows of this sampler its batches hold",
                where="StatefulSampler.batches",
                hint="give DataLoader(rows, batch_size, sampler=sampler); for a loader that Accelerate has prepared,"
                " skip_first_batches skips what was used",
            )
        return int(rows)

    @property
    def next_epoch(self) -> int:
        """The epoch that the next pass belongs to, once every row of this one that was asked for is used."""
        return self.epoch + 1 if self._ended else self.epoch

    def set_epoch(self, epoch: int, *, start: int | None = None) -> None:
        """Order the next pass as `epoch`.

        Args:
            start: rows of it that were used already, over all processes: the pass begins behind them. By default it
                begins where a restored state or an earlier `start` says, if that was of this epoch, else at 0.
        """
        if start is None and (epoch != self.epoch or self._ended):
            start = 0
        self.epoch, self._ended = epoch, False
        if start is not None:
            self._start = self._used = start

    def state_dict(self) -> dict[str, Any]:
        """Seed, number of rows, epoch, and how many of its rows were used: None if nobody counted them."""
        if self._used is None and not self._ended and not self._warned:
            self._warned = True
            _LOGGER.warning("saved inside an epoch, and the rows used are not counted: to resume, %s", _WAYS)
        return {"seed": self.seed, "num_rows": self.num_rows, "epoch": self.epoch, "position": self._used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Order as the saved one did, and continue where it was.

        Raises:
            ForeignCheckpoint: the data set has another number of rows.
        """
        if state["num_rows"] != self.num_rows:
            what = f"the checkpoint was made over {state['num_rows']} rows, and there are {self.num_rows}"
            raise ForeignCheckpoint(what, where="StatefulSampler", hint="give the data set that it was trained on")
        self.seed, self.epoch, self._ended = int(state["seed"]), int(state["epoch"]), False
        self._start = self._used = state.get("position")
