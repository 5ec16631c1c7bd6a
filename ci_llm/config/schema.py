"""All keys of a run: what is learned, by what and from which rows, and then how the run goes.

Each is declared with type, default, one line with its unit, and what else holds of it (`Traits`), by one of five
functions. They say what it means if a resumed run has another value:

exact       other samples, other mathematics or another order: refused unless `allow_inexact_resume`
schedule    a longer or shorter run: allowed, and logged
ending      where the run ends and which step is its best; the steps themselves stay the same: allowed, and logged
rounding    the same sums in another order: allowed, but the bits differ
free        logging, saving, paths: allowed, and not worth a line
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypedDict, Unpack

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.fields import FieldInfo

from ci_llm.core.imports import plugin_names
from ci_llm.core.measures import METRICS

ChangeKind = Literal["free", "schedule", "sample-exact"]


#: Marks a number of seconds that may also be written 90, 1h30m or HH:MM:SS.
DURATION: Final = "duration"
#: Marks a text that may also be written as a list: its parts are joined by commas.
SEVERAL: Final = "several"


Text = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file has no shell that expands `~`
Sources = Annotated[PathText, SEVERAL]
Weights = Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)]
Names = Annotated[tuple[Text, ...], MinLen(1)]
Numbers = Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1)]
Day = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d$")]
Count = Annotated[int, Ge(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Size = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
TopShare = Annotated[float, Gt(0), Le(1)]
Several = Annotated[int, Ge(2)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Gt(0), Le(10**9), DURATION]  # 31 years: dates beyond overflow
# To read, these are numbers: config/auto.py puts one where `auto` is written, run/start/loading.py where rows decide.
if TYPE_CHECKING:
    AutoCount = int
    AutoLength = int
    AutoRate = float
    AutoAmount = float
    AutoLimit = int | None
else:
    AutoCount = Count | Literal["auto"]
    AutoLength = Annotated[int, Ge(2)] | Literal["auto"]
    AutoRate = Positive | Literal["auto"]
    AutoAmount = Amount | Literal["auto"]
    AutoLimit = Count | Literal["auto"] | None
# The values of these keys are what a package defines and its modules, so that a new one needs no edit here.
if TYPE_CHECKING:
    Diversity = str
    Objective = str
    Aggregator = str
    Tracker = str
    Backend = str
    Metric = str
else:
    Metric = Literal[tuple(METRICS)]
    Diversity = Literal[plugin_names("ci_llm.crowd.diversity")]
    Objective = (
        Literal[("auto", *plugin_names("ci_llm.objectives"))]
        | Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    )
    Aggregator = Literal[plugin_names("ci_llm.crowd.aggregators")]
    Tracker = Literal[plugin_names("ci_llm.logs.trackers")]
    Backend = Literal[plugin_names("ci_llm.checkpoints.backends")]
Trackers = tuple[Tracker, ...]


class Traits(TypedDict, total=False):
    """The rest of what holds of a key; each trait is optional.

    Attributes:
        own: an agent may have a value of its own; the number is the key's place among such keys, a new one comes last.
        shape: such a key gives an adapter its shape and scale: a copy of an agent has the same value.
        rows: such a key says which rows an agent trains on.
        stronger_than: the other key for the same thing; within one source this one decides, unless it is null.
        rivals: other ways to the same thing, of which one source may name one.
        no_sweep: why a sweep cannot take the key, and what to do instead.
        evaluable: `ci-llm evaluate` may change it.
        recorded: its effect is recorded with the environment of a checkpoint, and compared there.
        place: it says where a run lies, not what it is.
    """

    own: int
    shape: bool
    rows: bool
    stronger_than: str
    rivals: tuple[str, ...]
    no_sweep: tuple[str, str]
    evaluable: bool
    recorded: bool
    place: bool


def _key(default: Any, doc: str, kind: ChangeKind, keeps_bits: bool, traits: Traits) -> Any:
    meaning: dict[str, Any] = {"kind": kind, "keeps_bits": keeps_bits, **traits}
    return Field(default, description=doc, json_schema_extra=meaning)


def exact(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key whose change would train on other samples, with other mathematics or in another order."""
    return _key(default, doc, "sample-exact", False, traits)


def schedule(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key that says how long the run is."""
    return _key(default, doc, "schedule", False, traits)


def ending(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key that decides where the run ends or which step is its best; every step keeps its bits."""
    return _key(default, doc, "schedule", True, traits)


def rounding(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key whose change keeps samples and mathematics, but may round differently."""
    return _key(default, doc, "free", False, traits)


def free(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key about logging, saving or paths."""
    return _key(default, doc, "free", True, traits)


class Keys(BaseModel):
    """Strict, frozen values; an unknown key, NaN and infinity are errors."""

    # Pydantic builds what checks the values at first use, which a group alone never has.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )


# Each group has the keys of those above it as well, so that the last one has all.


class BaseModelKeys(Keys):
    """The frozen base model"""

    model_name: PathText = free("embedded", "base model: embedded, a hub id, a folder, or a GGUF file")
    model_dtype: Literal["fp16", "bf16", "fp32", "fp64", "auto"] | None = exact(
        None,
        "precision of the base: fp16, bf16, fp32 or fp64; null: fp32 on CPU, that of the checkpoint on CUDA;"
        " auto: bf16 if the hardware multiplies it faster, else fp32",
    )
    quantization: Literal["nf4", "int8"] | None = exact(
        None, "store the linear layers of the base in 4 bits (nf4) or 8 (int8); needs the extra ci-llm[quantization]"
    )
    base_sharding: Literal["none", "layers"] = free(
        "none", "layers: each process stores a part of every layer of the base"
    )
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = exact(
        "no",
        "autocast precision: no, fp16 or bf16; auto: bf16 if the hardware multiplies it faster, else no;"
        " if not given, that of accelerate launch",
    )
    use_gradient_checkpointing: bool | Literal["auto"] = rounding(
        False, "recompute layers in the backward pass: less memory, slower; auto: if they would not fit otherwise"
    )
    pass_per_agent: bool | Literal["auto"] = rounding(
        "auto",
        "true: each agent has its own pass through the base, with 1/K of the activations, and computes the bits that"
        " it computes alone; auto: true on a CPU, with deterministic=true, and if one pass for all would not fit"
        " (docs/crowd.md)",
        recorded=True,
    )
    kernels: Literal["auto", "fast", "plain"] = rounding(
        "auto",
        "plain computes as the base's own code does, fast by kernels that agree with it; auto: fast",
        recorded=True,
    )
    cpu_threads: Count | Literal["auto"] = rounding(
        "auto",
        "CPU threads of each process; auto: OMP_NUM_THREADS if it is set, else the fastest of a few numbers by a trial",
        recorded=True,
    )


class AgentKeys(BaseModelKeys):
    """The agents: K LoRA adapters on the one base"""

    num_agents: Count = exact(
        4,
        "number of agents (K) that train together",
        no_sweep=("a sweep has as many agents as trials", "write agents_per_pass=N for those of one pass"),
    )
    lora_rank: AutoCount = exact(
        "auto", "rank of an adapter; auto: that of init_from, else 8 on the embedded base or 16", own=7, shape=True
    )
    lora_alpha: AutoCount = exact(
        "auto",
        "an adapter is scaled by alpha / rank; auto: that of init_from, else 16 on the embedded base or 32",
        own=8,
        shape=True,
    )
    lora_dropout: BelowOne = exact(
        0.0, "probability of dropping an input of an adapter; 0: off, which is faster", own=12
    )
    lora_target_modules: Literal["all-linear"] | Names = exact(
        "all-linear", "linear layers that get an adapter: all-linear, or a list of names as in PEFT", own=10, shape=True
    )
    agent_layers: Literal["all", "upper_half"] | Numbers = exact(
        "all", "layers that get adapters: all, upper_half, or a list of numbers", own=11, shape=True
    )
    use_rslora: bool = exact(False, "scale by alpha / sqrt(rank)", own=9, shape=True)
    initialize_adapters_rand: bool = exact(
        True, "false: all agents start alike, and lora_dropout or dropconnect_p tells them apart"
    )
    dropconnect_p: BelowOne = exact(
        0.0, "probability of dropping a weight of an adapter, drawn again in each step", own=13
    )
    agents: tuple[dict[str, Any], ...] = exact(
        (), "settings of single agents, a list of mappings over the common keys (docs/agents.md)"
    )
    init_from: PathText | None = exact(
        None, "folder of PEFT adapters to start from, one for each agent, or one for agents with different settings"
    )


class ObjectiveKeys(AgentKeys):
    """The objective, and how the agents answer together"""

    objective: Objective = exact(
        "auto",
        "what is learned: sft, dpo, orpo, simpo, kto, grpo, reward, classification, regression, or module:name;"
        " auto: by the columns (docs/objectives.md)",
        evaluable=True,
    )
    beta: AutoAmount = exact(
        "auto",
        "weight of dpo, kto, orpo, simpo and grpo: more holds agents nearer to the base, or weighs odds more;"
        " auto: 0 in grpo, else 0.1",
        own=16,
    )
    loss_type: Names | None = exact(
        None,
        "form of dpo: sigmoid, robust, ipo, hinge, sigmoid_norm, apo_zero, sft or a list; of kto: kto or"
        " apo_zero_unpaired; of grpo: dapo, grpo or dr_grpo; null: the first",
    )
    loss_weights: Weights | None = exact(None, "weight of each of several loss_type of dpo; null: 1 each")
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = exact(
        0.0, "assumed share of pairs with swapped labels, for loss_type robust"
    )
    desirable_weight: Positive = exact(1.0, "weight of good rows in kto", own=18)
    undesirable_weight: Positive = exact(1.0, "weight of bad rows in kto", own=19)
    simpo_gamma: Amount = exact(0.5, "margin of simpo", own=17)
    cpo_alpha: Amount = exact(1.0, "weight of the next-token loss of the chosen answer in simpo; 0: the paper's SimPO")
    reference: Literal["base", "start"] = exact(
        "base", "what dpo, kto and grpo compare agents with: base, or start, the adapters of init_from"
    )
    center_rewards_coefficient: Amount | None = exact(
        None, "in reward, weight of the squared sum of a pair's two rewards"
    )
    num_labels: Count | None = exact(None, "classes of classification; null: as many as the rows have")
    diversity: Diversity = exact(
        "none",
        "loss term that keeps agents apart: none, or swd, a bounded sliced Wasserstein distance",
        no_sweep=("it couples the agents, and trials must not depend on each other", "leave it out"),
    )
    lambda_sw: Amount = exact(0.1, "weight of the diversity term")
    swd_representation: Literal["last_token", "mean", "first_token"] = exact(
        "last_token", "hidden state of a row that swd compares: last_token, first_token or mean"
    )
    aggregator: Aggregator = free(
        "probability",
        "how agents become one: by token (probability, logit), or by a vote over"
        " answers (majority, weighted_vote, rerank)",
        evaluable=True,
    )


class RewardKeys(ObjectiveKeys):
    """Rewards, and the completions that they judge (docs/objectives.md)"""

    rewards: Names | None = exact(
        None,
        "what grpo rewards: exact_match, final_number, regex:PATTERN, length, module:function, or a list",
        evaluable=True,
    )
    reward_weights: Annotated[tuple[float, ...], MinLen(1)] | None = exact(
        None, "weight of each of several rewards; 0: only logged; null: 1 each", evaluable=True
    )
    num_generations: Several = exact(8, "completions of each agent for a prompt, which are compared")
    max_completion_length: AutoCount = exact(
        "auto", "tokens of a completion at most; auto: 512, or what the longest prompt leaves of the base's positions"
    )
    temperature: Positive = exact(1.0, "temperature of completions, and of their log-probabilities", own=24)
    top_p: TopShare = exact(1.0, "draw from the likeliest tokens that have this share together; 1: all")
    top_k: Size = exact(0, "draw from this many tokens, the likeliest; 0: all")
    min_p: Share | None = exact(None, "draw from tokens with at least this share of the likeliest's probability")
    scale_rewards: Literal["group", "batch", "none"] = exact(
        "group", "standard deviation that divides an advantage: that of its group, of the batch, or none"
    )
    use_bias_correction_kl: bool = exact(True, "weigh the divergence of grpo by the policy ratio, for its gradient")
    mask_truncated_completions: bool = exact(False, "learn nothing from completions that were cut")
    reward_timeout: Seconds | None = free(None, "seconds that a reward may take for a prompt's completions; null: any")
    log_completions: bool = free(False, "write all completions with their rewards to completions/*.parquet")


class DataKeys(RewardKeys):
    """The data"""

    dataset_name: Sources = free(
        "embedded",
        "embedded, a hub id, a file, a glob, or a folder; several with commas between, or as a list",
        own=20,
        rows=True,
    )
    dataset_subset: Text | None = exact(
        None,
        "configuration of a hub data set, such as main; null: its only one",
        own=21,
        rows=True,
        evaluable=True,
    )
    dataset_split: Text = exact("train", "split to train on", own=22, rows=True)
    eval_split: Text | None = free(
        None,
        "split to evaluate on; null: validation or test if there is one, else a tenth of the rows",
    )
    eval_dataset_name: Sources | None = free(
        None, "data set to evaluate on, as dataset_name; null: eval_split, or rows held out"
    )
    val_set_size: Amount | None = exact(
        None,
        "rows held out to evaluate on, or below 1 their share; null: a tenth if no split is for it, 400 at most",
        rivals=("eval_dataset_name", "eval_split"),
    )
    prompt_column: Text | None = exact(
        None, "column of the prompt, beside answer_column; null: found by its name", evaluable=True
    )
    answer_column: Text | None = exact(
        None,
        "column of the answer, or of the label beside text_column; null: found by its name",
        evaluable=True,
    )
    text_column: Text | None = exact(None, "column of plain text to learn; null: found by its name", evaluable=True)
    chat_template: Text | None = exact(
        None, "plain, roles, chatml, a template of the tokenizer by name, a file, or a text; null: the tokenizer's own"
    )
    train_on_prompt: bool = exact(False, "learn all of a row, and not only what the assistant says")
    max_seq_length: AutoLength = exact(
        "auto",
        "tokens per row; auto: 256 on the embedded base, else of the longest row, if the base has the positions",
        evaluable=True,
    )
    max_train_samples: Count | None = exact(None, "train on the first n rows; null: on all", own=23, rows=True)
    num_workers: Size = free(4, "data loading processes per training process; 0: the training process loads")


class TrainingKeys(DataKeys):
    """Training: length, batch, optimizer, schedule"""

    epochs: Positive = schedule(3.0, "passes over the rows, also a fraction such as 1.5; max_train_steps wins over it")
    max_train_steps: Count | None = schedule(
        None, "optimizer steps of the whole run; null: epochs decides", stronger_than="epochs"
    )
    batch_size: Count = rounding(4, "rows per process and micro-step", recorded=True)
    gradient_accumulation_steps: Count = rounding(
        1, "micro-steps per optimizer step; if not given, that of accelerate launch"
    )
    global_batch_size: Count | None = exact(
        None,
        "rows per optimizer step; null: batch_size x processes x gradient_accumulation_steps at the first start",
        stronger_than="gradient_accumulation_steps",
    )
    learning_rate: AutoRate = exact(
        "auto",
        "peak learning rate; auto: 2e-4, for preferences 1e-5, grpo 1e-4, heads 1e-3; on the embedded base 8e-3,"
        " and 1e-3 for all but sft",
        own=1,
    )
    weight_decay: Amount = exact(0.01, "decoupled weight decay of AdamW", own=5)
    adam_beta1: BelowOne = exact(0.9, "decay of AdamW's first moment")
    adam_beta2: BelowOne = exact(0.999, "decay of AdamW's second moment")
    adam_epsilon: Positive = exact(1e-8, "added to the root of AdamW's second moment")
    max_grad_norm: Positive | None = exact(
        1.0, "gradient norm to which each agent is clipped; null: no clipping", own=6
    )
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
    ] = exact("cosine", "learning-rate schedule, by its name in Transformers, such as linear or constant", own=2)
    num_warmup_steps_ratio: Share = exact(0.05, "share of the run in which the learning rate rises to its peak", own=4)
    num_warmup_steps: Size | None = exact(
        None,
        "optimizer steps in which the learning rate rises; null: num_warmup_steps_ratio decides",
        own=3,
        stronger_than="num_warmup_steps_ratio",
    )
    row_weights: Literal["uniform", "bootstrap"] = exact(
        "uniform",
        "weight of a row in the loss; bootstrap: each agent draws its own once, exponential with mean 1",
        own=15,
    )
    seed: Seed = exact(42, "seed of everything random, and of the order of the rows", own=14)


class EvaluationKeys(TrainingKeys):
    """Evaluation"""

    eval_steps: Count | None = free(100, "evaluate every n optimizer steps; null: at the end only")
    eval_samples: AutoLimit = free(
        "auto",
        "rows of each evaluation; null: all; auto: 400 on the embedded base, else at least 50, up to a third of"
        " the training tokens",
    )
    generation_eval_samples: Size = free(100, "of these, rows that agents and crowd answer at the end; 0: none")
    max_new_tokens_eval: Count | Literal["auto"] = free(
        "auto",
        "tokens of a generated answer at most; auto: twice those of the longest reference, at least 16; on"
        " the embedded base 256",
        evaluable=True,
    )
    early_stopping_patience: Count | None = ending(
        None,
        "end after n evaluations in a row that did not improve the crowd",
        no_sweep=("it looks at the crowd, and trials are single agents", "rungs end the losers"),
    )
    metric_for_best_model: Metric = ending(
        "nll",
        "measure of the crowd by which an evaluation is best: nll, exact_match, or one of the objective"
        " (docs/objectives.md)",
    )
    load_best_model_at_end: bool = free(
        False,
        "make final_checkpoint of the best step",
        no_sweep=("it looks at the crowd, and trials are single agents", "leave it out"),
    )


class LogKeys(EvaluationKeys):
    """Output and logs"""

    output_dir: PathText = free("ci_llm_output", "folder of the run", place=True)
    experiment_name: Text | None = free(
        None, "sub-folder of output_dir for this run; null: output_dir itself", place=True
    )
    logging_steps: Count = free(10, "log every n optimizer steps")
    report_to: Trackers = free(("tensorboard",), "trackers: none, tensorboard, wandb, mlflow, trackio, or a list")
    monitor_gpu: bool = free(False, "write the load of the GPUs to gpu_stats.json while training")


class CheckpointKeys(LogKeys):
    """Checkpoints"""

    save_steps: Count | None = free(100, "save every n optimizer steps; null: off")
    save_interval_seconds: Seconds | None = free(300.0, "save every n seconds; null: off")
    save_total_limit: Count | None = free(3, "newest checkpoints that are kept; null: all")
    resume_from_checkpoint: PathText | None = free(
        "latest",
        "where the run begins: latest, a checkpoint, the folder of a run, or null for a fresh start; later starts"
        " refuse another value",
        no_sweep=(
            "trials resume from where the sweep left them",
            "leave it out; init_from=FOLDER starts all trials from adapters",
        ),
        place=True,
    )
    restart_from: PathText | None = free(
        None,
        "go back, once, to this step of the run or this checkpoint",
        no_sweep=("trials resume from where the sweep left them", "leave it out"),
    )
    overwrite_output_dir: bool = free(
        False,
        "begin a new run, once, where another one is; that one moves to the sub-folder overwritten",
        no_sweep=("a sweep moves nothing aside", "write experiment_name=NAME for a new sweep"),
    )
    allow_inexact_resume: bool = free(
        False, "resume with a changed configuration or data, although the run will not be the same"
    )
    deterministic: bool | Literal["auto"] = rounding(
        "auto", "deterministic algorithms; auto: wherever they exist", recorded=True
    )
    checkpoint_backend: Backend = free(
        "vanilla", "vanilla: process 0 writes; distributed: every process writes its part"
    )
    mirror: Text | None = free(
        None,
        "object store that gets every checkpoint, as s3://bucket/prefix, and fills an empty disk",
        no_sweep=("a mirror holds one run, and a sweep has many", "leave it out, or copy the folder of the sweep"),
    )
    mirror_max_mb_per_s: Positive | None = free(None, "megabytes per second that the mirror may take")
    push_to_hub: bool = free(
        False,
        "publish the result on the Hugging Face Hub when the run is complete",
        no_sweep=("a sweep has many runs", "leave it out, and push the best one afterwards"),
    )
    hub_model_id: Text | None = free(
        None, "repository for push_to_hub, as user/name or name; null: the name of the run's folder"
    )


class InterruptionKeys(CheckpointKeys):
    """Interruption, walltime, SLURM"""

    grace_s: Seconds = free(30.0, "seconds between a signal and the kill, if SLURM does not tell")
    max_runtime: Seconds | None = free(None, "save and end before n seconds, 1h30m or HH:MM:SS have passed")
    requeue: bool | Literal["auto"] = free("auto", "ask SLURM to run an interrupted job again; auto: if allowed")
    interrupted_exit_code: Annotated[int, Ge(0), Le(255)] = free(0, "exit code after a clean interruption")


class FoundKeys(InterruptionKeys):
    """What the run found at its start, and keeps for all its attempts"""

    chat_date: Day | None = exact(None, "the day of the first start, which a chat template with a clock shows")
    label_names: Names | None = exact(None, "the classes of the rows, in the order of their numbers")


#: Nobody gives these: a checkpoint records them with the keys.
FOUND = tuple(FoundKeys.__annotations__)


#: The last group has the keys of all, in their order.
AllKeys = FoundKeys


def meaning_of(field: FieldInfo) -> dict[str, Any]:
    """The declaration of a key beside its default: `kind`, `keeps_bits` and its traits."""
    assert isinstance(field.json_schema_extra, dict)
    return field.json_schema_extra


def with_trait(trait: str) -> dict[str, Any]:
    """The keys that have a trait, in their order, with what the trait says of each."""
    meanings = {key: meaning_of(field) for key, field in AllKeys.model_fields.items()}
    return {key: meaning[trait] for key, meaning in meanings.items() if trait in meaning}
