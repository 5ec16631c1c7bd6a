"""The keys of a run, group by group: name, type, default, one line with its unit, and what a change of it means.

A key is declared by one of five functions. They say what it means if a resumed run has another value:

exact       other samples, other mathematics or another order: refused unless `allow_inexact_resume`
schedule    a longer or shorter run: allowed, and logged
ending      where the run ends and which step is its best; the steps themselves stay the same: allowed, and logged
rounding    the same sums in another order: allowed, but the bits differ
free        logging, saving, paths: allowed, and not worth a line
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ci_llm.core.imports import plugin_names
from ci_llm.core.scores import GREATER_IS_BETTER

ChangeKind = Literal["free", "schedule", "sample-exact"]


class DurationMark:
    """Marks a number of seconds that may also be written 90, 1h30m or HH:MM:SS."""


class SeveralMark:
    """Marks a text that may also be written as a list: its parts are joined by commas."""


def _joined(value: object) -> object:
    parts = list(value) if isinstance(value, list | tuple) else []
    return ",".join(parts) if parts and all(isinstance(part, str) for part in parts) else value


def _as_tuple(value: object) -> object:
    """A list as a tuple; text as the command line reads it: a name alone is a list of one, as in Transformers."""
    value = [part.strip() for part in value.strip("[]").split(",")] if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file has no shell that expands `~`
Sources = Annotated[PathText, BeforeValidator(_joined), SeveralMark()]
Weights = Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1), BeforeValidator(_as_tuple)]
Names = Annotated[tuple[Text, ...], MinLen(1), BeforeValidator(_as_tuple)]
Numbers = Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1), BeforeValidator(_as_tuple)]
Count = Annotated[int, Ge(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Size = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
Dropout = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Gt(0), Le(10**9), DurationMark()]  # 31 years: dates beyond overflow
# To read, these are numbers: config/auto.py puts one where `auto` is written, run/start/loading.py where rows decide.
if TYPE_CHECKING:
    AutoCount = int
    AutoLength = int
    AutoRate = float
    AutoLimit = int | None
    AutoAmount = float | None
else:
    AutoCount = Count | Literal["auto"]
    AutoLength = Annotated[int, Ge(2)] | Literal["auto"]
    AutoRate = Positive | Literal["auto"]
    AutoLimit = Count | Literal["auto"] | None
    AutoAmount = Positive | Literal["auto"] | None
# The values of these keys are the modules of a package, so that a new one needs no edit here.
if TYPE_CHECKING:
    Diversity = str
    Objective = str
    Aggregator = str
    Tracker = str
    Backend = str
    Metric = str
else:
    Metric = Literal[tuple(GREATER_IS_BETTER)]
    Diversity = Literal[plugin_names("ci_llm.crowd.diversity", first="none")]
    Objective = (
        Literal[("auto", *plugin_names("ci_llm.objectives", first="sft"))]
        | Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    )
    Aggregator = Literal[plugin_names("ci_llm.crowd.aggregators", first="probability")]
    Tracker = Literal[plugin_names("ci_llm.logs.trackers", first="tensorboard")]
    Backend = Literal[plugin_names("ci_llm.checkpoints.backends", first="vanilla")]
Signals = Annotated[
    tuple[Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"], ...],
    BeforeValidator(_as_tuple),
]


def _key(default: Any, doc: str, kind: ChangeKind, keeps_bits: bool) -> Any:
    return Field(default, description=doc, json_schema_extra={"kind": kind, "keeps_bits": keeps_bits})


def exact(default: Any, doc: str) -> Any:
    """A key whose change would train on other samples, with other mathematics or in another order."""
    return _key(default, doc, "sample-exact", False)


def schedule(default: Any, doc: str) -> Any:
    """A key that says how long the run is."""
    return _key(default, doc, "schedule", False)


def ending(default: Any, doc: str) -> Any:
    """A key that decides where the run ends or which step is its best; every step keeps its bits."""
    return _key(default, doc, "schedule", True)


def rounding(default: Any, doc: str) -> Any:
    """A key whose change keeps samples and mathematics, but may round differently."""
    return _key(default, doc, "free", False)


def free(default: Any, doc: str) -> Any:
    """A key about logging, saving or paths."""
    return _key(default, doc, "free", True)


class Keys(BaseModel):
    """Strict, frozen values; an unknown key, NaN and infinity are errors."""

    # Pydantic builds what checks the values at first use, which a group alone never has.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


class BaseModelKeys(Keys):
    """The frozen base model"""

    model_name: PathText = free("embedded", "base model: embedded, a hub id, a folder, or a GGUF file")
    model_dtype: Literal["fp16", "bf16", "fp32", "fp64", "auto"] | None = exact(
        None,
        "precision of the frozen base: fp16, bf16, fp32 or fp64; null: fp32 on CPU, that of the checkpoint on CUDA;"
        " auto: bf16 where the hardware multiplies it faster, else fp32",
    )
    quantization: Literal["nf4", "int8"] | None = exact(
        None, "store the linear layers of the base in 4 bits (nf4) or 8 (int8); needs the extra ci-llm[quantization]"
    )
    base_sharding: Literal["none", "layers"] = free(
        "none", "layers: each process stores a part of every layer of the base, and gathers one layer at a time"
    )
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = exact(
        "no",
        "autocast precision of the forward pass: no, fp16 or bf16; auto: bf16 where the hardware multiplies it faster,"
        " else no, and a run keeps what it began with; if not given, that of accelerate launch",
    )
    use_gradient_checkpointing: bool | Literal["auto"] = rounding(
        False, "recompute layers in the backward pass: less memory, slower; auto: where they would not fit otherwise"
    )
    pass_per_agent: bool | Literal["auto"] = rounding(
        "auto",
        "a pass through the base for each agent, not one for all: 1/K of the activations, and an agent has the bits"
        " that it has alone; auto: on a CPU, with deterministic true, and where one pass for all would not fit, but not"
        " with base_sharding layers",
    )
    kernels: Literal["auto", "fast", "plain"] = rounding(
        "auto",
        "how head, norms, rotations, gates and layers that share an input are computed: plain, as the base's own code"
        " does, or fast, with fewer passes over memory; auto: fast, and a run keeps what it began with",
    )


class AgentKeys(Keys):
    """The agents: K LoRA adapters on the one base"""

    num_agents: Count = exact(4, "number of agents (K) that train together")
    lora_rank: AutoCount = exact("auto", "rank of each adapter; auto: 8 on the embedded base, else 16")
    lora_alpha: AutoCount = exact(
        "auto", "an adapter is scaled by alpha / rank; auto: 16 on the embedded base, else 32"
    )
    lora_dropout: Dropout = exact(0.0, "probability of dropping an input of an adapter; 0: off, which is faster")
    lora_target_modules: Literal["all-linear"] | Names = exact(
        "all-linear", "linear layers that get an adapter: all-linear, or a list of names as in PEFT"
    )
    agent_layers: Literal["all", "upper_half"] | Numbers = exact(
        "all", "layers that get adapters: all, upper_half, or a list of numbers; what is below runs once for all agents"
    )
    use_rslora: bool = exact(False, "scale by alpha / sqrt(rank)")
    initialize_adapters_rand: bool = exact(
        True,
        "true: each agent starts at its own random point; false: all start alike, and lora_dropout or dropconnect_p"
        " must tell them apart",
    )
    dropconnect_p: Dropout = exact(0.0, "probability of dropping a weight of an adapter, drawn anew in each step")
    agents: tuple[dict[str, Any], ...] = exact(
        (), "settings of single agents, a list of mappings over the common keys (docs/agents.md)"
    )
    branch_at: Annotated[float, Gt(0), Lt(1)] | None = exact(
        None, "train one agent for this share of the agent-steps, then num_agents clones; null: off (docs/crowd.md)"
    )
    crowd: Literal["fixed", "auto"] = exact("fixed", "auto: one agent begins, and the others may join (docs/crowd.md)")
    init_from: PathText | None = exact(
        None, "folder of PEFT adapters to start from, one for each agent or one for all; null: fresh adapters"
    )


class ObjectiveKeys(Keys):
    """The objective, and how the agents answer together"""

    objective: Objective = exact(
        "auto",
        "what is learned: sft (answers), dpo, orpo or simpo (pairs of answers), kto (rated answers), reward (pairs),"
        " classification or regression (text and label), or module:name; auto: by the columns, dpo for prompt, chosen,"
        " rejected, kto for prompt, completion, label, and classification or regression for text, label"
        " (docs/objectives.md)",
    )
    beta: Positive = exact(
        0.1, "weight of dpo, kto, orpo and simpo: more holds agents nearer to the base, or weighs odds more"
    )
    loss_type: Names | None = exact(
        None,
        "form of dpo: sigmoid, robust, ipo, hinge, sigmoid_norm, apo_zero, sft or a list; of kto: kto or"
        " apo_zero_unpaired; null: the first of them",
    )
    loss_weights: Weights | None = exact(None, "weight of each of several loss_type of dpo; null: 1 each")
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = exact(
        0.0, "share of pairs that are taken to be turned round, for loss_type robust"
    )
    desirable_weight: Positive = exact(1.0, "weight of good rows in kto")
    undesirable_weight: Positive = exact(1.0, "weight of bad rows in kto")
    simpo_gamma: Amount = exact(0.5, "margin of simpo")
    cpo_alpha: Amount = exact(1.0, "weight of the next-token loss of the chosen answer in simpo; 0: the paper's SimPO")
    reference: Literal["base", "start"] = exact(
        "base", "what dpo and kto compare agents with: the base without agents, or the adapters of init_from"
    )
    disable_dropout: bool = exact(
        False, "switch off the dropout of the base as well, which most bases do not have; lora_dropout must be 0 then"
    )
    center_rewards_coefficient: Amount | None = exact(
        None, "in reward, weight of the squared sum of a pair's two rewards; null: none"
    )
    num_labels: Count | None = exact(
        None, "classes of classification, where some may be missing in the rows; null: as many as the rows have"
    )
    label_names: Names | None = exact(None, "names of the classes, in the order of their numbers; null: by the rows")
    diversity: Diversity = exact(
        "none",
        "loss term that keeps agents apart: none, joint (Jensen gap), swd or swd_raw (sliced Wasserstein distance)",
    )
    lambda_sw: Amount = exact(0.1, "weight of the diversity term")
    swd_num_projections: Count = exact(64, "random directions of the sliced Wasserstein distance")
    swd_representation: Literal["last_token", "mean", "first_token"] = exact(
        "last_token", "hidden state of a row that swd compares: last_token, first_token or mean"
    )
    aggregator: Aggregator = free(
        "probability",
        "how agents become one crowd: token by token (probability, logit, confidence, dirichlet), or by a vote over"
        " whole answers (majority, weighted_vote, rerank, self_consistency)",
    )
    dirichlet_alpha_aggregator: Positive = free(
        1.0,
        "concentration, per agent, of the Dirichlet from which a calibration learns the weights of dirichlet; without"
        " effect until ci-llm evaluate --calibrate",
    )


class DataKeys(Keys):
    """The data"""

    dataset_name: Sources = free(
        "embedded", "embedded, a hub id, a file, a glob, or a folder; several with commas between, or as a list"
    )
    dataset_weights: Weights | None = exact(
        None, "share of each of several data sets, in any unit; null: every row of each"
    )
    dataset_subset: Text | None = exact(None, "configuration of a hub data set, such as main; null: its only one")
    dataset_split: Text = exact("train", "split to train on")
    eval_split: Text | None = free(
        None, "split to evaluate on; null: validation or test if there is one, else a tenth of the rows"
    )
    eval_dataset_name: Sources | None = free(
        None, "data set to evaluate on, as dataset_name; null: eval_split, or rows held out"
    )
    val_set_size: Amount | None = exact(
        None, "rows held out to evaluate on, or below 1 their share; null: a tenth if no split is for it, 400 at most"
    )
    prompt_column: Text | None = exact(None, "column of the prompt, beside answer_column; null: found by its name")
    answer_column: Text | None = exact(None, "column of the answer; null: found by its name")
    text_column: Text | None = exact(None, "column of plain text to learn; null: found by its name")
    messages_column: Text | None = exact(None, "column of chats; null: found by its name")
    label_column: Text | None = exact(None, "column of labels, beside text_column; null: found by its name")
    chat_template: Text | None = exact(
        None, "plain, roles, chatml, a template of the tokenizer by name, a file, or a text; null: the tokenizer's own"
    )
    train_on_prompt: bool = exact(False, "learn all of a row, and not only what the assistant says")
    held_out: Literal["auto", "drawn", "spread"] = exact(
        "auto", "rows to evaluate on: drawn by seed, or spread evenly; auto: drawn, but spread for the embedded rows"
    )
    max_seq_length: AutoLength = exact(
        "auto", "tokens per row; auto: 256 on the embedded base, else of the longest row, if the base has the positions"
    )
    long_rows: Literal["auto", "split", "truncate", "drop"] = exact(
        "auto",
        "rows of more tokens: truncate: the end is cut off; drop: they are left out; split, as auto: plain text is cut"
        " into blocks, which together teach all of it, and other rows are truncated",
    )
    max_train_samples: AutoLimit = exact(
        None, "train on the first n rows; null: on all; auto: on 100 of the embedded rows, else on all"
    )
    num_workers: Size = free(4, "data loading processes per training process; 0: the training process loads")


class TrainingKeys(Keys):
    """Training: length, batch, optimizer, schedule"""

    epochs: Positive = schedule(3.0, "passes over the rows, also a fraction such as 1.5; max_train_steps wins over it")
    max_train_steps: AutoLimit = schedule(
        None, "optimizer steps of the whole run; null: epochs decides; auto: 260 on the embedded rows, else null"
    )
    batch_size: Count = rounding(4, "rows per process and micro-step")
    gradient_accumulation_steps: Count = rounding(
        1, "micro-steps per optimizer step; if not given, that of accelerate launch"
    )
    global_batch_size: Count | None = exact(
        None, "rows per optimizer step; null: batch_size x processes x gradient_accumulation_steps"
    )
    optimizer: Literal["adamw", "ivon"] = exact("adamw", "adamw, or ivon, which learns a distribution of weights")
    learning_rate: AutoRate = exact(
        "auto", "peak learning rate; auto: 8e-3 on the embedded base, else 2e-4; of IVON 2, else 1"
    )
    weight_decay: Amount = exact(0.01, "decoupled weight decay; IVON takes about 1e-4")
    adam_beta1: Dropout = exact(0.9, "decay of AdamW's first moment")
    adam_beta2: Dropout = exact(0.999, "decay of AdamW's second moment")
    adam_epsilon: Positive = exact(1e-8, "added to the root of AdamW's second moment")
    ivon_hess_init: Positive = exact(1.0, "IVON's estimate of the Hessian at the start; more is less noise")
    ivon_ess: AutoAmount = exact(
        "auto",
        "IVON's effective number of examples, more is less noise; null: tokens learned in its rows; auto: as null, but"
        " on another base than the embedded one at least a fiftieth of the numbers that an agent trains",
    )
    max_grad_norm: Positive | None = exact(1.0, "gradient norm to which each agent is clipped; null: no clipping")
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
    ] = exact("cosine", "learning-rate schedule, by its name in Transformers, such as linear or constant")
    num_warmup_steps_ratio: Share = exact(0.05, "share of the run in which the learning rate rises to its peak")
    num_warmup_steps: Size | None = exact(
        None, "optimizer steps in which the learning rate rises; null: num_warmup_steps_ratio decides"
    )
    schedule_steps: Count | None = exact(
        None, "optimizer steps over which the learning rate follows its schedule; null: those of the whole run"
    )
    row_weights: Literal["uniform", "bootstrap"] = exact(
        "uniform", "weight of a row in the loss; bootstrap: each agent draws its own once, exponential with mean 1"
    )
    fused_optimizer: bool = rounding(True, "AdamW in one fused kernel; false: the plain one")
    seed: Seed = exact(42, "seed of everything random")
    data_seed: Seed | None = exact(None, "seed of the order of the rows; null: seed")


class EvaluationKeys(Keys):
    """Evaluation"""

    eval_steps: Count | None = free(100, "evaluate every n optimizer steps; null: at the end only")
    eval_samples: AutoLimit = free(
        "auto",
        "rows of each evaluation; null: all; auto: 400 on the embedded base, else at least 50, and as many as let all"
        " evaluations read at most a third of the tokens that training reads",
    )
    generation_eval_samples: Size = free(
        100, "of these, rows for which agents and crowd generate answers at the end; 0: none"
    )
    max_new_tokens_eval: Count | Literal["auto"] = free(
        "auto",
        "tokens generated per answer at most; auto: twice those of the longest reference that is asked for, at least"
        " 16; with the embedded base 256",
    )
    early_stopping_patience: Count | None = ending(
        None, "end after n evaluations in a row that did not improve the crowd; null: off"
    )
    early_stopping_threshold: Amount = ending(0.0, "smallest gain of metric_for_best_model that counts as improvement")
    metric_for_best_model: Metric = ending(
        "nll",
        "measure of the crowd that decides which evaluation is best: nll (less is better) or exact_match (more is); of"
        " pairs also rewards/accuracies, of classes f1, of numbers mse, and more (docs/objectives.md)",
    )
    load_best_model_at_end: bool = free(
        False, "make final_checkpoint of the best step, and evaluate that one at the end; false: of the last step"
    )


class LogKeys(Keys):
    """Output and logs"""

    output_dir: PathText = free("ci_llm_output", "folder of the run")
    experiment_name: Text | None = free(None, "sub-folder of output_dir for this run; null: output_dir itself")
    logging_steps: Count = free(10, "log every n optimizer steps")
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)] = free(
        ("tensorboard",), "trackers: none, tensorboard, wandb, mlflow, trackio, or a list"
    )
    progress_bar: bool = free(
        True, "show a live area with bars on a terminal and in a notebook; false: a line per interval, as in a file"
    )
    show_loss_curve: bool = free(False, "draw the losses in characters after every evaluation")
    show_example: bool = free(
        True, "show one question with the crowd's answer after every evaluation, if rows have questions"
    )
    write_report: bool = free(True, "write report.html when a run has ended or was interrupted")
    loss_csv: bool = free(
        False, "write the loss of every optimizer step to loss_log.csv, with the columns Step and Loss"
    )
    monitor_gpu: bool = free(False, "write the load of the GPUs to gpu_stats.json while training")
    log_memory_usage: bool = free(False, "log the memory in use with every logged step")
    profile_steps: Count | None = free(
        None, "trace the first n steps after each start into the sub-folder profile; null: off"
    )


class CheckpointKeys(Keys):
    """Checkpoints"""

    save_steps: Count | None = free(100, "save every n optimizer steps; null: off")
    save_interval_seconds: Seconds | Literal["auto"] | None = free(
        300.0,
        "save every n seconds; auto: at the interval that costs least, from the measured time of a save and the"
        " interruptions so far; null: off",
    )
    save_total_limit: Count | None = free(3, "newest checkpoints that are kept; null: all")
    resume_from_checkpoint: PathText | None = free(
        "latest", "where the run begins: latest, a checkpoint, the folder of a run, or null for a fresh start"
    )
    restart_from: PathText | None = free(None, "go back, once, to this step of the run or this checkpoint; null: off")
    overwrite_output_dir: bool = free(
        False, "begin a new run, once, where another one is; the other one moves to the sub-folder overwritten"
    )
    allow_inexact_resume: bool = free(
        False, "resume with a changed configuration or data, although the run will not be the same"
    )
    deterministic: bool | Literal["auto"] = rounding("auto", "deterministic algorithms; auto: wherever they exist")
    tf32: bool = rounding(
        False, "on a GPU, multiply fp32 as TF32: several times faster, with 10 bits of mantissa in place of 23"
    )
    async_save: bool = free(True, "write checkpoints while training goes on")
    checkpoint_backend: Backend = free(
        "vanilla", "vanilla: process 0 writes; distributed: every process writes its part"
    )
    on_disk_full: Literal["drop", "pause"] = free(
        "drop", "drop: give the new checkpoint up and go on; pause: wait for space"
    )
    mirror: Text | None = free(
        None, "object store that gets every checkpoint, as s3://bucket/prefix, and fills an empty disk; null: none"
    )
    mirror_max_mb_per_s: Positive | None = free(None, "megabytes per second that the mirror may take; null: no bound")
    mirror_compression: Literal["auto", "zstd", "none"] = free(
        "auto", "auto: compress the blocks that zstd makes at least 5 % smaller; zstd: all that become smaller; or none"
    )
    push_to_hub: bool = free(False, "publish the result on the Hugging Face Hub when the run is complete")
    hub_model_id: Text | None = free(
        None, "repository for push_to_hub, as user/name or name; null: the name of the run's folder"
    )


class InterruptionKeys(Keys):
    """Interruption, walltime, SLURM"""

    stop_signals: Signals = free(("SIGTERM", "SIGINT", "SIGUSR2"), "signals after which the run saves and ends")
    save_signals: Signals = free(("SIGUSR1",), "signals after which the run saves and goes on")
    grace_s: Seconds = free(30.0, "seconds between a signal and the kill, if SLURM does not tell")
    max_runtime: Seconds | None = free(
        None, "save and end before n seconds, 1h30m or HH:MM:SS have passed; null: no limit"
    )
    stop_before_walltime: bool | Literal["auto"] = free(
        "auto", "save and end before the time limit of the job; auto: under SLURM"
    )
    requeue: bool | Literal["auto"] = free("auto", "ask SLURM to run an interrupted job again; auto: if allowed")
    max_requeues: Size = free(100, "how often a job is requeued at most")
    interrupted_exit_code: Annotated[int, Ge(0), Le(255)] = free(0, "exit code after a clean interruption")


class RecoveryKeys(Keys):
    """Self-healing"""

    nonfinite_lr_factor: Annotated[float, Gt(1)] = exact(
        1.5, "divides the learning rate of an agent after a non-finite step"
    )
    max_consecutive_nonfinite: Count = exact(5, "non-finite steps in a row after which an agent is rolled back")
    good_after_steps: Count = exact(50, "finite steps in a row after which an agent counts as healthy again")
    drop_nonfinite_agents: bool = exact(
        False, "an agent that stays nonfinite takes no further steps, and the others go on; false: the run ends"
    )
    hang_timeout: Seconds | None = free(
        None, "seconds without progress that count as a hang; null: learned from the steps so far"
    )


class AllKeys(
    RecoveryKeys,
    InterruptionKeys,
    CheckpointKeys,
    LogKeys,
    EvaluationKeys,
    TrainingKeys,
    DataKeys,
    ObjectiveKeys,
    AgentKeys,
    BaseModelKeys,
):
    """All keys of a run. Pydantic collects the fields of bases from last to first, which gives their order."""
