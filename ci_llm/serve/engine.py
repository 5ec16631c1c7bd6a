"""The thread that owns the crowd: a bounded queue of texts, and steps that take every open text one token further."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import torch

from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.decoding import Request
from ci_llm.crowd.model import CrowdModel
from ci_llm.serve.body import ApiProblem
from ci_llm.serve.jobs import Ended, Event, Job
from ci_llm.serve.metrics import Metrics

logger = logging.getLogger(__name__)
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
        self._crowd, self._most_waiting, self._metrics = crowd, most_waiting, metrics
        self._decoder = Decoder(crowd, slots)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: deque[Job] = deque()
        self._pending: deque[Request] = deque()  # requests of open jobs that wait for a slot
        self._open: dict[Job, None] = {}  # in the order in which they left the queue
        self._changed, self._stopping, self._abandons = threading.Condition(), False, False
        self._outbox: list[tuple[Job, Event]] = []
        self._seconds = 1.0  # the running mean of the seconds that a text takes

    @property
    def is_ready(self) -> bool:
        """Whether new texts are accepted."""
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
                self._metrics.load(len(self._decoder.open), len(self._waiting), self._decoder.slots)
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
                requests = job.asked(self._crowd)
            except Exception as error:
                logger.exception("a text could not be begun")
                self._fail([job], _failure(error))
                continue
            job.open.update(requests)
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
                job.first, job.last = job.first or now, now
                self._take(job, request)

    def _take(self, job: Job, request: Request) -> None:
        try:
            if job.take(request):
                self._decoder.release(request)
                job.open.discard(request)
                self._metrics.prefix(job.call.model, len(request.prompt), request.reused)
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
        if job.writes:
            model = job.call.model
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
        self._metrics.ended(job.call.model, reason)

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
