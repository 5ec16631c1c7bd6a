"""The names that other trainers use: which key and value each means here, and an answer for each that means none.

An option without a counterpart is refused with what to do instead; one without effect is accepted with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ci_llm.config.parsing import TRUTH_WORDS, Entry, FlagForm, Items, Scalar, means_no_items, takes_flag
from ci_llm.config.schema import AllKeys

#: Other names of the same keys, as users of other trainers type them.
ALIASES: Final[dict[str, str]] = {
    "K": "num_agents",
    "n_agents": "num_agents",
    "num_adapters": "num_agents",
    "model": "model_name",
    "base_model": "model_name",
    "model_name_or_path": "model_name",
    "llama_id": "model_name",  # of LatentWire, where no second model stands beside it
    "dtype": "model_dtype",
    "torch_dtype": "model_dtype",
    "gradient_checkpointing": "use_gradient_checkpointing",
    "activation_checkpointing": "use_gradient_checkpointing",
    "torch_compile": "compile",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "target_modules": "lora_target_modules",
    "lora_target": "lora_target_modules",
    "layers_to_transform": "agent_layers",
    "peft_layers_to_transform": "agent_layers",
    "adapter_name_or_path": "init_from",
    "diversity_weight": "lambda_sw",
    "lambda_diversity": "lambda_sw",
    "num_projections": "swd_num_projections",
    "dataset": "dataset_name",
    "dataset_path": "dataset_name",
    "dataset_config": "dataset_subset",
    "dataset_config_name": "dataset_subset",
    "dataset_train_split": "dataset_split",
    "train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "interleave_probs": "dataset_weights",
    "mixture_weights": "dataset_weights",
    "eval_dataset": "eval_dataset_name",
    "test_dataset": "eval_dataset_name",
    "validation_file": "eval_dataset_name",
    "val_size": "val_set_size",
    "dataset_text_field": "text_column",
    "train_on_inputs": "train_on_prompt",
    "sequence_length": "max_seq_length",
    "sequence_len": "max_seq_length",
    "seq_length": "max_seq_length",
    "max_length": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "samples": "max_train_samples",
    "max_samples": "max_train_samples",
    "debug_subset_size": "max_train_samples",
    "max_eval_samples": "eval_samples",
    "dataloader_num_workers": "num_workers",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "training_steps": "max_train_steps",
    "max_steps": "max_train_steps",
    "num_steps": "max_train_steps",
    "per_device_train_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "grad_accum_steps": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "effective_batch_size": "global_batch_size",
    "lr": "learning_rate",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "adam_eps": "adam_epsilon",
    "grad_max_norm": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "warmup_ratio": "num_warmup_steps_ratio",
    "warmup_steps": "num_warmup_steps",
    "lr_warmup_steps": "num_warmup_steps",
    "enable_progress_bar": "progress_bar",
    "random_seed": "seed",
    "random_state": "seed",
    "eval_interval": "eval_steps",
    "max_new_tokens": "max_new_tokens_eval",
    "save_dir": "output_dir",
    "checkpoint_dir": "output_dir",
    "default_root_dir": "output_dir",
    "exp_name": "experiment_name",
    "run_name": "experiment_name",
    "logging_frequency": "logging_steps",
    "log_every": "logging_steps",
    "log_every_n_steps": "logging_steps",
    "log_loss_to_csv": "loss_csv",
    "log_with": "report_to",
    "gpu_monitor": "monitor_gpu",
    "save_interval_steps": "save_steps",
    "save_every": "save_steps",
    "checkpoint_frequency": "save_steps",
    "checkpoint_interval": "save_interval_seconds",
    "max_to_keep": "save_total_limit",
    "keep_last": "save_total_limit",
    "auto_resume": "resume_from_checkpoint",
    "resume": "resume_from_checkpoint",
    "ckpt_path": "resume_from_checkpoint",
    "use_torch_distributed_ckpt": "checkpoint_backend",
    "timeaware_checkpointing": "stop_before_walltime",
    "time_limit": "max_runtime",
}

#: Words that mean a value of a key: `--auto_resume` alone reads as true, hence latest.
VALUE_ALIASES: Final[dict[str, dict[str, str]]] = {
    "resume_from_checkpoint": {"true": "latest", "auto": "latest", "false": "null"},
    "checkpoint_backend": {"true": "distributed", "false": "vanilla"},
    "model_dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"},
    "mixed_precision": {"float16": "fp16", "bfloat16": "bf16", "fp32": "no", "none": "no"},
    "use_gradient_checkpointing": {"unsloth": "true"},
    "lora_target_modules": {"all": "all-linear"},
    "agent_layers": {"null": "all"},
    "diversity": {"null": "none"},
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    "max_grad_norm": {"0": "null", "0.0": "null"},
    "max_train_steps": {"-1": "null"},
    "max_train_samples": {"-1": "null"},
    "eval_samples": {"-1": "null"},
    "metric_for_best_model": {
        **dict.fromkeys(("loss", "eval_loss", "eval_nll", "eval/crowd/nll"), "nll"),
        **dict.fromkeys(("accuracy", "eval_accuracy", "eval_exact_match", "eval/crowd/exact_match"), "exact_match"),
    },
}

#: What a run does in any case: there is nothing to set.
ALWAYS: Final = ""

#: Options that mean a key only together with their value: `bf16: true` is `mixed_precision: bf16`.
#: A value that is not listed is answered from `UNSUPPORTED`.
TRANSLATIONS: Final[dict[str, dict[str, str]]] = {
    "bf16": {"true": "mixed_precision=bf16", "false": "mixed_precision=no", "auto": "mixed_precision=auto"},
    "fp16": {"true": "mixed_precision=fp16", "false": "mixed_precision=no"},
    "precision": {
        "bf16-mixed": "mixed_precision=bf16",
        "16-mixed": "mixed_precision=fp16",
        "32-true": "mixed_precision=no",
        "32": "mixed_precision=no",
    },
    "optim": {
        **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused"), "optimizer=adamw"),
        "ivon": "optimizer=ivon",
    },
    "assistant_only_loss": {"true": "train_on_prompt=false", "false": "train_on_prompt=true"},
    "completion_only_loss": {"true": "train_on_prompt=false", "false": "train_on_prompt=true"},
    "eval_strategy": {"steps": ALWAYS, "no": "eval_steps=null"},
    "evaluation_strategy": {"steps": ALWAYS, "no": "eval_steps=null"},
    "save_strategy": {"steps": ALWAYS},
    "logging_strategy": {"steps": ALWAYS},
    "disable_tqdm": {"true": "progress_bar=false", "false": "progress_bar=true"},
    "full_determinism": {"true": "deterministic=true", "false": "deterministic=auto"},
    "lora_target_linear": {"true": "lora_target_modules=all-linear"},
    "use_lora": {"true": ALWAYS},
    "use_peft": {"true": ALWAYS},
    "finetuning_type": {"lora": ALWAYS},
    "adapter": {"lora": ALWAYS},
    "stage": {"sft": ALWAYS},
    "task_type": {"causal_lm": ALWAYS},
    "bias": {"none": ALWAYS},
    "do_train": {"true": ALWAYS},
    "do_eval": {"true": ALWAYS},
    "packing": {"true": ALWAYS},
    "sample_packing": {"true": ALWAYS},
    "eval_sample_packing": {"true": ALWAYS},
    "pad_to_sequence_len": {"false": ALWAYS},
    "padding_free": {"true": ALWAYS},
    "attn_implementation": {"sdpa": ALWAYS, "auto": ALWAYS},
    "flash_attn": {"auto": ALWAYS, "sdpa": ALWAYS},
    "load_in_4bit": {"true": "quantization=nf4", "false": ALWAYS},
    "load_in_8bit": {"true": "quantization=int8", "false": ALWAYS},
    "quantization_bit": {"4": "quantization=nf4", "8": "quantization=int8"},
    "bnb_4bit_quant_type": {"nf4": ALWAYS},
    "bnb_4bit_use_double_quant": {"true": ALWAYS},
    "use_dora": {"false": ALWAYS},
    "trust_remote_code": {"false": ALWAYS},
    "save_safetensors": {"true": ALWAYS},
    "auto_find_batch_size": {"true": ALWAYS},
    "remove_unused_columns": {"true": ALWAYS, "false": ALWAYS},
    "save_only_model": {"false": ALWAYS},
    "ignore_data_skip": {"false": ALWAYS},
}


_ONE_BASE = "one frozen base carries all agents: model_name=NAME"
_LATENT = "leave it out: agents are LoRA adapters, and lora_rank is their size"
_ONE_LOSS = "leave it out: every learned token weighs the same"
_HELD_OUT = "eval_dataset_name=FILE, or eval_split=NAME for a split of dataset_name"
_LAUNCHER = "the launcher sets it: torchrun --nproc-per-node 4 train.py, or accelerate launch, or srun"
_DEVICE = "leave it out: a GPU is used where there is one; CUDA_VISIBLE_DEVICES picks one, ACCELERATE_USE_CPU=true none"
_QUANTIZED = "quantization=nf4 or quantization=int8"
_SHARDED = "base_sharding=layers: each process stores a part of the base's layers (docs/own_model.md)"
_PLAIN_LORA = "leave it out: an agent is a plain LoRA adapter; use_rslora, lora_dropout and dropconnect_p exist"
_ADAMW = "leave it out: the optimizer is AdamW; optimizer=ivon is the only other one"
_FUSED_KERNEL = "leave it out: packed rows take a fused kernel wherever it agrees with the base"
_REVISION = "hf download NAME --revision REVISION --local-dir FOLDER; then model_name=FOLDER"
_BATCH_SIZE = "leave it out: an evaluation derives it from batch_size"
_STEPS = "write a number of optimizer steps: {}; the log says at the start how many steps an epoch has"
_EVAL_STEPS = _STEPS.format("eval_steps=N, or eval_steps=null for the end only")
_SAVE_STEPS = _STEPS.format("save_steps=N; save_steps=null save_interval_seconds=null saves at the end only")
_OWN_TEMPLATE = "leave it out for the base's own chat template, or chat_template=NAME or FILE (docs/own_data.md)"
_ALL_ROWS = "leave it out: no row is dropped, and the order is a function of seed, epoch and position"
_PACKED = "leave it out: rows are always packed, and never see each other"
_EVERY_ROW = "leave it out: rows are packed, so that lengths cost nothing"
_PATHS = "{}, or a list of paths or names: the format is recognised by the columns (docs/own_data.md)"
_WANDB = "set {} in the environment; report_to=wandb switches the tracker on"
_NO_CODE = "leave it out: code from a hub is never executed"

#: name -> (what it is there, what to do instead)
UNSUPPORTED: Final[dict[str, tuple[str, str]]] = {
    # LatentWire
    "qwen_id": ("the second of LatentWire's two models", _ONE_BASE),
    "model_id": ("LatentWire's model", "model_name=NAME"),
    "latent_len": ("the length of LatentWire's latent prefix", _LATENT),
    "latent_shared_len": ("the shared part of LatentWire's latent prefix", _LATENT),
    "latent_private_len": ("the private part of LatentWire's latent prefix", _LATENT),
    "d_z": ("the width of LatentWire's latent prefix", _LATENT),
    "encoder_type": ("the encoder of LatentWire's latent prefix", _LATENT),
    "first_token_ce_weight": ("the weight of LatentWire's loss on the first token of an answer", _ONE_LOSS),
    "k_ce_weight": ("the weight of LatentWire's loss on the first tokens of an answer", _ONE_LOSS),
    "kd_first_k_weight": ("the weight of LatentWire's distillation", _ONE_LOSS),
    "warm_anchor_text": (
        "the text between LatentWire's latent prefix and the answer",
        "leave it out: the chat template writes what stands before an answer (docs/own_data.md)",
    ),
    "sequential_models": (
        "LatentWire's switch to train one model after the other",
        "leave it out: all agents train together",
    ),
    "max_answer_tokens": ("LatentWire's length of an answer in training", "max_seq_length=N counts prompt and answer"),
    "grace_period": ("LatentWire's time to save after a signal", "grace_s=120"),
    "resume_from": ("LatentWire's checkpoint to resume from", "resume_from_checkpoint=PATH"),
    "grad_ckpt": ("LatentWire's switch for less memory", "use_gradient_checkpointing=true"),
    "load_4bit": ("LatentWire's quantised model", "quantization=nf4"),
    # PyRecover
    "distributed": ("PyRecover's switch for several processes", "give it to train.py as an option: --distributed"),
    "profile": ("PyRecover's profiling by nsys", "profile_steps=10 traces the first steps"),
    "profile_nsys": ("PyRecover's profiling by nsys", "profile_steps=10 traces the first steps"),
    "use_flash_attention": ("PyRecover's attention kernel", _FUSED_KERNEL),
    "verify_checkpoints": (
        "PyRecover's check of what was written",
        "leave it out: every checkpoint is read back and verified",
    ),
    "max_kept_checkpoints": ("PyRecover's number of checkpoints", "save_total_limit=N"),
    # Data
    "eval_file": ("a file to evaluate on", _HELD_OUT),
    "test_file": ("a file to evaluate on", _HELD_OUT),
    "train_file": ("a file to train on", "dataset_name=FILE"),
    "datasets": ("a list of data sets with their formats", _PATHS.format("dataset_name=PATH")),
    "test_datasets": ("a list of data sets with their formats", _PATHS.format("eval_dataset_name=PATH")),
    "dataset_dir": ("a folder of data sets", "dataset_name=FOLDER, or the path of a file in it"),
    "dataset_num_proc": ("processes that tokenise", "leave it out: tokens are cached after the first run"),
    "preprocessing_num_workers": ("processes that tokenise", "leave it out: tokens are cached after the first run"),
    "overwrite_cache": ("a switch against stale tokens", "leave it out: the cache is keyed by data and template"),
    "dataloader_drop_last": ("a switch that drops the last short batch", _ALL_ROWS),
    "group_by_length": ("a switch that sorts rows by length", _EVERY_ROW),
    "packing": ("a switch against packed rows", _PACKED),
    "sample_packing": (
        "a switch against packed rows",
        _PACKED,
    ),
    "eval_sample_packing": ("a switch against packed rows", _PACKED),
    "pad_to_sequence_len": ("a switch for padded rows", _PACKED),
    "padding_free": ("a switch for padded rows", _PACKED),
    "template": ("the name of a chat template", _OWN_TEMPLATE),
    "special_tokens": (
        "tokens for the tokenizer",
        "leave it out: the base's own tokenizer is taken, and packed rows need no pad token",
    ),
    "tokenizer_name": ("a tokenizer of its own", "leave it out: the base's own tokenizer is taken"),
    "tokenizer_name_or_path": ("a tokenizer of its own", "leave it out: the base's own tokenizer is taken"),
    # The base and its adapters
    "model_path": ("the base model", "model_name=FOLDER"),
    "revision": ("a version of the base on the hub", _REVISION),
    "model_revision": ("a version of the base on the hub", _REVISION),
    "model_type": ("the architecture", "leave it out: config.json of model_name has it"),
    "load_in_4bit": ("a quantised base", _QUANTIZED),
    "load_in_8bit": ("a quantised base", _QUANTIZED),
    "quantization_bit": ("a quantised base", _QUANTIZED),
    "quantization_method": ("a library that quantises", _QUANTIZED),
    "quant_method": ("a library that quantises", _QUANTIZED),
    "bnb_4bit_quant_type": ("a form of 4 bits", _QUANTIZED),
    "bnb_4bit_use_double_quant": ("quantised scales", "leave it out: nf4 quantises its scales too"),
    "bnb_4bit_compute_dtype": ("the precision of products", "mixed_precision=bf16, or model_dtype=bf16"),
    "use_lora": ("a switch for adapters", "leave it out: agents are always LoRA adapters"),
    "use_peft": ("a switch for adapters", "leave it out: agents are always LoRA adapters"),
    "adapter": ("a kind of adapter", "leave it out: agents are always LoRA adapters"),
    "finetuning_type": ("a kind of fine-tuning", "leave it out: agents are always LoRA adapters"),
    "stage": ("a stage of training", "leave it out: agents always learn from examples"),
    "task_type": ("a kind of model", "leave it out: the base is always a causal language model"),
    "bias": ("a switch that trains biases", _PLAIN_LORA),
    "use_dora": ("a switch for DoRA", _PLAIN_LORA),
    "init_lora_weights": ("a way to begin an adapter", _PLAIN_LORA),
    "modules_to_save": ("layers that train beside the adapters", _PLAIN_LORA),
    "lora_target_linear": ("a switch for adapters on all Linear layers", "lora_target_modules=q_proj,v_proj"),
    "attn_implementation": ("an attention kernel", _FUSED_KERNEL),
    "flash_attention": ("an attention kernel", _FUSED_KERNEL),
    "flash_attn": ("an attention kernel", _FUSED_KERNEL),
    "trust_remote_code": ("a switch that executes code from a hub", _NO_CODE),
    "use_liger_kernel": ("fused kernels", "leave it out: logits are computed only where a label is, and never whole"),
    "gradient_checkpointing_kwargs": ("arguments of gradient checkpointing", "use_gradient_checkpointing=true"),
    # Optimization
    "optim": ("another optimizer", _ADAMW),
    "lr_scheduler_kwargs": ("arguments of the schedule", "take another lr_scheduler_type, such as cosine_with_min_lr"),
    "label_smoothing_factor": ("a softer loss", _ONE_LOSS),
    "neftune_noise_alpha": ("noise on embeddings", "lora_dropout=0.1 or dropconnect_p=0.1 regularise an agent"),
    "precision": ("a precision", "mixed_precision=bf16, fp16 or no; model_dtype=... for the base itself"),
    "auto_find_batch_size": (
        "a switch for smaller batches after running out of memory",
        "leave it out: the micro-batch always shrinks by itself, and the effective batch holds",
    ),
    # Evaluation, saving, logs
    "per_device_eval_batch_size": ("the rows that an evaluation takes at once", _BATCH_SIZE),
    "eval_batch_size": ("the rows that an evaluation takes at once", _BATCH_SIZE),
    "eval_strategy": ("a rhythm of evaluations", _EVAL_STEPS),
    "evaluation_strategy": ("a rhythm of evaluations", _EVAL_STEPS),
    "evals_per_epoch": ("a rhythm of evaluations", _EVAL_STEPS),
    "val_check_interval": ("a rhythm of evaluations", _EVAL_STEPS),
    "check_val_every_n_epoch": ("a rhythm of evaluations", _EVAL_STEPS),
    "eval_on_start": ("a switch for an evaluation before the first step", "leave it out: eval_steps=N sets the rhythm"),
    "save_strategy": ("a rhythm of checkpoints", _SAVE_STEPS),
    "saves_per_epoch": ("a rhythm of checkpoints", _SAVE_STEPS),
    "checkpointing_steps": ("a rhythm of checkpoints", "save_steps=N"),
    "save_safetensors": ("a file format", "leave it out: checkpoints are always safetensors and JSON"),
    "save_only_model": ("a switch for checkpoints that cannot resume", "leave it out: every checkpoint resumes"),
    "ignore_data_skip": ("a switch that repeats rows after a resume", "leave it out: no row is seen twice"),
    "remove_unused_columns": ("a switch about columns", "leave it out: columns without a meaning are not read"),
    "logging_strategy": ("a rhythm of logging", _STEPS.format("logging_steps=N")),
    "logging_first_step": ("a switch for a log line at step 1", "logging_steps=1 logs every step"),
    "logging_dir": ("where trackers write", "output_dir=FOLDER"),
    "project_dir": ("where trackers write", "output_dir=FOLDER"),
    "with_tracking": ("a switch for trackers", "report_to=tensorboard, or another"),
    "wandb_project": ("the project on W&B", _WANDB.format("WANDB_PROJECT")),
    "wandb_entity": ("the team on W&B", _WANDB.format("WANDB_ENTITY")),
    "wandb_name": ("the name of the run on W&B", "experiment_name=NAME names the run everywhere"),
    "plot_loss": ("a picture of the losses", "leave it out: report_to=tensorboard draws them"),
    "hub_token": ("the key to an upload", "log in with `hf auth login`; keys do not belong into a configuration"),
    "do_train": ("a switch for training", "leave it out: train.py trains, and evaluates at the end"),
    "do_eval": ("a switch for evaluations", "eval_steps=null leaves only the evaluation at the end"),
    "do_predict": ("a switch for answers", "generation_eval_samples=N rows are answered at the end"),
    # Processes
    "num_processes": (
        "an option of accelerate launch",
        "before train.py: accelerate launch --num_processes=4 train.py",
    ),
    "multi_gpu": ("an option of accelerate launch", "before train.py: accelerate launch --multi_gpu train.py"),
    "nproc_per_node": ("an option of torchrun", "before train.py: torchrun --nproc-per-node 4 train.py"),
    "device": ("a choice of hardware", _DEVICE),
    "use_cpu": ("a choice of hardware", _DEVICE),
    "no_cuda": ("a choice of hardware", _DEVICE),
    "use_cuda": ("a choice of hardware", _DEVICE),
    "devices": ("a number of processes", _LAUNCHER),
    "gpus": ("a number of processes", _LAUNCHER),
    "local_rank": ("the number of a process on its machine", _LAUNCHER),
    "strategy": ("a way to share work between processes", _LAUNCHER),
    "deepspeed": ("a configuration of DeepSpeed", "leave it out: DeepSpeed owns backward, step and checkpoint"),
    "fsdp": ("shards of the model", _SHARDED),
    "fsdp_config": ("shards of the model", _SHARDED),
    "tensor_parallel_size": ("parts of each product", _SHARDED),
    "tp_size": ("parts of each product", _SHARDED),
    "device_map": ("places for parts of the base", f"{_SHARDED}; {_QUANTIZED} makes it smaller"),
    "ddp_find_unused_parameters": ("a setting of DDP", "leave it out: gradients are reduced once, without DDP"),
    "ddp_timeout": ("a setting of DDP", "hang_timeout=SECONDS says when a run counts as hung"),
    # Options of the command line
    "debug": ("an option of the command line", "did you mean --debug on the command line?"),
    "continue": ("an option of the command line", "did you mean --continue on the command line?"),
}

#: Options without effect, and why. Every value is accepted; one that asks for something is answered with the reason.
NO_EFFECT: Final[dict[str, str]] = {
    "parallel_mode": "all agents always train together",
    "greater_is_better": "metric_for_best_model implies it",
    "use_deepspeed": "DeepSpeed owns backward, step and checkpoint",
    "deepspeed_config_file": "it goes with use_deepspeed",
    "streaming": "the data set is loaded as a whole: which rows come next of a stream depends on shards and"
    " a buffer, so that no resume could be exact",
    "compile": "packed rows have another length in every step; compiled for that, layers were no faster"
    " (docs/results.md), and their kernels are chosen by the lengths met first, which a resumed run does not share",
}
#: Those of them that are no switches: false asks for something too.
_NO_SWITCHES: Final = ("greater_is_better", "deepspeed_config_file")


FIELDS = AllKeys.model_fields
ACCEPTED = FIELDS.keys() | NO_EFFECT.keys()  # under one of these names, or of `ALIASES` for them
SWITCH = frozenset({"true", "false"})


class UnknownNameError(Exception):
    """The name, or the name with this value, means no key."""


def normalized(name: str) -> str:
    """`--max-grad-norm` is `max_grad_norm`."""
    return name.replace("-", "_")


def canonical(name: str) -> str:
    """The key that `name` is another name of; a name that is none comes back as it is."""
    return ALIASES.get(normalized(name), normalized(name))


def resolve(entry: Entry) -> tuple[str, Entry] | None:
    """The key of an entry, and the entry with the value that its words mean; None if a run does it in any case.

    An option without effect comes back under its own name, with its value as written.

    Raises:
        UnknownNameError: there is no such key, or no key for this value of it.
    """
    name = normalized(entry.name)
    text = entry.raw.text.lower() if isinstance(entry.raw, Scalar) and not entry.raw.quoted else None
    if name in TRANSLATIONS:
        meaning = TRANSLATIONS[name].get(text or "")
        if meaning is None:
            raise UnknownNameError
        key, _, translated = meaning.partition("=")
        return None if meaning == ALWAYS else (key, replace(entry, raw=Scalar(translated)))
    key = canonical(name)
    if key in NO_EFFECT:
        return key, entry
    if key not in FIELDS:
        raise UnknownNameError
    if means_no_items(FIELDS[key], entry.raw):
        return key, replace(entry, raw=Items(()))
    value = VALUE_ALIASES.get(key, {}).get(text) if text is not None else None
    return key, entry if value is None else replace(entry, raw=Scalar(value))


def read_without_effect(given: Mapping[str, Entry]) -> dict[str, object]:
    """The options without effect that ask for something, with that: true, false, or the text of any other value."""
    values: dict[str, object] = {}
    for name in (name for name in NO_EFFECT if name in given and not given[name].is_null):
        value = TRUTH_WORDS.get(given[name].text.lower(), given[name].text)
        if value is not False or name in _NO_SWITCHES:
            values[name] = value
    return values


def key_of(entry: Entry) -> str:
    """The key that an entry sets; its own name if it sets none."""
    try:
        found = resolve(entry)
    except UnknownNameError:
        found = None
    return canonical(entry.name) if found is None else found[0]


def flag_form(name: str) -> FlagForm:
    """How `--name` may stand on a command line."""
    if canonical(name) in NO_EFFECT:
        return "either way" if canonical(name) in _NO_SWITCHES else "alone"
    field = FIELDS.get(canonical(name))
    if field is not None:
        words = VALUE_ALIASES.get(canonical(name), {})
        if takes_flag(field):
            return "either way" if words else "alone"
        return "either way" if "true" in words else "with a value"
    values = TRANSLATIONS.get(normalized(name), {})
    if values and SWITCH.issuperset(values):
        return "alone"
    return "either way" if "true" in values else "with a value"


def is_switched_off(key: str, entry: Entry) -> bool:
    """Whether the entry is a switch that is off: `fp16: false` says nothing against `bf16: true`."""
    off = TRANSLATIONS.get(normalized(entry.name), {}).get("false")
    return isinstance(entry.raw, Scalar) and off == f"{key}={entry.raw.text}"
