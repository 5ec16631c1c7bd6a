"""`ci-llm serve`: the crowd of a run, its agents and its base behind OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ci_llm.cli import answering
from ci_llm.cli.command import parser_of
from ci_llm.core.help import at_least, probability
from ci_llm.core.imports import importing
from ci_llm.errors import BadInput
from ci_llm.interrupts import Interrupts
from ci_llm.serve import LOCAL, Options

_COMMON = ("--host", "--port", "--api-key-file", "--max-num-seqs", "--engine")
_KEY = "CI_LLM_API_KEY"
_HOLDS = "give a text file that holds the key and nothing else"
_ENGINE_KEY = "CI_LLM_ENGINE_API_KEY"


def serve(words: Sequence[str]) -> int:
    """Run `ci-llm serve ARGUMENTS` until a signal ends it, and return the exit code.

    Raises:
        BadInput: the call is wrong, there is no crowd, or the engine cannot do what is asked of it.
        SystemExit: with 0, after `--help`.
    """
    options = _options(words)
    _require_libraries()
    run = answering.find_run(options.run, options.base_model, takes_base=options.engine is None)
    options = replace(options, run=run)
    if options.host not in LOCAL and not options.key:
        answering.note(
            f"warning: everybody who reaches {options.host}:{options.port} may ask: {_KEY}, or --api-key-file FILE"
        )
    with importing():
        from ci_llm.serve.app import of_run, run_until_signal
    if options.engine is not None:
        from ci_llm.serve.remote import of_engine

        service = of_engine(options)
    else:
        crowd, _ = answering.open_run(options.run, options.base_model)
        service = of_run(crowd, options)
    told = f"answering what is under way, for at most {options.drain_s} s"
    with Interrupts(("SIGTERM", "SIGINT"), (), describe_stop=lambda: told):
        return run_until_signal(service)


def _options(words: Sequence[str]) -> Options:
    """The options of a call; a wrong one is refused before torch is imported."""
    parser = parser_of("serve", _COMMON)
    parser.set_defaults(**asdict(Options()))
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    option("--host", help="the address that is listened on (%(default)s)")
    option("--port", type=at_least(0, most=65535), help="its port (%(default)s); 0 takes a free one")
    option("--api-key", dest="key", metavar="KEY", help=f"that requests must have; ps shows it, but not {_KEY}")
    option("--api-key-file", type=Path, metavar="FILE", help=f"that holds it; wins over {_KEY}, --api-key over it")
    option("--served-model-name", dest="name", metavar="NAME", help="of all agents together (%(default)s)")
    option("--max-num-seqs", dest="slots", type=at_least(1), metavar="N", help="sequences at a time (%(default)s)")
    about = "tokens of prompt and answer; by default all"
    option("--max-model-len", dest="context", type=at_least(2), metavar="N", help=about)
    option("--max-queue", dest="queue", type=at_least(0), metavar="N", help="texts that may wait (%(default)s)")
    option("--minimum-confidence", type=probability, metavar="P", help="withhold answers that are less probably right")
    about = "for what is open at SIGTERM (%(default)s)"
    option("--drain-seconds", dest="drain_s", type=at_least(0), metavar="S", help=about)
    option("--engine", metavar="URL", help=f"of a vLLM that holds the agents; its key is in {_ENGINE_KEY}")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    given = vars(parser.parse_args(words))
    file = given.pop("api_key_file")
    found = Options(**given)
    key = found.key or (_key_in(file) if file else os.environ.get(_KEY)) or None
    return replace(found, key=key, engine_key=os.environ.get(_ENGINE_KEY) or None)


def _key_in(file: Path) -> str:
    """The API key in a file, which must not be an empty one: the server would answer everybody."""
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadInput(f"the API key cannot be read: {why}", where=f"--api-key-file {file}", hint=_HOLDS) from error
    if not key:
        raise BadInput("the file holds no API key", where=f"--api-key-file {file}", hint=_HOLDS)
    return key


def _require_libraries() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "pip install 'ci-llm[serve]'"
        raise BadInput(f"{error.name} is not installed", where="ci-llm serve", hint=hint) from error
