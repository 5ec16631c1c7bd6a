"""The keys of a run, group by group: name, type, default, one line with its unit, and what its change means.

Every key is declared by one of five words, which say what a change between two attempts of a run means:

exact       other samples, other maths or another order: refused on a resume unless `allow_inexact_resume`
schedule    a longer or shorter run: allowed, and said
ending      where a run ends and which step is its best; each step stays what it is: allowed, and said
rounding    the same sums in another order: allowed, but no longer the same bits
free        logging, saving, places: allowed, nothing to say
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

ChangeKind = Literal["free", "schedule", "sample-exact"]


class DurationMark:
    """Marks a number of seconds that may also be written 90, 1h30m or HH:MM:SS."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, StringConstraints(min_length=1)]
Place = Annotated[Text, AfterValidator(os.path.expanduser)]  # `~` is home, also where no shell has read it
Names = Annotated[tuple[Text, ...], MinLen(1), BeforeValidator(_as_tuple)]
Count = Annotated[int, Ge(1)]
Size = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Dropout = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Gt(0), Le(10**9), DurationMark()]  # 31 years: no calendar ends before
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Signals = Annotated[
    tuple[Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"], ...],
    BeforeValidator(_as_tuple),
]


def _key(default: Any, doc: str, kind: ChangeKind, keeps_bits: bool) -> Any:
    return Field(default, description=doc, json_schema_extra={"kind": kind, "keeps_bits": keeps_bits})


def exact(default: Any, doc: str) -> Any:
    """A key whose change would train on other samples, with other maths or in another order."""
    return _key(default, doc, "sample-exact", False)


def schedule(default: Any, doc: str) -> Any:
    """A key that says how long the run is."""
    return _key(default, doc, "schedule", False)


def ending(default: Any, doc: str) -> Any:
    """A key that may end the run sooner or later, or names its best step; every step keeps its bits."""
    return _key(default, doc, "schedule", True)


def rounding(default: Any, doc: str) -> Any:
    """A key whose change keeps samples and maths, but may round differently."""
    return _key(default, doc, "free", False)


def free(default: Any, doc: str) -> Any:
    """A key about logging, saving or places."""
    return _key(default, doc, "free", True)


class Keys(BaseModel):
    """Strict, frozen values; an unknown key, NaN and infinity are errors."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class BaseModelKeys(Keys):
    """The frozen base model"""

    model_name: Place = free("embedded", "base model: embedded, a hub id, or a folder")
    model_dtype: Literal["fp16", "bf16", "fp32", "fp64"] | None = exact(
        None, "precision of the frozen base; null: fp32 on CPU, the checkpoint's own on CUDA"
    )
    mixed_precision: Literal["no", "bf16", "fp16"] = exact(
        "no", "autocast precision of the forward pass; unset: what accelerate launch says"
    )
    use_gradient_checkpointing: bool = rounding(False, "recompute layers in the backward pass: less memory, slower")


class AgentKeys(Keys):
    """The agents: K LoRA adapters on the one base"""

    num_agents: Count = exact(4, "agents K that train together")
    lora_rank: Count = exact(8, "rank of each adapter")
    lora_alpha: Count = exact(16, "scales each adapter: alpha / rank, or alpha / sqrt(rank) with use_rslora")
    lora_dropout: Dropout = exact(0.0, "probability of dropping an input of an adapter; 0: off, and faster")
    lora_target_modules: Literal["all-linear"] | Names = exact(
        "all-linear", "Linear layers that get an adapter: all-linear, or a list of names as in PEFT"
    )
    use_rslora: bool = exact(False, "scale by alpha / sqrt(rank)")
    initialize_adapters_rand: bool = exact(True, "true: every agent its own random start; false: all the same start")
    dropconnect_p: Dropout = exact(0.0, "probability of dropping a weight of an adapter in a step")
    init_from: Place | None = exact(None, "folder of PEFT adapters to start from; null: fresh adapters")


class ObjectiveKeys(Keys):
    """What the agents learn, and how they answer together"""

    diversity: Literal["none", "joint", "swd", "swd_raw"] = exact(
        "none", "term that keeps agents apart: Jensen gap (joint), sliced Wasserstein distance (swd, swd_raw)"
    )
    lambda_sw: Amount = exact(0.1, "weight of the diversity term")
    swd_num_projections: Count = exact(64, "random directions of the sliced Wasserstein distance")
    swd_representation: Literal["last_token", "mean", "first_token"] = exact(
        "last_token", "hidden state of a row that swd compares"
    )
    aggregator: Literal["probability", "logit"] = free(
        "probability", "how the crowd answers: mean of probabilities or of logits"
    )
    dirichlet_alpha_aggregator: Positive = free(1.0, "concentration of the original's symmetric Dirichlet")
    parallel_mode: bool = free(False, "the original's parallel agents")


class DataKeys(Keys):
    """The data"""

    dataset_name: Place = free("embedded", "embedded, a hub id, a file, a glob, or a save_to_disk folder")
    dataset_subset: Text | None = exact(None, "configuration of a hub data set, such as main")
    dataset_split: Text = exact("train", "split to train on")
    eval_split: Text | None = free(None, "split to evaluate on; null: test or validation where it exists")
    max_seq_length: Annotated[int, Ge(2)] = exact(512, "tokens per row; longer rows are left out or cut, and counted")
    max_train_samples: Count | None = exact(None, "train on the first n rows only; null: all")
    num_workers: Size = free(4, "loader processes per training process; 0: load in the training process")


class TrainingKeys(Keys):
    """How long, how much at once, how fast"""

    epochs: Count = schedule(3, "passes over the rows; max_train_steps in the same place overrules it")
    max_train_steps: Count | None = schedule(None, "optimizer steps of the whole run; null: epochs decides")
    batch_size: Count = rounding(4, "rows per process and micro-step")
    gradient_accumulation_steps: Count = rounding(
        1, "micro-steps per optimizer step; unset: what accelerate launch says"
    )
    global_batch_size: Count | None = exact(
        None, "rows per optimizer step; null: batch_size x processes x gradient_accumulation_steps"
    )
    learning_rate: Positive = exact(2e-4, "peak learning rate of AdamW")
    weight_decay: Amount = exact(0.01, "decoupled weight decay of AdamW")
    max_grad_norm: Positive | None = exact(1.0, "gradient norm each agent is clipped to; null: no clipping")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "reduce_lr_on_plateau",
        "greedy",
    ] = exact("cosine", "learning-rate schedule, by its name in Transformers")
    num_warmup_steps_ratio: Share = exact(0.05, "share of the run in which the learning rate rises")
    num_warmup_steps: Size | None = exact(None, "optimizer steps in which it rises; overrules the ratio")
    fused_optimizer: bool = rounding(True, "AdamW in one kernel")
    seed: Annotated[int, Ge(0), Lt(2**32)] = exact(42, "seed of everything random")


class EvaluationKeys(Keys):
    """Evaluation"""

    eval_steps: Count | None = free(100, "evaluate every n optimizer steps; null: only at the end")
    eval_samples: Count | None = free(400, "rows of the final evaluation; null: all")
    generation_eval_samples: Size = free(
        100, "rows of the final evaluation that agents and crowd answer by generation; 0: none"
    )
    max_new_tokens_eval: Count = free(256, "tokens generated per answer in an evaluation")
    early_stopping_patience: Count | None = ending(
        None, "end after n evaluations in a row without a better crowd; null: off"
    )
    early_stopping_threshold: Amount = ending(0.0, "a better crowd is better by more than this")
    metric_for_best_model: Literal["nll", "exact_match"] = ending(
        "nll", "what says that the crowd is better: nll or exact_match of an evaluation"
    )
    greater_is_better: bool | None = free(None, "null: as metric_for_best_model means it")
    load_best_model_at_end: bool = free(
        False, "judge the best step at the end, and make final_checkpoint of it; false: of the last step"
    )


class LogKeys(Keys):
    """Where a run writes, and what it tells"""

    output_dir: Place = free("ci_llm_output", "folder of the run")
    experiment_name: Text | None = free(None, "sub-folder of output_dir for this run; null: output_dir itself")
    logging_steps: Count = free(10, "log every n optimizer steps")
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)] = free(
        ("tensorboard",), "trackers: none, tensorboard, wandb, mlflow, trackio, or a list"
    )
    write_report: bool = free(
        True, "write report.html when a run has ended or was interrupted, if matplotlib is installed"
    )
    monitor_gpu: bool = free(False, "write gpu_stats.json while training")
    log_memory_usage: bool = free(False, "log memory in use with every logged step")
    profile_steps: Count | None = free(
        None, "trace the first n steps of an attempt into the sub-folder profile; null: off"
    )


class CheckpointKeys(Keys):
    """Checkpoints"""

    save_steps: Count | None = free(100, "save every n optimizer steps; null: off")
    save_interval_seconds: Seconds | Literal["auto"] | None = free(
        300.0, "save every n seconds; auto: as often as loses least, by what saves and failures cost here; null: off"
    )
    save_total_limit: Count | None = free(3, "checkpoints kept; null: all")
    resume_from_checkpoint: Place | None = free("latest", "latest, a path, or null for a fresh start")
    allow_inexact_resume: bool = free(False, "resume although the run would not be the same")
    deterministic: bool | Literal["auto"] = rounding("auto", "deterministic algorithms; auto: where they exist")
    async_save: bool = free(True, "write checkpoints behind the training")
    checkpoint_backend: Literal["vanilla", "distributed"] = free(
        "vanilla", "vanilla: one writer; distributed: every process writes its part"
    )
    on_disk_full: Literal["drop", "pause"] = free("drop", "drop the new checkpoint and go on, or wait")


class InterruptionKeys(Keys):
    """Interruption, walltime, SLURM"""

    stop_signals: Signals = free(("SIGTERM", "SIGINT", "SIGUSR2"), "signals after which the run saves and ends")
    save_signals: Signals = free(("SIGUSR1",), "signals after which the run saves and goes on")
    grace_s: Seconds = free(30.0, "seconds between a signal and the kill, where SLURM does not say")
    max_runtime: Seconds | None = free(None, "stop in time before n seconds, 1h30m or HH:MM:SS; null: no limit")
    stop_before_walltime: bool | Literal["auto"] = free("auto", "stop before the job's limit; auto: under SLURM")
    requeue: bool | Literal["auto"] = free("auto", "ask SLURM to run an interrupted job again; auto: if allowed")
    max_requeues: Size = free(100, "times a job is put back into the queue")
    interrupted_exit_code: Annotated[int, Ge(0), Le(255)] = free(0, "exit code after a clean interruption")


class RecoveryKeys(Keys):
    """Self-healing"""

    nonfinite_lr_factor: Annotated[float, Gt(1)] = exact(1.5, "divides an agent's learning rate after a bad step")
    max_consecutive_nonfinite: Count = exact(5, "non-finite steps in a row before an agent is set back")
    good_after_steps: Count = exact(50, "finite steps after which a checkpoint counts as good")
    hang_timeout: Seconds | None = free(None, "seconds without progress that count as a hang; null: learned")


class DeclinedKeys(Keys):
    """Known from elsewhere, without effect here"""

    use_deepspeed: bool = free(False, "declined: DeepSpeed owns backward, step and checkpoint")
    deepspeed_config_file: Text | None = free(None, "declined with use_deepspeed")
    streaming: bool = free(
        False, "declined: which rows come next depends on shards and a buffer, so no resume is exact"
    )
    compile: bool = free(
        False, "declined: no faster on packed rows, and compiled kernels depend on the lengths met first"
    )


#: Known and valid, without effect for good: the reason is said once when the value is not the default.
NO_EFFECT: dict[str, str] = {
    "parallel_mode": "all agents always train in one fused pass",
    "dirichlet_alpha_aggregator": "the mean of a symmetric Dirichlet is uniform, whatever its alpha",
    "greater_is_better": "metric_for_best_model says it: less nll, more exact_match",
    "use_deepspeed": "declined: DeepSpeed owns backward, step and checkpoint",
    "deepspeed_config_file": "declined together with use_deepspeed",
    "streaming": "declined, the data set is loaded as a whole: which rows come next of a stream depends on shards and"
    " a buffer, so that no resume could be exact",
    "compile": "declined: packed rows have another length in every step; compiled for that, layers were no faster"
    " (docs/benchmarks.md), and their kernels are chosen by the lengths met first, which a resumed run does not share",
}
