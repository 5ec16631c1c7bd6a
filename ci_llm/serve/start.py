"""The start of a server: what is served, by whom, on which port."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Final

import uvicorn

from ci_llm.crowd.asking import ends_of_answers, prompter_of, require_writers
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import decodes
from ci_llm.crowd.decoding import num_positions
from ci_llm.errors import BadInput, ModelError
from ci_llm.serve import Options
from ci_llm.serve.app import Service
from ci_llm.serve.body import Own
from ci_llm.serve.call import Served, uncalibrated
from ci_llm.serve.engine import Engine
from ci_llm.serve.metrics import Metrics

#: The context for a base whose family has no limit.
_CONTEXT: Final = 1 << 15
#: Seconds that an idle connection stays open. Clients must close first, or a request may meet a connection that is
#: being closed: openai's keeps them for 5 s, aiohttp for 15, proxies for 60.
_KEEP_ALIVE_S: Final = 75


def of_run(crowd: Crowd, options: Options) -> Service:
    """A service on a crowd in this process.

    Raises:
        BadInput: the options do not fit the crowd.
        ModelError: its base cannot be served, or its agents have heads.
    """
    require_writers(crowd)
    reason = crowd.choose_route()
    if not decodes(crowd):
        why = f" ({reason})" if reason else ""
        raise ModelError(
            f"{type(crowd.model).__name__} cannot be served: it does not read packed rows with a cache{why}",
            where=f"model_name: {crowd.base_name}",
            hint="ci-llm generate and ci-llm chat take it; or serve an exported agent by another server",
        )
    prompter, limit = prompter_of(crowd), min(num_positions(crowd.model), _CONTEXT)
    defaults = Own(minimum_confidence=options.minimum_confidence)
    reason = uncalibrated(crowd.calibration, "probability") if defaults != Own() else None
    if reason:
        hint = "ci-llm evaluate RUN --split validation --calibrate"
        raise BadInput(reason, where="--minimum-confidence", hint=hint)
    if options.name in crowd.names:
        raise BadInput("an agent has this name", where=f"--served-model-name {options.name}", hint="give another one")
    served = Served(
        prompter=prompter,
        names=crowd.names,
        crowd=options.name,
        context=options.within(limit),
        vocabulary=crowd.model.get_input_embeddings().weight.shape[0],
        ends=ends_of_answers(crowd),
        choices=options.slots + options.queue,
        calibration=crowd.calibration,
        defaults=defaults,
    )
    metrics = Metrics(options.name)
    engine = Engine(crowd, options.slots, options.queue, metrics)
    return Service(served, engine, metrics, options)


def run_until_signal(service: Service) -> int:
    """Answer requests until SIGTERM or Ctrl-C, and then finish open requests within `drain_s` seconds.

    Returns:
        the exit code.

    Raises:
        BadInput: the address cannot be listened on.
    """
    host, port = service.options.host, service.options.port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        hint = "another program listens there: give another --port" if port else "give another --host"
        raise BadInput(f"cannot listen: {error.strerror}", where=f"{host}:{port}", hint=hint) from error
    _log_to_stderr()
    shown = f"[{host}]" if ":" in host else host
    logging.getLogger(__name__).info("http://%s:%d/ serves %s", shown, listening.getsockname()[1], service.models)
    server_of(service).run(sockets=[listening])
    return 0


def server_of(service: Service) -> uvicorn.Server:
    """The HTTP server of a service."""
    config = uvicorn.Config(
        service.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=service.options.drain_s,
    )
    return uvicorn.Server(config)


def _log_to_stderr() -> None:
    """Log a line per request, with its time, to stderr."""
    package = logging.getLogger("ci_llm.serve")
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    package.addHandler(shown)
    package.setLevel(logging.INFO)
    package.propagate = False
