"""The thread that owns the crowd, and the jobs that it does: each asks the decoder for texts and shows an answer.

Texts wait in a bounded queue, and every step takes all open texts one token further. Jobs run on the thread of the
engine, and send their events by `Job.tell`. `Metrics` counts what they do, for Prometheus.

Legend: K agents.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ci_llm.crowd import generation
from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import BASE_ALONE, CROWD, Request
from ci_llm.crowd.uncertainty import Logistic, TokenUncertainty, calibrated, of_text, signals
from ci_llm.data.batches import pack
from ci_llm.serve.request import ApiProblem, Call

logger = logging.getLogger(__name__)
#: A probability of 0 counts as this, so that its logarithm is finite.
_LEAST: Final = 1e-300


class TokenLine(NamedTuple):
    """One token, its log-probability in nats (None for the first of a text), and the most probable tokens there."""

    id: int
    logprob: float | None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Piece:
    """A final part of a text, with its tokens."""

    text: str
    tokens: Sequence[TokenLine] = ()


@dataclass(frozen=True)
class Ended:
    """The end of a text.

    Attributes:
        reason: `stop`, or `length` if the text was cut.
        tokens: how many new tokens it has, including the end.
        own: the field `ci_llm` of the answer.
        answers: the answer of each agent alone, if these were asked for.
    """

    reason: str
    tokens: int
    own: dict[str, Any] = field(default_factory=dict)
    answers: Sequence[str] | None = None


Event = Piece | Ended | ApiProblem


@dataclass(eq=False)
class Job:
    """One answer of a call: a text that is chosen token by token, or the one that wins a vote.

    Attributes:
        call: the request of the client.
        prompt: the token ids of the prompt.
        number: the number of the answer in its call, which keys the generator of a sample.
        outbox: the list of events that the engine sends once per step.
        cancelled: true if the client has gone.
        requests: the requests to the decoder: for the answer unless agents vote, and for the agents' own answers.
        open: those that have not ended.
        lines: the tokens of the answer that were not sent yet.
        arrived, admitted, first, last: the times of arrival, of leaving the queue, and of the first and the last token,
            by `time.monotonic`.
    """

    call: Call
    prompt: Sequence[int]
    number: int
    outbox: list[tuple[Job, Event]] = field(default_factory=list)
    cancelled: bool = False
    requests: list[Request] = field(default_factory=list)
    open: set[Request] = field(default_factory=set)
    lines: list[TokenLine] = field(default_factory=list)
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def streams(self) -> bool:
        """True if the text is shown while it is written, because nothing is decided at its end."""
        call = self.call
        return call.body.stream and not call.votes and call.own.minimum_confidence is None

    def tell(self, event: Event) -> None:
        self.outbox.append((self, event))

    def begin(self, crowd: CrowdModel) -> list[Request]:
        """The requests to the decoder; none if only the prompt is echoed."""
        call = self.call
        if call.body.echo:
            lines = [] if call.body.top is None else prompt_lines(crowd, call, self.prompt)
            self.tell(Piece(str(crowd.prompter.tokenizer.decode(list(self.prompt))), lines))
        if call.body.max_tokens != 0:
            wanted = generation.Wanted(
                call.decoding,
                author=call.author,
                include_agents=call.own.include_agents,
                uncertainty=call.own.include_agents or right_by(crowd, call) is not None,
                top=call.body.top or 0,
                streams=self.streams,
            )
            self.requests = generation.requests_of(crowd, self.number, self.prompt, wanted)
        for request in self.requests:
            request.tag = self
        self.open = {*self.requests}
        return self.requests

    def take(self, request: Request) -> None:
        """Process the next token of a request. The text of an agent alone ends where its numbers are not finite.

        Raises:
            Exception: the answer cannot be written.
        """
        if self.call.votes or request is not self.requests[0]:
            return
        if request.error is not None:
            raise request.error
        chosen = request.chosen[-1]
        self.lines.append(TokenLine(chosen.id, chosen.log_probability, chosen.top))
        if self.streams:
            assert request.detokenizer is not None, "it streams"
            if text := request.detokenizer.next_text():
                self._show(text)

    def close(self, crowd: CrowdModel) -> Ended:
        """Send the rest of the answer after all requests have ended, and return its end."""
        call, how = self.call, self.call.decoding
        agents = self.requests if call.votes else self.requests[1:]
        answers = [generation.text_of(crowd, request.tokens, how) for request in agents]
        if call.votes:
            winner, sure = generation.elect(crowd, self.prompt, [request.tokens for request in agents], how)
            at = next(n for n, request in enumerate(agents) if request.tokens is winner)
            own, text = agents[at], answers[at]
            logs = [math.log(max(one.probability, _LEAST)) for one in sure]
            self.lines = [TokenLine(token, log) for token, log in zip(winner, logs, strict=True)]
        else:
            own = self.requests[0]
            sure = own.uncertainties
            logs = [each.log_probability for each in own.chosen]
            text = own.detokenizer.next_text() if own.detokenizer else generation.text_of(crowd, own.ids, how)
        count = len(crowd.names) if call.author is CROWD else int(call.author != BASE_ALONE)
        said = about(math.exp(sum(logs)), count, right_by(crowd, call), call.own.minimum_confidence, sure)
        if not said["abstained"] and (text or self.lines):
            self._show(text)
        reason = "length" if own.finish in ("length", "error") else "stop"
        return Ended(reason, len(logs), said, answers if call.own.include_agents else None)

    def _show(self, text: str) -> None:
        self.tell(Piece(text, tuple(self.lines)))
        self.lines.clear()


def jobs_of(call: Call) -> list[Job]:
    """The jobs of all answers to a call, prompt by prompt."""
    prompts = [prompt for prompt in call.prompts for _ in range(call.body.n)]
    return [Job(call, prompt, number) for number, prompt in enumerate(prompts)]


@torch.no_grad()
def prompt_lines(crowd: CrowdModel, call: Call, prompt: Sequence[int]) -> list[TokenLine]:
    """The log-probabilities of a prompt's tokens under the author of the call."""
    lines, rest = [TokenLine(int(prompt[0]), None)], prompt[1:]
    if not rest:
        return lines
    batch = pack([generation.continuation(prompt[:1], rest)], [0])
    top = call.body.top or 0
    with crowd.base_model.read_by(call.author):
        for each, targets in generation.targets_of(crowd, [batch]):
            mixed = aggregate(each, call.decoding.aggregator) if call.author is CROWD else each[0]
            best = mixed.topk(top)
            given = mixed.gather(-1, targets[:, None]).squeeze(-1)
            rows = zip(targets.tolist(), given.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
            for token, own, ids, values in rows:
                lines.append(TokenLine(token, own, list(zip(ids, values, strict=True))))
    return lines


def right_by(crowd: CrowdModel, call: Call) -> Logistic | None:
    """The function from signals to the probability that an answer is right; None without a calibration for it."""
    return calibrated(crowd.calibration, call.decoding.aggregator) if call.author is CROWD else None


def about(
    confidence: float | None,
    agents: int,
    judge: Logistic | None = None,
    minimum: float | None = None,
    sure: Sequence[TokenUncertainty] = (),
) -> dict[str, Any]:
    """The field `ci_llm` of an answer, as docs/serving.md describes it.

    Args:
        confidence: the text's probability.
        agents: how many wrote it.
        judge: see `right_by`.
        minimum: the answer is not given if it is right with a lower probability.
        sure: how sure the author was of its tokens.
    """
    right = judge(signals(sure)) if judge else None
    return {
        "confidence": confidence if right is None else right,
        "calibrated": right is not None,
        "agreement": None,
        "agents": agents,
        "abstained": right is not None and minimum is not None and right < minimum,
        "disagreement": of_text(sure).disagreement if sure else None,
    }


# The metrics, which Prometheus reads at `/metrics`: vLLM's names under `ci_llm:`, for vLLM's dashboards

#: The media type of `Metrics.text`.
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class Metrics:
    """Counters of one server, each by `model_name`."""

    def __init__(self, crowd: str) -> None:
        self._crowd = crowd
        self._registry = CollectorRegistry()
        self._running = self._gauge("num_requests_running", "sequences that are decoded")
        self._waiting = self._gauge("num_requests_waiting", "texts that wait for a slot")
        self._prompt = self._counter("prompt_tokens", "tokens of prompts")
        self._new = self._counter("generation_tokens", "tokens of answers")
        self._ended = self._counter("request_success", "texts that have ended", "finished_reason")
        self._refused = self._counter("request_refused", "requests that were not answered", "status")
        self._first = self._histogram("time_to_first_token_seconds", "from the request to its first token", _SHORT)
        self._between = self._histogram("inter_token_latency_seconds", "between two tokens of a text", _SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "from the request to its last token", _LONG)
        self._queued = self._histogram("request_queue_time_seconds", "in the queue", _SHORT)

    def load(self, running: int, waiting: int) -> None:
        """Set how many texts are being written, and how many wait."""
        self._running.labels(self._crowd).set(running)
        self._waiting.labels(self._crowd).set(waiting)

    def refused(self, status: int) -> None:
        self._refused.labels(self._crowd, str(status)).inc()

    def ended(self, model: str, reason: str, *, prompt: int = 0, new: int = 0) -> None:
        self._ended.labels(model, reason).inc()
        self._prompt.labels(model).inc(prompt)
        self._new.labels(model).inc(new)

    def timed(self, model: str, arrived: float, admitted: float, first: float, last: float, tokens: int) -> None:
        """Observe when a text arrived, left the queue, and had its first and last token, in seconds of one clock."""
        self._queued.labels(model).observe(admitted - arrived)
        self._first.labels(model).observe(first - arrived)
        self._whole.labels(model).observe(last - arrived)
        if tokens > 1:
            self._between.labels(model).observe((last - first) / (tokens - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"ci_llm:{name}", what, ["model_name"], registry=self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"ci_llm:{name}", what, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"ci_llm:{name}", what, ["model_name"], buckets=buckets, registry=self._registry)


# The thread

_FORGETS: Final = 0.1  # of the running mean of seconds that a text takes
_LONGEST_WAIT_S: Final = 60  # that a client is told; OpenAI's does not try again after more than 120


class Engine(threading.Thread):
    """The thread that steps the decoder. No other thread may use the crowd, as its attention is a state of the model.

    Args:
        slots: how many texts are written at a time.
        most_waiting: how many further texts may wait.
    """

    def __init__(self, crowd: CrowdModel, slots: int, most_waiting: int, metrics: Metrics) -> None:
        super().__init__(name="ci_llm engine", daemon=True)
        self._crowd = crowd
        self._most_waiting = most_waiting
        self._metrics = metrics
        self._decoder = Decoder(crowd, slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Job] = deque()
        self._pending: deque[Request] = deque()  # requests of open jobs that wait for a slot
        self._open: dict[Job, None] = {}  # in the order in which they left the queue
        self._changed = threading.Condition()
        self._stopping = False
        self._abandons = False
        self._outbox: list[tuple[Job, Event]] = []
        self._seconds = 1.0  # the running mean of the seconds that a text takes

    @property
    def is_ready(self) -> bool:
        """True if new texts are accepted."""
        return self.is_alive() and not self._stopping

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; the events of jobs go to this loop."""
        self._loop = loop
        self.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of these texts, or refuse all.

        Raises:
            ApiProblem: the queue is full, or the server is shutting down.
        """
        with self._changed:
            if not self.is_ready:
                raise _leaving()
            waiting, slots = len(self._waiting), self._decoder.slots
            if waiting + len(jobs) > self._most_waiting + max(0, slots - len(self._open)):
                wait = min(_LONGEST_WAIT_S, math.ceil(self._seconds * (1 + waiting / slots)))
                what = f"{waiting} texts wait already: try again in {wait} s"
                raise ApiProblem(429, what, code="rate_limit_exceeded", retry_after=wait)
            for job in jobs:
                job.outbox = self._outbox
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give up these texts; the next step frees their slots."""
        for job in jobs:
            job.cancelled = True

    def stop(self, bound_s: float) -> None:
        """Accept no new texts, finish the accepted ones within `bound_s` seconds, and give up the rest."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.join(bound_s)
        self._abandons = True
        self.join(bound_s)

    def run(self) -> None:
        """Take steps until `stop`. However this thread ends, no client is left waiting."""
        torch.set_grad_enabled(False)
        try:
            while self._has_work():
                for job in [job for job in self._all if job.cancelled]:
                    self._drop(job, "abort")
                self._begin_jobs()
                self._admit()
                self._step()
                self._metrics.load(len(self._decoder.open), len(self._waiting))
                self._send()
        except Exception:
            logger.exception("the engine has failed")
        self._stopping = True
        self._fail(self._all, _leaving())
        self._send()

    def _has_work(self) -> bool:
        """Wait for work; False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._open or self._stopping)
            return not self._abandons and bool(self._waiting or self._open)

    @property
    def _all(self) -> list[Job]:
        with self._changed:
            return [*self._open, *self._waiting]

    def _begin_jobs(self) -> None:
        """Take jobs out of the queue, the oldest first, as long as there are slots for them."""
        while self._waiting and len(self._pending) < self._decoder.free:
            with self._changed:
                job = self._waiting.popleft()
                self._open[job] = None
            job.admitted = time.monotonic()
            try:
                requests = job.begin(self._crowd)
            except Exception as error:
                logger.exception("a text could not be begun")
                self._fail([job], _failure(error))
                continue
            self._pending.extend(requests)
            if not requests:  # only its prompt was read
                self._end(job, Ended("length", 0))
            if job.call.body.echo:
                return  # scoring the prompt took a pass, so the other texts get their step first

    def _admit(self) -> None:
        """Give free slots to the oldest requests; those admitted together share the pass over a prompt."""
        admitted = [self._pending.popleft() for _ in range(min(len(self._pending), self._decoder.free))]
        try:
            self._decoder.admit(admitted)
        except Exception as error:  # the requests were checked when they were read
            logger.exception("%d texts could not be begun", len(admitted))
            self._fail({request.tag for request in admitted}, _failure(error))

    def _step(self) -> None:
        try:
            moved = self._decoder.step()
        except Exception as error:  # memory ran out, above all; the step is repeated without the newest text
            logger.exception("a step failed")
            self._fail([self._decoder.open[-1].tag] if self._decoder.open else [], _failure(error))
            return
        now = time.monotonic()
        for request in moved:
            job = request.tag
            if request in job.open:  # the job may have failed by another of its requests
                if job.call.votes or request is job.requests[0]:
                    job.first = job.first or now
                    job.last = now
                self._take(job, request)

    def _take(self, job: Job, request: Request) -> None:
        try:
            job.take(request)
            if request.finish is not None:
                job.open.discard(request)
                if not job.open:
                    self._end(job, job.close(self._crowd))
        except Exception as error:
            logger.exception("a text failed")
            self._fail([job], _failure(error))

    def _end(self, job: Job, end: Ended) -> None:
        del self._open[job]
        job.tell(end)
        now = time.monotonic()
        self._seconds += _FORGETS * (now - job.arrived - self._seconds)
        model = job.call.body.model
        self._metrics.ended(model, end.reason, prompt=len(job.prompt), new=end.tokens)
        self._metrics.timed(model, job.arrived, job.admitted, job.first or now, job.last or now, end.tokens)

    def _fail(self, jobs: Iterable[Job], problem: ApiProblem) -> None:
        for job in [*jobs]:
            self._drop(job, "error")
            job.tell(problem)

    def _drop(self, job: Job, reason: str) -> None:
        """Remove a job from the queue or the decoder."""
        for request in job.open:
            self._decoder.release(request)
            with suppress(ValueError):  # the request has a slot already
                self._pending.remove(request)
        job.open.clear()
        with self._changed, suppress(ValueError):  # the job has left the queue
            self._waiting.remove(job)
        self._open.pop(job, None)
        self._metrics.ended(job.call.body.model, reason)

    def _send(self) -> None:
        """Hand the events of a step to the event loop, in one call."""
        if self._outbox and self._loop is not None:
            events = [*self._outbox]
            self._outbox.clear()
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.call.out.put_nowait((job, event))


def _leaving() -> ApiProblem:
    return ApiProblem(503, "the server is shutting down", code="shutting_down", retry_after=5)


def _failure(error: Exception) -> ApiProblem:
    """The error for the client; the log has the traceback."""
    return ApiProblem(500, f"the text could not be written ({type(error).__name__})", code="generation_failed")
