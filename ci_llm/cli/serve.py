"""`ci-llm serve`: the crowd of a run, its agents and its base behind OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ci_llm.cli import asking
from ci_llm.cli.checkpoints import located
from ci_llm.cli.command import make_parser
from ci_llm.core.imports import importing
from ci_llm.errors import BadInput, ConfigError
from ci_llm.interrupts import Interrupts

if TYPE_CHECKING:
    from ci_llm.serve.options import Options

_DESCRIPTION = """Serve the crowd of a run, its agents and its base by OpenAI's API, with a chat page at /.
Answers are greedy unless a request has a temperature."""
_COMMON = ("--host", "--port", "--api-key", "--max-num-seqs", "--engine")
_EXAMPLES = """examples:
  ci-llm serve ci_llm_output
  curl localhost:8000/v1/chat/completions -d '{"model": "crowd", "messages": [{"role": "user", "content": "Hello"}]}'
  ci-llm serve ci_llm_output --engine http://gpu:8000     a vLLM holds the agents as LoRA models; they vote here

exit codes: 0 ended by SIGTERM or Ctrl-C; 1 the engine does not answer; 2 bad call"""
_LOCAL = ("127.0.0.1", "localhost", "::1")
_KEY = "CI_LLM_API_KEY"
_ENGINE_KEY = "CI_LLM_ENGINE_API_KEY"


def serve(words: Sequence[str]) -> int:
    """Run `ci-llm serve ARGUMENTS` until a signal ends it, and return the exit code.

    Raises:
        BadInput: the call is wrong, there is no crowd, or the engine cannot do what is asked of it.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    options = _checked(call)
    _require_libraries()
    run = located(call.run)
    if call.host not in _LOCAL and not options.key:
        asking.note(f"warning: everybody who reaches {call.host}:{call.port} may ask: --api-key KEY, or {_KEY}")
    with importing():
        from ci_llm.serve.start import of_run, run_until_signal
    if call.engine:
        from ci_llm.serve.remote import of_engine

        asking.require_run(run, call.base_model, takes_base=False)
        service = of_engine(run, call.engine, options)
    else:
        asking.require_run(run, call.base_model)
        crowd, _ = asking.open_run(run, call.base_model)
        service = of_run(crowd, options)
    told = f"answering what is under way, for at most {options.drain_s} s"
    with Interrupts(("SIGTERM", "SIGINT"), (), describe_stop=lambda: told):
        return run_until_signal(service, call.host, call.port)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ci-llm serve", _DESCRIPTION, _EXAMPLES, _COMMON)
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    option("--host", default="127.0.0.1", help="the address that is listened on (127.0.0.1)")
    option("--port", type=int, default=8000, help="its port (8000); 0 takes a free one")
    option("--api-key", metavar="KEY", help=f"that requests must have; better in the environment, as {_KEY}")
    option("--served-model-name", default="crowd", metavar="NAME", help="of all agents together (crowd)")
    option("--max-num-seqs", type=int, default=32, metavar="N", help="texts that grow at a time (32)")
    option("--max-model-len", type=int, metavar="N", help="tokens of a prompt with its answer; default the base's")
    option("--max-queue", type=int, default=128, metavar="N", help="texts that may wait beside them (128)")
    option(
        "--minimum-confidence",
        type=float,
        metavar="P",
        help="of requests that say no other: give no answer that is right with a lower probability",
    )
    option(
        "--agents-per-prompt",
        type=float,
        metavar="N",
        help="of requests that say no other: ask one agent, and all where it is unsure: N on average",
    )
    option("--drain-seconds", type=int, default=30, metavar="S", help="for what is under way at SIGTERM (30)")
    option("--engine", metavar="URL", help=f"of a vLLM that holds the agents; its key is in {_ENGINE_KEY}")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    return parser


def _checked(call: argparse.Namespace) -> Options:
    """What can be refused before torch is imported."""
    minimum, agents = call.minimum_confidence, call.agents_per_prompt
    requirements = {
        "--port must be from 0 to 65535": 0 <= call.port <= 65535,
        "--max-num-seqs must be at least 1": call.max_num_seqs >= 1,
        "--max-queue must be at least 0": call.max_queue >= 0,
        "--max-model-len must be at least 2": call.max_model_len is None or call.max_model_len >= 2,
        "--drain-seconds must be at least 0": call.drain_seconds >= 0,
        "--minimum-confidence must be a probability, from 0 to 1": minimum is None or 0 <= minimum <= 1,
        "--agents-per-prompt must be at least 1: one agent always answers": agents is None or agents >= 1,
        "--served-model-name is the name of the base": call.served_model_name != "base",
        "--engine is an address such as http://host:8000": (call.engine or "http://").startswith(
            ("http://", "https://")
        ),
        "--minimum-confidence and --agents-per-prompt need the crowd here, and no --engine": not call.engine
        or (minimum is None and agents is None),
    }
    if broken := [text for text, holds in requirements.items() if not holds]:
        raise ConfigError("; ".join(broken), where="command line", hint="change the values named")
    from ci_llm.serve.options import Options

    return Options(
        name=call.served_model_name,
        key=call.api_key or os.environ.get(_KEY) or None,
        slots=call.max_num_seqs,
        queue=call.max_queue,
        context=call.max_model_len,
        minimum_confidence=minimum,
        agents_per_prompt=agents,
        engine_key=os.environ.get(_ENGINE_KEY) or None,
        drain_s=call.drain_seconds,
    )


def _require_libraries() -> None:
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "pip install 'ci-llm[serve]'"
        raise BadInput(f"{error.name} is not installed", where="ci-llm serve", hint=hint) from error
