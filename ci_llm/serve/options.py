"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ci_llm.errors import BadInput, ConfigError

#: Names of this machine that only its own programs reach.
LOCAL: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `ci-llm serve`.

    Attributes:
        run: whose crowd is served.
        host, port: that are listened on; port 0 is a free one.
        key: that requests must have; None: none.
        name: of the model that is all agents together.
        slots, queue: texts that grow at a time, and that may wait beside them.
        context: tokens of a prompt with its answer; None: what the base reads.
        minimum_confidence, agents_per_prompt: of requests that say no other.
        drain_s: seconds for what is under way at the end.
        engine: address of a server that holds the agents; None: they are opened here.
        engine_key: that it wants; None: none.
        base_model: the base, if it is no longer where the run found it.

    Raises:
        ConfigError: a value is out of range.
    """

    run: str = ""
    host: str = LOCAL[0]
    port: int = 8000
    key: str | None = None
    name: str = "crowd"
    slots: int = 32
    queue: int = 128
    context: int | None = None
    minimum_confidence: float | None = None
    agents_per_prompt: float | None = None
    drain_s: int = 30
    engine: str | None = None
    engine_key: str | None = None
    base_model: str | None = None

    def __post_init__(self) -> None:
        minimum, agents, engine = self.minimum_confidence, self.agents_per_prompt, self.engine
        requirements = {
            "--port must be from 0 to 65535": 0 <= self.port <= 65535,
            "--max-num-seqs must be at least 1": self.slots >= 1,
            "--max-queue must be at least 0": self.queue >= 0,
            "--max-model-len must be at least 2": self.context is None or self.context >= 2,
            "--drain-seconds must be at least 0": self.drain_s >= 0,
            "--minimum-confidence must be a probability, from 0 to 1": minimum is None or 0 <= minimum <= 1,
            "--agents-per-prompt must be at least 1: one agent always answers": agents is None or agents >= 1,
            "--served-model-name is the name of the base": self.name != "base",
            "--engine is an address such as http://host:8000": engine is None
            or engine.startswith(("http://", "https://")),
            "--minimum-confidence and --agents-per-prompt need the crowd here, and no --engine": engine is None
            or (minimum is None and agents is None),
        }
        if broken := [text for text, holds in requirements.items() if not holds]:
            raise ConfigError("; ".join(broken), where="command line", hint="change the values named")

    def within(self, limit: int) -> int:
        """The context where so many tokens are read at most. Raises BadInput: more are wanted."""
        if self.context is not None and self.context > limit:
            where = f"--max-model-len {self.context}"
            raise BadInput(f"the base reads {limit} tokens", where=where, hint="give at most that")
        return self.context or limit
