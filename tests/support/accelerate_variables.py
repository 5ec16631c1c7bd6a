"""Variables that `accelerate launch` sets, in the forms in which it writes them, and what becomes of each here.

The forms are those of the launcher's code and of its questionnaire: `True` and `true`, `NO` and `no`, numbers, `auto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

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
        refused: the run ends with exit code 2, and says what to use.
        read_by: who acts on it, or why nobody does, if nothing of the above happens.
    """

    names: str
    values: tuple[str, ...]
    beside: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    hidden: str = ""
    refused: bool = False
    read_by: str = ""


#: A variable of FSDP, beside the switch without which Accelerate reads none of them, and that means shared layers here.
of_fsdp = partial(Row, beside=FSDP, settings=LAYERS, hidden="ACCELERATE_USE_FSDP")
of_parallelism = partial(Row, beside=PARALLEL, hidden="ACCELERATE_USE_PARALLELISM_CONFIG")
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
    of_fsdp(
        "FSDP_SHARDING_STRATEGY",
        ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "4", "5"),
    ),
    of_fsdp("FSDP_SHARDING_STRATEGY", ("NO_SHARD", "3"), settings={}),
    of_fsdp("FSDP_SHARDING_STRATEGY", ("NO_SHARD",), beside={**FSDP, "FSDP_VERSION": "2"}),
    of_fsdp("FSDP_ACTIVATION_CHECKPOINTING", YES, settings={**LAYERS, "use_gradient_checkpointing": "true"}),
    of_fsdp("FSDP_ACTIVATION_CHECKPOINTING", NO),
    of_fsdp("FSDP_VERSION", ("1", "2")),
    of_fsdp("FSDP_RESHARD_AFTER_FORWARD FSDP_OFFLOAD_PARAMS FSDP_FORWARD_PREFETCH FSDP_USE_ORIG_PARAMS", BOTH),
    of_fsdp("FSDP_CPU_RAM_EFFICIENT_LOADING FSDP_SYNC_MODULE_STATES FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", BOTH),
    of_fsdp("FSDP_MIN_NUM_PARAMS", ("100000000",)),
    of_fsdp("FSDP_AUTO_WRAP_POLICY", ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    of_fsdp("FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_IGNORED_MODULES", ("LlamaDecoderLayer",)),
    of_fsdp("FSDP_BACKWARD_PREFETCH", ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
    of_fsdp("FSDP_STATE_DICT_TYPE", ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
    Row("ACCELERATE_USE_PARALLELISM_CONFIG", YES, hidden="ACCELERATE_USE_PARALLELISM_CONFIG"),
    Row("ACCELERATE_USE_PARALLELISM_CONFIG", NO, read_by="it asks for nothing"),
    of_parallelism("PARALLELISM_CONFIG_DP_SHARD_SIZE", ("2", "8"), settings=LAYERS),
    of_parallelism("PARALLELISM_CONFIG_DP_SHARD_SIZE", ("1",)),
    of_parallelism("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", ("1", "2")),
    of_parallelism("PARALLELISM_CONFIG_TP_SIZE PARALLELISM_CONFIG_CP_SIZE PARALLELISM_CONFIG_SP_SIZE", ("1",)),
    of_parallelism("PARALLELISM_CONFIG_CP_BACKEND", ("torch",)),
    of_parallelism("PARALLELISM_CONFIG_CP_COMM_STRATEGY", ("allgather", "alltoall")),
    of_parallelism("PARALLELISM_CONFIG_SP_BACKEND", ("deepspeed",)),
    of_parallelism("PARALLELISM_CONFIG_SP_SEQ_LENGTH", ("None", "4096")),
    of_parallelism("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", BOTH),
    of_parallelism("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", ("None", "sdpa", "flash_attention_2")),
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
    # Acted on elsewhere
    Row("ACCELERATE_USE_CPU", ("True", "False", "true", "1"), read_by="is_cpu_wanted, and Accelerate"),
    Row("ACCELERATE_USE_SAGEMAKER", ("true",), hidden="ACCELERATE_USE_SAGEMAKER"),
    Row("ACCELERATE_DEEPSPEED_ZERO_STAGE ACCELERATE_FP8_FORMAT MEGATRON_LM_TP_DEGREE", ("0", "3"), read_by="nobody"),
    Row("MASTER_ADDR MASTER_PORT LOCAL_RANK RANK", ("0",), read_by="read_launch"),
]


def cases() -> list[tuple[str, str, Row]]:
    """(variable, value, its row)."""
    return [(name, value, row) for row in ROWS for name in row.names.split() for value in row.values]
