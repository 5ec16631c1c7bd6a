"""The web application: its paths, the API key, the size limit of bodies, clients that go away, its start and end."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ci_llm.crowd.answering import ends_of_answers, require_writers
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import decodes
from ci_llm.crowd.next_token import num_positions
from ci_llm.crowd.uncertainty import uncalibrated
from ci_llm.errors import BadInput, ModelError
from ci_llm.serve import LOCAL, Options
from ci_llm.serve.answers import Answer
from ci_llm.serve.engine import TEXT, Engine, Job, Metrics, jobs_of
from ci_llm.serve.request import (
    AnyBody,
    ApiProblem,
    ChatBody,
    CompletionBody,
    Own,
    Served,
    call_of,
    checked,
    ids_of,
    parsed,
    prompts_of,
    unknown_model,
)

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Awaitable[Response]]
#: Reading a body takes the interpreter, and nobody else is answered: less than 0.1 s for this size.
LARGEST_BODY: Final = 2 << 20
_ENDLESS: Final = 8  # times the largest body
_OWN_PAGES: Final = ("same-origin", "none")
#: Paths that need no key.
_FREE: Final = ("/healthz", "/metrics", "/")
_GONE: Final = 499  # the client has gone
#: Seconds for the current step of the engine when all answers are written or given up.
_LEAVE_S: Final = 5.0
#: The page loads nothing from elsewhere, and must not.
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Writer(Protocol):
    """The writer of texts: the engine of a crowd in this process, or the client of a server with the agents."""

    @property
    def is_ready(self) -> bool: ...
    def submit(self, jobs: Sequence[Job]) -> None: ...
    def cancel(self, jobs: Sequence[Job]) -> None: ...
    def begin(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def stop(self, bound_s: float) -> None: ...


class Events(StreamingResponse):
    """Server-sent events; `end` is called when all were sent or the client is gone, even before the first."""

    def __init__(self, lines: AsyncIterator[str], end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is for nginx
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class Service:
    """The paths of one server.

    Attributes:
        served: the models, and the limits of requests.
        options: the options of the server.
        app: the ASGI application.
    """

    def __init__(self, served: Served, writer: Writer, metrics: Metrics, options: Options) -> None:
        self.served = served
        self._writer = writer
        self._metrics = metrics
        self.options = options
        self._born = int(time.time())
        # One thread, because the event loop has to stay free, and rendering a chat template has a state.
        self._reader = ThreadPoolExecutor(1, "ci_llm reader")
        paths: dict[str, tuple[str, Handle]] = {
            "/v1/chat/completions": ("POST", partial(self._answer, ChatBody)),
            "/v1/completions": ("POST", partial(self._answer, CompletionBody)),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/healthz": ("GET", self._health),
            "/metrics": ("GET", self._prometheus),
            "/": ("GET", self._page),
        }
        self.app = Starlette(
            routes=[Route(path, self._guarded(handle), methods=[method]) for path, (method, handle) in paths.items()],
            exception_handlers={HTTPException: _no_such, Exception: _broken},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._writer.begin(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(self._writer.stop, _LEAVE_S)
        self._reader.shutdown()

    def _guarded(self, handle: Handle) -> Handle:
        """A handler that checks the key first, turns problems into answers, and logs a line."""

        async def handler(request: Request) -> Response:
            request.state.began = time.monotonic()
            request.state.word = "-"
            try:
                self._authorize(request)
                response = await handle(request)
            except ApiProblem as problem:
                self._metrics.refused(problem.status)
                response = problem.response()
                request.state.word = problem.error["code"] or problem.error["type"]
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            if not isinstance(response, Events) and (request.method == "POST" or response.status_code >= 400):
                _log(request, response.status_code)
            return response

        return handler

    def _authorize(self, request: Request) -> None:
        """Require the key, except for `_FREE` paths. A server without a key refuses pages of other sites only.

        A browser lets every open page post to this machine. Its headers about the page's origin are checked as in
        `CrossOriginProtection` of Go's net/http; other clients do not send them. A page may also point its own host
        name at 127.0.0.1 (DNS rebinding) and so have the same origin, so the host name must be a local one.

        Raises:
            ApiProblem: the request is refused.
        """
        headers, key, bound = request.headers, self.options.key, self.options.host
        if key is None:
            host = headers.get("host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if bound in LOCAL and name.strip("[]") not in LOCAL:
                what = f"without an API key this server is reached as {bound}, and not as {name or 'nobody'}"
                raise ApiProblem(403, what, code="unknown_host")
            origin = headers.get("origin")
            is_same = origin is None or origin.partition("://")[2] == host
            site = headers.get("sec-fetch-site", "none" if is_same else "cross-site")
            if request.method == "POST" and site not in _OWN_PAGES:
                raise ApiProblem(403, "pages of other sites may ask only with an API key", code="cross_origin")
        elif request.url.path not in _FREE:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("latin-1"), key.encode()):  # as starlette decodes headers
                absent = "You did not provide an API key (Authorization: Bearer)"
                raise ApiProblem(401, "Incorrect API key provided" if given else absent, code="invalid_api_key")

    async def _answer(self, kind: type[AnyBody], request: Request) -> Response:
        served, loop = self.served, asyncio.get_running_loop()
        given = await _json(request)
        served.require_few(given)
        body = checked(kind, given)
        asked = prompts_of(body, served)
        prompts = [await loop.run_in_executor(self._reader, ids_of, prompt, served) for prompt in asked]
        call = call_of(body, prompts, served)
        jobs = jobs_of(call)
        answer = Answer(call, jobs, served)
        self._writer.submit(jobs)
        request.state.answer = answer
        request.state.word = call.body.model
        if body.stream:

            def end() -> None:
                self._writer.cancel(jobs)
                _log(request, 200 if answer.is_whole else _GONE)

            return Events(answer.stream(), end)
        whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return JSONResponse(whole.result())
        finally:
            self._writer.cancel(jobs)
            whole.cancel()
            gone.cancel()

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry(name) for name in self.served.models]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.served.models:
            raise unknown_model(name, self.served)
        return JSONResponse(self._entry(name))

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._born,
            "owned_by": "ci-llm",
            "max_model_len": self.served.context,
            "agents": len(self.served.names) if self.served.models[name] is None else 1,
            "remembers": self.served.prompter.tells_turns_apart,
        }

    async def _health(self, _: Request) -> Response:
        ready = self._writer.is_ready
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    async def _prometheus(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=TEXT)

    async def _page(self, _: Request) -> Response:
        page = files("ci_llm.serve").joinpath("page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


async def _json(request: Request) -> dict[str, Any]:
    """The JSON object in the body, whose size is measured as it comes, because not every client sends its length.

    The rest of a too large body is read and dropped, because a client reads the answer only after sending all. The
    connection is cut if the body does not end.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= LARGEST_BODY:
            parts.append(part)
        else:
            parts.clear()
        if size > _ENDLESS * LARGEST_BODY:
            break
    if size > LARGEST_BODY:
        problem = ApiProblem(413, f"the body is larger than {LARGEST_BODY >> 20} MiB", code="request_too_large")
        problem.headers["Connection"] = "close"
        raise problem
    return parsed(b"".join(parts))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _log(request: Request, status: int) -> None:
    """Log a line about a request, with its model or the code of its error, and without its content."""
    state = request.state
    usage = state.answer.usage if "answer" in state else None
    told = f" {usage['prompt_tokens']}+{usage['completion_tokens']} tokens" if usage else ""
    seconds = time.monotonic() - state.began
    logger.info("%s %s %d %s%s %.3f s", request.method, request.url.path, status, state.word, told, seconds)


async def _no_such(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that is not in the routes."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return ApiProblem(error.status_code, what, code=code).response()


async def _broken(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiProblem(500, "the server had an error", code="internal_error").response()


# The start

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
    reason = crowd.base_model.choose_route()
    if not decodes(crowd):
        why = f" ({reason})" if reason else ""
        raise ModelError(
            f"{type(crowd.model).__name__} cannot be served: it does not read packed rows with a cache{why}",
            where=f"model_name: {crowd.base_model.base_name}",
            hint="ci-llm generate and ci-llm chat take it; or serve an exported agent by another server",
        )
    prompter = crowd.prompter
    limit = min(num_positions(crowd.model), _CONTEXT)
    if options.minimum_confidence is not None and (reason := uncalibrated(crowd.calibration, "probability")):
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
        defaults=Own(minimum_confidence=options.minimum_confidence),
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
    logger.info("http://%s:%d/ serves %s", shown, listening.getsockname()[1], ", ".join(service.served.models))
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
