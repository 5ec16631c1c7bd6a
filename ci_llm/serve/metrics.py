"""The metrics that Prometheus reads at `/metrics`, with vLLM's names under `ci_llm:`, for vLLM's dashboards."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class Metrics:
    """Counters of one server, each by `model_name`."""

    def __init__(self, crowd: str) -> None:
        self._crowd, self._registry = crowd, CollectorRegistry()
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
