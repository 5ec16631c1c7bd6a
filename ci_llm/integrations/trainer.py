"""Crash-proof, exact checkpoints for the Trainer of Transformers and its subclasses.

    checkpoints = TrainerCheckpoints("runs/mine", save_interval_steps=50)
    trainer = Trainer(..., callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))

A checkpoint holds trained parameters, optimizer, scheduler, loss scale, TrainerState, the state of callbacks, the
running loss, and the generators of every process. Trainer computes the position in the data from its state.

A step is saved at the beginning of the next one. By then it is logged and evaluated, its accumulation window is
complete, and the next batches are fetched, so that a resume repeats nothing of the step. The last step is saved after
Trainer's loop. Trainer's own checkpoints (`save_strategy`) are not touched.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from ci_llm.core import determinism
from ci_llm.errors import ConfigError
from ci_llm.integrations.saver import (
    OWN_CHECKPOINTS,
    LoopCheckpoints,
    LoopSaver,
    frozen_digest,
    not_resumed,
    restore_generators,
    trained_tensors,
)
from ci_llm.interrupts import shield_workers

logger = logging.getLogger(__name__)

#: The arguments that decide the rows of a step.
LOOP = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed", "dataloader_drop_last")
MAKE_LOADERS = ("get_train_dataloader", "get_eval_dataloader")


class TrainerCheckpoints(LoopCheckpoints, TrainerCallback):  # type: ignore[misc]  # Transformers has no types here
    """A callback that saves a Trainer's run, stops it in time when it is told to, and brings it back bit for bit.

    Args:
        directory: the folder of the run, its own.
        settings: arguments of `CheckpointManager`: `save_interval_steps`, `save_interval_seconds`, `max_to_keep` and
            others.

    Attributes:
        interrupted: why the last `train()` ended before its last step, "signal:SIGTERM" for instance; None if it did
            not.

    Examples:
        >>> checkpoints = ci_llm.TrainerCheckpoints(folder / "trainer", save_interval_steps=100)
        >>> checkpoints.interrupted is None  # give it to Trainer(..., callbacks=[checkpoints])
        True
    """

    def __init__(self, directory: Path | str, **settings: Any) -> None:
        super().__init__(directory, settings)

    def resume(self, trainer: Trainer) -> str | None:
        """The argument for `trainer.train(resume_from_checkpoint=...)`: the newest checkpoint that verifies, or None.

        Call it right before that, on every process: signals are handled from here on.

        Raises:
            ConfigError: FSDP or the like writes the checkpoints of this trainer, or its batch size is not fixed.
        """
        _require_fit(trainer, self)
        self._end()
        attempt = _Attempt(trainer, LoopSaver(self._directory, self._settings, trainer.args.device))
        self._begin(attempt)
        attempt.saver.listen()
        return attempt.source

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attempt is None or state.global_step != (self._attempt.saver.step or 0):
            raise not_resumed(type(self).__name__, "trainer.train(resume_from_checkpoint=checkpoints.resume(trainer))")
        self._attempt.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.mark = _mark()  # to the next step only the fetching of batches and an evaluation may draw
        if (reason := self._attempt.saver.told_to_stop(state.global_step)) is not None:
            self.interrupted, self._attempt.stopping = reason, True
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attempt is not None:  # Trainer can evaluate without training
            self._attempt.mark = None
            self._attempt.saver.manager.due.ask_again()  # a save may have been asked for during the evaluation

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.mark = None
        if self._attempt.stopping and not _between_epochs(state):
            # Trainer calls this for an epoch that was broken off as well, and would evaluate it.
            control.should_evaluate = control.should_log = control.should_save = False
        # At an interruption the weights stay as the step left them: the best ones belong to the end of the run.
        self._attempt.keep_weights()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attempt.finish()
        self._end()


class _Attempt:
    """One call of `train()`.

    Attributes:
        source: the folder of the checkpoint to resume from.
        stopping: whether the training was told to end.
        mark: a hash of the generators after the last step, while only the fetching of batches may draw from them.
    """

    def __init__(self, trainer: Any, saver: LoopSaver) -> None:
        self._trainer, self.saver, self.stopping = trainer, saver, False
        self._frozen = frozen_digest(trainer.model)
        self._at_epoch: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None
        self.mark: int | None = None
        self._load_best = trainer.args.load_best_model_at_end
        self._inner_loop = trainer._inner_training_loop
        trainer._inner_training_loop = self._watched_loop  # Trainer calls no callback after an error
        for name in MAKE_LOADERS:
            setattr(trainer, name, partial(_shielded, getattr(trainer, name)))
        self.source: str | None = None
        if saver.step is not None:
            self.source = str(saver.manager.store.path(saver.step))
            # Trainer would look for files in its own formats; `begin` reads ours, once the optimizer exists.
            trainer._load_from_checkpoint = self._leave_to_us

    def _leave_to_us(self, folder: str, model: Any = None) -> None:
        if str(folder) != self.source:
            type(self._trainer)._load_from_checkpoint(self._trainer, folder, model)

    def _watched_loop(self, *arguments: Any, **named: Any) -> Any:
        try:
            return self._inner_loop(*arguments, **named)
        except BaseException:
            self.end()
            raise

    # Resuming

    def begin(self) -> None:
        """Restore what Trainer has made by now: model, optimizer and the rest. Generators are restored later."""
        trainer = self._trainer
        self.saver.manager.watch(trainer.optimizer)
        if self.source is None:
            return
        saved = self.saver.restore("trainer", "trainer", self._loop(), trainer.model)
        about = saved["trainer"]
        for name, own in self._stateful().items():
            own.load_state_dict(saved[name])
        for callback, attributes in zip(self._callbacks(), about["callbacks"], strict=True):
            vars(callback).update(attributes)
        self._pending = saved["processes"][trainer.args.process_index]
        trainer._tr_loss += self._pending["running_loss"].to(trainer._tr_loss)
        trainer._total_loss_scalar = -float(trainer._tr_loss)  # of this call: what came before is not its loss
        trainer._globalstep_last_logged = about["last_logged"]
        if about["complete_at"] == trainer.state.max_steps:
            # A length of steps that ends within an epoch: Trainer would look at it after one more step.
            trainer._run_epoch = self._run_no_epoch

    def _run_no_epoch(self, **_: Any) -> None:
        self._trainer.control.should_training_stop = True

    def begin_epoch(self) -> None:
        """Before the order of the rows is drawn: restore the generators of a resumed epoch."""
        if self._pending is not None:
            restore_generators(self._pending["at_epoch"], str(self.source))
        self._at_epoch = determinism.capture()

    def begin_step(self) -> None:
        """Save the step before, if that is due: it is complete when the batches of this one are fetched."""
        if self._pending is not None:
            if self._pending["at_step"] is not None:
                restore_generators(self._pending["at_step"], str(self.source))
            self._pending = None
        elif (step := self._trainer.state.global_step) > (self.saver.step or 0):
            self._say_if_drawn()
            self.saver.save(step, lambda: self._contents(within_epoch=True))

    def _say_if_drawn(self) -> None:
        if self.mark is not None and self.mark != _mark():
            logger.warning(
                "not restored after a kill: what the rows or the collator draw at random while they are fetched;"
                " make it a function of the row"
            )

    # The end

    def keep_weights(self) -> None:
        self._trainer.args.load_best_model_at_end = self._load_best and not self.stopping

    def finish(self) -> None:
        """Save the last step of the run, unless Trainer has loaded the best weights in its place."""
        state = self._trainer.state
        replaced = self._trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
        if state.global_step and not replaced:
            within = not _between_epochs(state)
            self.saver.save(state.global_step, lambda: self._contents(within_epoch=within), force=True)

    def end(self) -> None:
        """Restore the trainer as it was; may be called twice."""
        trainer = self._trainer
        trainer.args.load_best_model_at_end = self._load_best
        for replaced in ("_inner_training_loop", "_load_from_checkpoint", "_run_epoch", *MAKE_LOADERS):
            vars(trainer).pop(replaced, None)
        self.saver.close()

    # What is saved

    def _contents(self, *, within_epoch: bool) -> dict[str, Any]:
        """The contents of a checkpoint. A collective."""
        trainer = self._trainer
        trainer.store_flos()
        now = determinism.capture()
        processes = self.saver.gather(
            {
                "at_epoch": self._at_epoch if within_epoch else now,
                "at_step": now if within_epoch else None,
                "running_loss": trainer._tr_loss.detach().clone().cpu(),
            }
        )
        state = dataclasses.asdict(trainer.state)
        if self.stopping:  # of this call, which is only a part of the run
            state["log_history"] = [line for line in state["log_history"] if "train_runtime" not in line]
        is_complete = trainer.control.should_training_stop and not self.stopping
        about = {
            "loop": self._loop(),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "last_logged": trainer._globalstep_last_logged,
            "complete_at": trainer.state.max_steps if is_complete else None,
        }
        return {
            # Under the name at which Trainer looks for it.
            "trainer_state.json": (json.dumps(state, indent=2) + "\n").encode(),
            "trainer": about,
            "model": trained_tensors(trainer.model),
            "processes": processes,
            **{name: own.state_dict() for name, own in self._stateful().items()},
        }

    def _stateful(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
        }
        return {name: own for name, own in found.items() if own is not None}

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    def _loop(self) -> Mapping[str, Any]:
        trainer = self._trainer
        rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        values = {name: getattr(trainer.args, name) for name in LOOP}
        callbacks = [type(callback).__name__ for callback in self._callbacks()]
        own = {"processes": trainer.args.world_size, "rows": rows, "callbacks": callbacks}
        return {**values, **own, "frozen weights": self._frozen}


def _require_fit(trainer: Any, callback: TrainerCheckpoints) -> None:
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    problems = {
        "it is not among the callbacks of this trainer": callback not in trainer.callback_handler.callbacks,
        f"{kind} writes its checkpoints itself": kind in OWN_CHECKPOINTS,
        "auto_find_batch_size begins again with other batches": trainer.args.auto_find_batch_size,
        "enable_jit_checkpoint wants the same signals": getattr(trainer.args, "enable_jit_checkpoint", False),
        "ignore_data_skip begins the epoch again": trainer.args.ignore_data_skip,
    }
    if found := [problem for problem, is_there in problems.items() if is_there]:
        raise ConfigError("; ".join(found), where=type(callback).__name__, hint="build the Trainer without that")


def _shielded(make_loader: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    shield_workers(loader := make_loader(*arguments, **named))
    return loader


def _between_epochs(state: Any) -> bool:
    return float(state.epoch or 0.0).is_integer()


def _mark() -> int:
    """A number that stays equal as long as nothing draws from the global generators of the CPU."""
    state = determinism.capture()
    tensors = (state["python"]["internal"], state["numpy"]["keys"], state["torch"])
    return hash((state["numpy"]["pos"], *(tensor.numpy().tobytes() for tensor in tensors)))
