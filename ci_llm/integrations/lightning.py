"""Crash-proof, exact checkpoints for the Trainer of Lightning.

    checkpoints = LightningCheckpoints("runs/mine", save_interval_steps=50)
    trainer = L.Trainer(..., callbacks=[checkpoints], enable_checkpointing=False)
    trainer.fit(model, loader, ckpt_path=checkpoints.resume())

A checkpoint holds what Lightning saves, without the frozen weights; and the generators of every process, at the
beginning of the epoch and at the step. A resumed epoch begins with the same random numbers, and the batches that were
used are skipped, so that the order is the same for any sampler.

A step is saved before the next batch is trained on. By then it is validated, and its gradients are used up. Lightning
has counted that batch as begun, so its counters are set back. The training stops at this point too, because
`should_stop` alone would validate first. Nothing is unpickled on a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ci_llm.core import determinism
from ci_llm.errors import ConfigError
from ci_llm.integrations.saver import (
    LoopCheckpoints,
    LoopSaver,
    frozen_digest,
    not_resumed,
    require_same,
    restore_generators,
    trained_tensors,
)
from ci_llm.interrupts import shield_workers

try:
    import lightning
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.io import CheckpointIO
except ModuleNotFoundError as error:
    raise ConfigError(
        "Lightning is not installed", where="ci_llm.integrations.lightning", hint="pip install lightning"
    ) from error

#: The arguments of module and data module, which no resume reads, and which may be any objects.
HYPER_PARAMETERS = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")
BATCHES, EPOCHS = "epoch_loop.batch_progress", "epoch_progress"


class LightningCheckpoints(LoopCheckpoints, Callback):  # type: ignore[misc]  # Lightning is not there for everyone
    """A callback that saves a run of Lightning, stops it in time when it is told to, and brings it back bit for bit.

    Args:
        directory: the folder of the run, its own, on a disk that all processes share.
        settings: arguments of `CheckpointManager`: `save_interval_steps`, `save_interval_seconds`, `max_to_keep` and
            others, but not `checkpoint_backend`: process 0 writes.

    Raises:
        ConfigError: a setting that cannot work here.

    Attributes:
        interrupted: why the last `fit()` ended before its last step, "signal:SIGTERM" for instance; None if it did not.

    Examples:
        >>> checkpoints = ci_llm.LightningCheckpoints(folder / "lightning", save_interval_steps=100)
        >>> trainer = lightning.Trainer(max_steps=200, callbacks=[checkpoints], **small_trainer)
        >>> checkpoints.interrupted is None
        True
    """

    def __init__(self, directory: Path | str, **settings: Any) -> None:
        if settings.get("checkpoint_backend", "vanilla") != "vanilla":
            what = "only process 0 has the state that Lightning hands out, so no other process can write a part of it"
            raise ConfigError(what, where="checkpoint_backend", hint='leave it at "vanilla"')
        super().__init__(directory, settings)

    def resume(self) -> str | None:
        """The argument for `trainer.fit(ckpt_path=...)`: this run if it has a checkpoint, or None."""
        return str(self._directory) if any(self._directory.glob("*/manifest.json")) else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._end()
            _require_fit(trainer)
            saver = LoopSaver(self._directory, self._settings, trainer.strategy.root_device)
            self._begin(_Attempt(trainer, saver, str(self._directory)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attempt.begin()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attempt.wrap_loader()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if (reason := self._attempt.begin_batch()) is not None:
            self.interrupted = reason
            raise StopIteration  # ends the epoch at once, as -1 from this hook of a module does

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._attempt.end_batch(batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._attempt.finish(interrupted=self.interrupted is not None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()


class _Attempt:
    """One call of `fit()`."""

    def __init__(self, trainer: Any, saver: LoopSaver, place: str) -> None:
        self._trainer, self._saver, self._place = trainer, saver, place
        self._module = trainer.lightning_module
        self._io = _Io(trainer.strategy.checkpoint_io, self)
        trainer.strategy.checkpoint_io = self._io
        self._evaluation = trainer.fit_loop.epoch_loop.val_loop
        self._evaluation.setup_data = partial(self._set_evaluation_up, self._evaluation.setup_data)
        self._loaded = False
        self._pending: dict[str, Any] | None = None
        self._logged_steps = 0
        self._length: Any = None  # of an epoch in batches, as it was
        self._at_epoch: dict[str, Any] | None = None
        self._unused_gradients = False

    @cached_property
    def _frozen(self) -> str:
        return frozen_digest(self._module)

    # Resuming

    def load(self) -> dict[str, Any]:
        """The newest checkpoint in Lightning's form; if none verifies, one without any state of a training."""
        self._loaded = True
        if self._saver.step is None:
            own = self._module.state_dict()
            nothing: dict[str, Any] = {"state_dict": own, "optimizer_states": [], "lr_schedulers": []}
            return {**nothing, "pytorch-lightning_version": lightning.__version__}
        saved = self._saver.restore("lightning", "about", self._loop(), self._module)
        about = saved["about"]
        self._pending = {**saved["processes"][self._trainer.global_rank], "batches": about["batches"]}
        self._logged_steps, self._length = about["logged_steps"], about["length"]
        if about["complete"]:
            self._trainer.should_stop = True
        weights = {"state_dict": self._module.state_dict(), "optimizer_states": list(saved["optimizers"].values())}
        return {**saved["lightning"], **weights}

    def begin(self) -> None:
        """Before the first epoch of this call, when everything but generators and data is restored."""
        trainer = self._trainer
        if self._saver.step is not None and not self._loaded:
            call = "trainer.fit(model, loader, ckpt_path=checkpoints.resume())"
            raise not_resumed(LightningCheckpoints.__name__, call)
        if len(trainer.fit_loop._combined_loader.flattened) != 1:
            raise ConfigError(
                "the positions of several loaders are not saved",
                where=LightningCheckpoints.__name__,
                hint="give one loader",
            )
        if self._length is not None:
            require_same({"batches": self._length}, {"batches": trainer.num_training_batches}, self._place)
        for optimizer in trainer.optimizers:
            self._saver.manager.watch(optimizer)
        self._saver.listen()  # here, for Lightning has just taken SIGTERM for itself
        if self._pending is not None and self._pending["at_epoch"] is None:  # it begins with an epoch
            restore_generators(self._pending["at_batch"], self._place)
            self._pending = None
        self.wrap_loader()
        iter(trainer.fit_loop._data_fetcher)

    def wrap_loader(self) -> None:
        loader = self._trainer.fit_loop._combined_loader
        shield_workers(*(one for one in loader.flattened if not isinstance(one, _Replayed)))
        loader.flattened = [one if isinstance(one, _Replayed) else _Replayed(one, self) for one in loader.flattened]

    def _set_evaluation_up(self, set_up: Callable[[], None]) -> None:
        """Before an evaluation starts the workers of its loaders."""
        set_up()
        if (loader := self._evaluation._combined_loader) is not None:
            shield_workers(*loader.flattened)

    def begin_pass(self) -> int:
        """Before the order of an epoch is drawn: restore the generators of a resumed epoch.

        Returns:
            how many batches of the epoch were used.
        """
        if self._pending is not None:
            restore_generators(self._pending["at_epoch"], self._place)
        self._at_epoch = determinism.capture()
        return self._pending["batches"] if self._pending is not None else 0

    def begin_batch(self) -> str | None:
        """Save the step before, if that is due, once the next batch is fetched. Returns a reason to end here."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        if self._pending is not None:
            restore_generators(self._pending["at_batch"], self._place)
            self._pending = None
            loop.epoch_loop._batches_that_stepped = self._logged_steps  # it has counted the return as a step
        step = trainer.global_step
        if self._unused_gradients or step <= (self._saver.step or 0):
            return None
        reason = self._saver.told_to_stop(step)
        self._saver.save(step, lambda: self._contents(self._at_epoch, complete=False), force=reason is not None)
        if reason is not None:
            trainer.should_stop = True
            loop.min_epochs, loop.epoch_loop.min_steps = 0, None
        return reason

    def end_batch(self, batch_idx: int) -> None:
        """Note whether the accumulation window continues after this batch."""
        trainer = self._trainer
        ended = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        self._unused_gradients = trainer.lightning_module.automatic_optimization and not ended

    # The end

    def finish(self, *, interrupted: bool) -> None:
        """Save the last step of the training, unless it was interrupted: then that step is saved already."""
        if not interrupted and self._trainer.global_step:
            self._saver.save(self._trainer.global_step, self._at_the_end, force=True)

    def end(self) -> None:
        self._trainer.strategy.checkpoint_io = self._io.inner
        del self._evaluation.setup_data  # the method of the loop is back
        if (loader := self._trainer.fit_loop._combined_loader) is not None:
            loader.flattened = [one.loader if isinstance(one, _Replayed) else one for one in loader.flattened]
        self._saver.close()

    # What is saved

    def _at_the_end(self) -> dict[str, Any]:
        """The state at the end of a training: between epochs, or within one after the last step. A collective."""
        loop = self._trainer.fit_loop
        whole = loop.epoch_loop._num_ready_batches_reached()
        return self._contents(None if whole else self._at_epoch, complete=bool(self._trainer.should_stop))

    def _contents(self, at_epoch: dict[str, Any] | None, *, complete: bool) -> dict[str, Any]:
        """The state when a batch is fetched and not yet trained on, or at the end. A collective."""
        processes = self._saver.gather({"at_epoch": at_epoch, "at_batch": determinism.capture()})
        self._trainer.save_checkpoint(self._place, weights_only=False)
        taken, self._io.taken = self._io.taken, {}
        if not taken:
            return {}  # process 0 has it
        batches = _put_counters(taken["loops"]["fit_loop"], between_epochs=at_epoch is None)
        about = {
            "loop": self._loop(),
            "batches": batches,
            "length": self._trainer.num_training_batches,
            "logged_steps": self._trainer.fit_loop.epoch_loop._batches_that_stepped,
            "complete": complete,
        }
        optimizers = taken.pop("optimizer_states")
        beside = ("state_dict", *HYPER_PARAMETERS)
        return {
            "lightning": {key: value for key, value in taken.items() if key not in beside},
            "model": trained_tensors(self._module),
            "optimizers": {f"{number}": state for number, state in enumerate(optimizers)},
            "processes": processes,
            "about": about,
        }

    def _loop(self) -> Mapping[str, Any]:
        trainer = self._trainer
        return {
            "processes": trainer.world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "frozen weights": self._frozen,
        }


def _put_counters(loop: dict[str, Any], *, between_epochs: bool) -> int:
    """Set Lightning's counters to what is complete; returns the batches that are complete in this epoch."""
    batches, epochs = loop[BATCHES], loop[EPOCHS]
    for counter in (batches["total"], batches["current"]):
        done = counter["completed"]
        counter.update(ready=done, started=done, processed=done)
    batches["is_last_batch"] = False
    if between_epochs:
        batches["current"] = dict.fromkeys(batches["current"], 0)
    else:
        for counter in (epochs["total"], epochs["current"]):
            done = counter["ready"] - 1
            counter.update(started=done + 1, processed=done, completed=done)
    return int(batches["current"]["completed"])


class _Io(CheckpointIO):  # type: ignore[misc]
    """Gives the manager what Lightning saves and loads for a folder of ours; all other paths go to the IO before."""

    def __init__(self, inner: Any, attempt: _Attempt) -> None:
        self.inner, self._attempt = inner, attempt
        self.taken: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if str(path) == self._attempt._place:
            self.taken = checkpoint
        else:
            self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path) == self._attempt._place:
            return self._attempt.load()
        return self.inner.load_checkpoint(path, *arguments, **named)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)


class _Replayed:
    """A loader whose first pass in a resumed run has the old order, and begins after the batches that were used."""

    def __init__(self, loader: Any, attempt: _Attempt) -> None:
        self.loader, self._attempt = loader, attempt

    def __iter__(self) -> Iterator[Any]:
        used = self._attempt.begin_pass()
        batches = iter(self.loader)
        for _ in range(used):
            next(batches)
        yield from batches

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _require_fit(trainer: Any) -> None:
    kind = type(trainer.strategy).__name__
    if kind in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        raise ConfigError(
            f"{kind} writes its checkpoints itself", where=LightningCheckpoints.__name__, hint='strategy="ddp"'
        )
