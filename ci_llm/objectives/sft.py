"""Next-token prediction of answers; its loss, with the diversity of the agents, is in `ci_llm.crowd.objective`."""

from __future__ import annotations
