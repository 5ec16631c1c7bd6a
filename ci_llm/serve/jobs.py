"""The jobs of a request: each asks the decoder for a text, shows pieces of it, and ends it.

Jobs run on the thread of the engine, and send their events by `Job.tell`.

Legend: K agents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.answers import Logistic, TokenUncertainty, of_text, signals
from ci_llm.crowd.decoding import Request, generate_key
from ci_llm.crowd.generation import (
    TextSoFar,
    Wanted,
    continuation,
    cut,
    elect,
    final_answers,
    requests_of,
    targets_of,
)
from ci_llm.crowd.model import CrowdModel
from ci_llm.data.batches import pack
from ci_llm.data.prompts import Prompter
from ci_llm.serve.body import ApiProblem
from ci_llm.serve.call import Call

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
    """The base class of jobs.

    Attributes:
        call: the request.
        prompt: the token ids of the prompt.
        number: the number of the text in its request, which keys the generator of a sample.
        outbox: the list of events that the engine sends once per step.
        cancelled: whether the client has gone.
        open: the requests to the decoder that have not ended.
        arrived, admitted, first, last: the times of arrival, of leaving the queue, and of the first and the last token,
            by `time.monotonic`.
    """

    call: Call
    prompt: Sequence[int]
    number: int
    outbox: list[tuple[Job, Event]] = field(default_factory=list)
    cancelled: bool = False
    open: set[Request] = field(default_factory=set)
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    #: Whether it writes an answer of its own.
    writes: bool = True

    def tell(self, event: Event) -> None:
        self.outbox.append((self, event))

    def asked(self, crowd: CrowdModel) -> list[Request]:
        """The requests to the decoder; empty if the job has ended."""
        raise NotImplementedError

    def take(self, request: Request) -> bool:
        """Process the next token of a request of this job; returns whether the request has ended.

        Raises:
            Exception: the job fails.
        """
        raise NotImplementedError

    def close(self, crowd: CrowdModel) -> Ended:
        """Send the text after all requests have ended, and return its end."""
        raise NotImplementedError


@dataclass(eq=False)
class TextJob(Job):
    """A text that is chosen token by token, by the crowd or by one agent.

    Attributes:
        lines: the tokens that were not sent yet.
        pieces: the text that was not sent yet.
        stopped: whether a stop string has ended the text.
        text: the text so far.
        request: the request to the decoder.
    """

    lines: list[TokenLine] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    stopped: bool = False
    text: TextSoFar | None = None
    request: Request | None = None

    def asked(self, crowd: CrowdModel) -> list[Request]:
        call = self.call
        if call.body.echo:
            lines = [] if call.body.top is None else prompt_lines(crowd, call, self.prompt)
            self.tell(Piece(str(_prompter(crowd).tokenizer.decode(list(self.prompt))), lines))
        if call.only_echo:
            return []
        self.text = TextSoFar(_prompter(crowd).tokenizer, call.body.stop, self.pieces.append)
        self.request = Request(
            self.prompt,
            call.decoding,
            call.who,
            key=generate_key(self.number),
            uncertainty=call.own.include_agents or right_by(crowd, call) is not None,
            top=call.body.top or 0,
            tag=self,
        )
        return [self.request]

    def take(self, request: Request) -> bool:
        if request.error is not None:
            raise request.error
        assert self.text is not None, "it was asked for"
        chosen = request.chosen[-1]
        self.lines.append(TokenLine(chosen.id, chosen.log_probability, chosen.top))
        shows = self.call.body.stream and not self.call.decides_at_the_end
        reads = request.finish != "stop" and bool(shows or self.call.body.stop)
        self.stopped = reads and self.text.update(request.text)
        if self.stopped or request.finish is not None:
            self.text.finish(request.text)
            return True
        if shows and self.pieces:
            self._show()
        return False

    def close(self, crowd: CrowdModel) -> Ended:
        assert self.request is not None, "it was asked for"
        own, chosen, sure = self.call.own, self.request.chosen, self.request.sure
        confidence = math.exp(sum(each.log_probability for each in chosen))
        agents = len(crowd.names) if self.call.who is None else int(self.call.who >= 0)
        said = about(confidence, agents, right_by(crowd, self.call), own.minimum_confidence, sure)
        if said["abstained"]:
            self.pieces.clear()
            self.lines.clear()
        if self.pieces or self.lines:
            self._show()
        reason = "stop" if self.stopped or self.request.finish == "stop" else "length"
        return Ended(reason, len(chosen), said)

    def _show(self) -> None:
        self.tell(Piece("".join(self.pieces), tuple(self.lines)))
        self.pieces.clear()
        self.lines.clear()


@dataclass(eq=False)
class AgentsJob(Job):
    """The answers of every agent alone, for a vote, or to return beside the crowd's answer.

    Attributes:
        texts: the requests to the agents, agent by agent.
        stops: each request's text so far, if the call has stop strings.
    """

    texts: list[Request] = field(default_factory=list)
    stops: dict[Request, TextSoFar] = field(default_factory=dict)

    def asked(self, crowd: CrowdModel) -> list[Request]:
        call, tokenizer = self.call, _prompter(crowd).tokenizer
        requests = requests_of(crowd, self.number, self.prompt, Wanted(call.decoding, include_agents=not call.votes))
        self.texts = requests if call.votes else requests[1:]  # the crowd's own is another job's
        for request in self.texts:
            request.tag = self
        if call.body.stop:
            self.stops = {request: TextSoFar(tokenizer, call.body.stop) for request in self.texts}
        return self.texts

    def take(self, request: Request) -> bool:
        # The text of an agent that fails, because its numbers are not finite, ends there.
        return request.finish is not None or (request in self.stops and self.stops[request].update(request.tokens))

    def close(self, crowd: CrowdModel) -> Ended:
        call, texts = self.call, [request.tokens for request in self.texts]
        answers = self._worded(texts, crowd)
        if not call.votes:
            return Ended("stop", sum(map(len, texts)), answers=answers)
        how, names = call.decoding, crowd.names
        winner, sure = elect(
            crowd, self.prompt, texts, how.aggregator, lambda texts: final_answers(self._worded(texts, crowd))
        )
        logs = [math.log(max(one.probability, _LEAST)) for one in sure]
        said = about(math.exp(sum(logs)), len(names), right_by(crowd, call), call.own.minimum_confidence, sure)
        at = next(n for n, text in enumerate(texts) if text is winner)
        if not said["abstained"]:
            lines = [TokenLine(token, log) for token, log in zip(winner, logs, strict=True)]
            self.tell(Piece(answers[at], lines))
        reason = "length" if self.texts[at].finish in ("length", "error") else "stop"
        shows = call.own.include_agents and len(texts) == len(names)  # not with several texts of each agent
        return Ended(reason, len(sure), said, answers if shows else None)

    def _worded(self, texts: Sequence[Sequence[int]], crowd: CrowdModel) -> list[str]:
        return [cut(_prompter(crowd).text(list(ids)), self.call.body.stop) for ids in texts]


def jobs_of(call: Call) -> list[list[Job]]:
    """For each answer of a request the job that writes it, and then the job of the agents' own answers if wanted."""
    found: list[list[Job]] = []
    beside = call.own.include_agents and call.who is None and not call.votes
    kind, each = AgentsJob if call.votes else TextJob, call.body.n
    for at, prompt in enumerate(call.prompts):
        agents: list[Job] = [AgentsJob(call, prompt, 0, writes=False)] if beside else []
        found += [[kind(call, prompt, number), *agents] for number in range(at * each, (at + 1) * each)]
    return found


@torch.no_grad()
def prompt_lines(crowd: CrowdModel, call: Call, prompt: Sequence[int]) -> list[TokenLine]:
    """The log-probabilities of a prompt's tokens under the writer of the call."""
    lines, rest = [TokenLine(int(prompt[0]), None)], prompt[1:]
    if not rest:
        return lines
    batch = pack([continuation(prompt[:1], rest)], [0])
    reading, top = crowd.agents.reading, max(1, call.body.top or 0)
    with reading.of(reading.agent if call.who is None else call.who):
        for each, targets in targets_of(crowd, [batch]):
            mixed = aggregate(each, call.decoding.aggregator, crowd.learned) if call.who is None else each[0]
            best, given = mixed.topk(top), mixed.gather(-1, targets[:, None]).squeeze(-1)
            rows = zip(targets.tolist(), given.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
            for token, own, ids, values in rows:
                lines.append(TokenLine(token, own, list(zip(ids, values, strict=True))))
    return lines


def _prompter(crowd: CrowdModel) -> Prompter:
    assert crowd.prompter is not None, "a crowd that is served has one"
    return crowd.prompter


def right_by(crowd: CrowdModel, call: Call) -> Logistic | None:
    """The function from signals to the probability that an answer is right; None without a calibration for it."""
    found = crowd.calibration
    if found is None or (call.who is None and found.aggregator != call.decoding.aggregator):
        return None
    if call.who is None:
        return found.right
    return found.agent_right if call.who == found.agent else None


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
        sure: how sure the writer was of its tokens.
    """
    right = judge and judge(signals(sure))
    return {
        "confidence": confidence if right is None else right,
        "calibrated": right is not None,
        "agreement": None,
        "agents": agents,
        "abstained": right is not None and minimum is not None and right < minimum,
        "disagreement": of_text(sure).disagreement if sure else None,
    }
