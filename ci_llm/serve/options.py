"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass

from ci_llm.errors import BadInput


@dataclass(frozen=True)
class Options:
    """The options of `ci-llm serve`.

    Attributes:
        name: of the model that is all agents together.
        key: that requests must have; None: none.
        slots, queue: texts that grow at a time, and that may wait beside them.
        context: tokens of a prompt with its answer; None: what the base reads.
        minimum_confidence, agents_per_prompt: of requests that say no other.
        engine_key: that the engine wants; None: none.
        drain_s: seconds for what is under way at the end.
    """

    name: str = "crowd"
    key: str | None = None
    slots: int = 32
    queue: int = 128
    context: int | None = None
    minimum_confidence: float | None = None
    agents_per_prompt: float | None = None
    engine_key: str | None = None
    drain_s: int = 30

    def within(self, limit: int) -> int:
        """The context where so many tokens are read at most. Raises BadInput: more are wanted."""
        if self.context is not None and self.context > limit:
            where = f"--max-model-len {self.context}"
            raise BadInput(f"the base reads {limit} tokens", where=where, hint="give at most that")
        return self.context or limit
