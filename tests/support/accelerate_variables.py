"""Every variable that `accelerate launch` sets, in the forms in which it writes it, and what becomes of each here.

The forms are those of the launcher's code and of its questionnaire: `True` and `true`, `NO` and `no`, numbers, `auto`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import accelerate

YES, NO = ("true", "True", "1", "yes"), ("false", "False", "0", "no", "")
BOTH = (*YES, *NO)
FSDP = {"ACCELERATE_USE_FSDP": "true"}
PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
LAYERS = {"base_sharding": "layers"}


@dataclass(frozen=True)
class Row:
    """One variable in some of its forms.

    Attributes:
        beside: variables that the launcher sets with it.
        settings: the keys of the configuration that it decides.
        hidden: the variable about which a line is said, and which Accelerate does not see.
        refused: whether the run ends with exit code 2, and says what to use.
        read_by: who acts on it, or why nobody does, if nothing of the above happens.
    """

    names: str
    values: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: str = ""
    refused: bool = False
    read_by: str = ""


ROWS = [
    # Taken
    Row("ACCELERATE_MIXED_PRECISION", ("bf16", "BF16"), settings={"mixed_precision": "bf16"}),
    Row("ACCELERATE_MIXED_PRECISION", ("fp16",), settings={"mixed_precision": "fp16"}),
    Row("ACCELERATE_MIXED_PRECISION", ("fp8",), settings={"mixed_precision": "fp8"}),  # which no key takes
    Row("ACCELERATE_MIXED_PRECISION", ("no", "NO", ""), read_by="it is the default, and no choice"),
    Row("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("4",), settings={"gradient_accumulation_steps": "4"}),
    Row("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("1",), read_by="it is the default, and no choice"),
    Row(
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        ("auto", "None", "-1", ""),
        hidden="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    ),
    Row("ACCELERATE_USE_FSDP", YES, settings=LAYERS, hidden="ACCELERATE_USE_FSDP"),
    Row("ACCELERATE_USE_FSDP", NO, read_by="it asks for nothing"),
    Row(
        "FSDP_SHARDING_STRATEGY",
        ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "4", "5"),
        FSDP,
        LAYERS,
        "ACCELERATE_USE_FSDP",
    ),
    Row("FSDP_SHARDING_STRATEGY", ("NO_SHARD", "3"), FSDP, {}, "ACCELERATE_USE_FSDP"),
    Row("FSDP_SHARDING_STRATEGY", ("NO_SHARD",), {**FSDP, "FSDP_VERSION": "2"}, LAYERS, "ACCELERATE_USE_FSDP"),
    Row(
        "FSDP_ACTIVATION_CHECKPOINTING",
        YES,
        FSDP,
        {**LAYERS, "use_gradient_checkpointing": "true"},
        "ACCELERATE_USE_FSDP",
    ),
    Row("FSDP_ACTIVATION_CHECKPOINTING", NO, FSDP, LAYERS, "ACCELERATE_USE_FSDP"),
    *(
        Row(names, values, FSDP, LAYERS, "ACCELERATE_USE_FSDP")
        for names, values in {
            "FSDP_VERSION": ("1", "2"),
            "FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_FORWARD_PREFETCH FSDP_USE_ORIG_PARAMS": BOTH,
            "FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_SYNC_MODULE_STATES FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": BOTH,
            "FSDP_MIN_NUM_PARAMS": ("100000000",),
            "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
            "FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_IGNORED_MODULES": ("LlamaDecoderLayer",),
            "FSDP_BACKWARD_PREFETCH": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
            "FSDP_STATE_DICT_TYPE": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        }.items()
    ),
    Row("ACCELERATE_USE_PARALLELISM_CONFIG", YES, hidden="ACCELERATE_USE_PARALLELISM_CONFIG"),
    Row("ACCELERATE_USE_PARALLELISM_CONFIG", NO, read_by="it asks for nothing"),
    Row("PARALLELISM_CONFIG_DP_SHARD_SIZE", ("2", "8"), PARALLEL, LAYERS, "ACCELERATE_USE_PARALLELISM_CONFIG"),
    Row("PARALLELISM_CONFIG_DP_SHARD_SIZE", ("1",), PARALLEL, {}, "ACCELERATE_USE_PARALLELISM_CONFIG"),
    Row("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", ("1", "2"), PARALLEL, {}, "ACCELERATE_USE_PARALLELISM_CONFIG"),
    *(
        Row(names, values, PARALLEL, {}, "ACCELERATE_USE_PARALLELISM_CONFIG")
        for names, values in {
            "PARALLELISM_CONFIG_TP_SIZE PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_SP_SIZE": ("1",),
            "PARALLELISM_CONFIG_CP_BACKEND": ("torch",),
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY": ("allgather", "alltoall"),
            "PARALLELISM_CONFIG_SP_BACKEND": ("deepspeed",),
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH": ("None", "4096"),
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": BOTH,
            "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": ("None", "sdpa", "flash_attention_2"),
        }.items()
    ),
    # Not used
    Row("ACCELERATE_DYNAMO_BACKEND", ("INDUCTOR", "inductor", "EAGER"), hidden="ACCELERATE_DYNAMO_BACKEND"),
    Row("ACCELERATE_DYNAMO_BACKEND", ("NO", "no", ""), read_by="it asks for nothing"),
    Row("ACCELERATE_DYNAMO_MODE", ("default", "max-autotune"), read_by="it goes with the backend"),
    Row(
        "ACCELERATE_DYNAMO_USE_FULLGRAPH ACCELERATE_DYNAMO_USE_DYNAMIC ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        ("True", "False"),
        read_by="it goes with the backend",
    ),
    Row("ACCELERATE_FP8_BACKEND", ("te", "TE", "ao", "AO", "msamp", "MSAMP"), hidden="ACCELERATE_FP8_BACKEND"),
    # Refused
    Row(
        "PARALLELISM_CONFIG_TP_SIZE PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_SP_SIZE",
        ("2", "4"),
        PARALLEL,
        refused=True,
    ),
    Row("ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_MEGATRON_LM", YES, refused=True),
    Row("ACCELERATE_USE_DEEPSPEED ACCELERATE_USE_MEGATRON_LM", NO, read_by="it asks for nothing"),
    Row("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", ("DATA_PARALLEL", "MODEL_PARALLEL"), refused=True),
    Row("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", ("NO",), read_by="one process, as elsewhere"),
    Row("ACCELERATE_IN_TPU_POD XLA_USE_BF16 XLA_DOWNCAST_BF16", ("1",), refused=True),
    # With what is refused
    *(
        Row(names, values, read_by="it goes with what is refused")
        for names, values in {
            "ACCELERATE_CONFIG_DS_FIELDS": ("gradient_accumulation_steps,zero_stage",),
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("0", "3"),
            "ACCELERATE_GRADIENT_CLIPPING": ("1.0", "auto"),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "cpu"),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": BOTH,
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("ds.json",),
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("MixtralSparseMoeBlock",),
            " ".join(f"MEGATRON_LM_{each}_DEGREE" for each in ("TP", "PP")): ("1", "2"),
            "MEGATRON_LM_GRADIENT_CLIPPING MEGATRON_LM_ATTENTION_DROPOUT MEGATRON_LM_HIDDEN_DROPOUT": ("1.0", "0.1"),
            "MEGATRON_LM_NUM_MICRO_BATCHES MEGATRON_LM_RECOMPUTE_NUM_LAYERS": ("1",),
            "MEGATRON_LM_RECOMPUTE_GRANULARITY": ("full", "selective"),
            "MEGATRON_LM_RECOMPUTE_METHOD": ("uniform", "block"),
            "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE MEGATRON_LM_CONTEXT_PARALLEL_SIZE": ("1", "2"),
            "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": ("1", "2"),
            "MEGATRON_LM_USE_CUSTOM_FSDP MEGATRON_LM_NO_LOAD_OPTIM MEGATRON_LM_EOD_MASK_LOSS": BOTH,
            "MEGATRON_LM_NO_SAVE_OPTIM MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD MEGATRON_LM_SEQUENCE_PARALLELISM": BOTH,
            "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D": BOTH,
            "MEGATRON_LM_RECOMPUTE_ACTIVATIONS MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": BOTH,
            "MEGATRON_LM_ATTENTION_BACKEND MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32": BOTH,
            "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS": BOTH,
            "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL ACCELERATE_FP8_PAD_INNER_DIM": ("True", "False"),
            "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": ("True", "False"),
            "ACCELERATE_FP8_OVERRIDE_FPROP ACCELERATE_FP8_OVERRIDE_DGRAD ACCELERATE_FP8_OVERRIDE_WGRAD": BOTH,
            "ACCELERATE_FP8_MARGIN ACCELERATE_FP8_INTERVAL ACCELERATE_FP8_AMAX_HISTORY_LEN": ("0", "1024"),
            "ACCELERATE_FP8_FORMAT": ("HYBRID", "E4M3"),
            "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": ("max", "most_recent"),
            "ACCELERATE_FP8_OPT_LEVEL": ("O1", "O2"),
        }.items()
    ),
    # Acted on elsewhere
    Row("ACCELERATE_USE_CPU", ("True", "False", "true", "1"), read_by="is_cpu_wanted, and Accelerate"),
    Row("ACCELERATE_DEBUG_MODE", ("true",), read_by="Accelerate, which compares the shapes of collectives"),
    Row("ACCELERATE_CPU_AFFINITY", ("1",), read_by="Accelerate, which binds processes to the cores near their GPU"),
    Row("ACCELERATE_USE_SAGEMAKER", ("true",), hidden="ACCELERATE_USE_SAGEMAKER"),
    Row("OMP_NUM_THREADS", ("1", "8"), read_by="torch"),
    Row("KMP_AFFINITY", ("granularity=fine,compact,1,0",), read_by="OpenMP"),
    Row("KMP_BLOCKTIME", ("1",), read_by="OpenMP"),
    Row("MASTER_ADDR", ("127.0.0.1",), read_by="read_launch"),
    Row("MASTER_PORT", ("29500",), read_by="read_launch"),
    Row("NCCL_P2P_DISABLE NCCL_IB_DISABLE", ("1",), read_by="NCCL"),
    Row("PYTHONPATH", ("/work",), read_by="Python"),
    Row("CUDA_VISIBLE_DEVICES", ("", "0", "0,1"), read_by="CUDA"),
    Row(
        "ZE_AFFINITY_MASK MLU_VISIBLE_DEVICES SDAA_VISIBLE_DEVICES MUSA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES"
        " HABANA_VISIBLE_MODULES NEURON_RT_VISIBLE_CORES",
        ("0",),
        read_by="the accelerator, on which precision.require_known_device refuses to run",
    ),
    # Of `notebook_launcher` and `debug_launcher`, and of the machine that starts a job of SageMaker
    Row("LOCAL_RANK RANK", ("0",), read_by="read_launch"),
    Row("FORK_LAUNCHED", ("1",), read_by="Accelerate"),
    Row("AWS_DEFAULT_REGION AWS_PROFILE AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY", ("x",), read_by="SageMaker's client"),
]


def cases() -> list[tuple[str, str, Row]]:
    """(variable, value, its row)."""
    return [(name, value, row) for row in ROWS for name in row.names.split() for value in row.values]


def set_by_the_launcher() -> set[str]:
    """The variables that the code of the installed `accelerate launch` sets."""
    package = Path(accelerate.__file__).parent
    found: set[str] = set()
    for file in (package / "utils/launch.py", package / "commands/launch.py"):
        text, prefix = file.read_text(), ""
        for line in text.splitlines():
            if given := re.search(r'prefix = "(\w+)"', line):
                prefix = given[1]
            for joined, name in re.findall(r'(?:env|environ)\[(prefix \+ )?"([A-Z]\w+)"\] = ', line):
                found.add((prefix if joined else "") + name)
            found.update(re.findall(r'^\s+"([A-Z_\d]+)": ', line) + re.findall(r'\.append\("([A-Z]\w+)=', line))
        if "{prefix}{arg.upper()}" in text:
            options = re.findall(r'"--(fp8_\w+)"', (package / "commands/launch.py").read_text())
            found |= {f"ACCELERATE_{each.upper()}" for each in options if each != "fp8_override_linear_precision"}
    return found
