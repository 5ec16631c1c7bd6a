"""Imports and computations of every run, done once in a fork server for all of its trials.

No operation of torch is among it. Only servers import this file; it would cost a test's process seconds.
"""

from __future__ import annotations

import pandas  # noqa: F401  datasets reads rows of JSON with it
import peft  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama  # what the embedded base is

import ci_llm.run.job  # noqa: F401
from ci_llm import embedded
from ci_llm.base import targets
from ci_llm.report import page

get_checkpoint_conversion_mapping("llama")
page._template()
for kind in (modeling_llama.LlamaAttention, modeling_llama.LlamaMLP, modeling_llama.LlamaForCausalLM):
    targets._code(kind)  # reads its source code
for split in embedded.SPLITS:
    embedded.rows(split)
