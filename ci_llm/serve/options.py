"""The options of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ci_llm.errors import BadInput, ConfigError

#: Names of this machine that only programs on it can reach.
LOCAL: Final = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `ci-llm serve`.

    Attributes:
        run: the run or saved crowd to serve.
        host, port: the address to listen on; port 0 takes a free one.
        key: the API key that requests must have; None if they need none.
        name: the name of the model of all agents together.
        slots, queue: how many texts are written at a time, and how many more may wait.
        context: how many tokens a prompt and its answer may have together; None for the base's limit.
        minimum_confidence: the default of requests.
        drain_s: how many seconds open requests get at the end.
        engine: the address of a server that holds the agents; None to open them here.
        engine_key: the API key of that server; None if it needs none.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.

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
    drain_s: int = 30
    engine: str | None = None
    engine_key: str | None = None
    base_model: str | None = None

    def __post_init__(self) -> None:
        minimum, engine = self.minimum_confidence, self.engine
        requirements = {
            "--port must be from 0 to 65535": 0 <= self.port <= 65535,
            "--max-num-seqs must be at least 1": self.slots >= 1,
            "--max-queue must be at least 0": self.queue >= 0,
            "--max-model-len must be at least 2": self.context is None or self.context >= 2,
            "--drain-seconds must be at least 0": self.drain_s >= 0,
            "--minimum-confidence must be a probability, from 0 to 1": minimum is None or 0 <= minimum <= 1,
            "--served-model-name is the name of the base": self.name != "base",
            "--engine is an address such as http://host:8000": engine is None
            or engine.startswith(("http://", "https://")),
            "--minimum-confidence needs the crowd here, and no --engine": engine is None or minimum is None,
        }
        if broken := [text for text, holds in requirements.items() if not holds]:
            raise ConfigError("; ".join(broken), where="command line", hint="change the values named")

    def within(self, limit: int) -> int:
        """The context of a base that reads `limit` tokens. Raises BadInput if the option is larger."""
        if self.context is not None and self.context > limit:
            where = f"--max-model-len {self.context}"
            raise BadInput(f"the base reads {limit} tokens", where=where, hint="give at most that")
        return self.context or limit
