"""CI-LLM: a crowd within one model. K LoRA agents on one frozen base, trained in one fused pass, unkillable."""

from __future__ import annotations

from ci_llm._version import __version__ as __version__
