"""The agents as a service: OpenAI's API for one crowd, which writes all open texts together, one token per step.

The event loop reads requests and sends answers, and one thread owns the crowd. `app.py` joins them. The options of a
server are here.
"""

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
        ConfigError: two values do not fit together.
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
        needs_crowd = self.minimum_confidence is not None
        requirements = {
            "--served-model-name is the name of the base": self.name != "base",
            "--engine is an address such as http://host:8000": (self.engine or "http:").startswith(("http:", "https:")),
            "--minimum-confidence needs the crowd here, and no --engine": not (self.engine and needs_crowd),
        }
        if broken := [text for text, holds in requirements.items() if not holds]:
            raise ConfigError("; ".join(broken), where="command line", hint="change the values named")

    def within(self, limit: int) -> int:
        """The context of a base that reads `limit` tokens. Raises BadInput if the option is larger."""
        if self.context is not None and self.context > limit:
            where = f"--max-model-len {self.context}"
            raise BadInput(f"the base reads {limit} tokens", where=where, hint="give at most that")
        return self.context or limit
