"""A saved crowd, or one of its agents, as a model of EleutherAI's lm-evaluation-harness.

    python -m ci_llm.integrations.lm_eval run --model ci-llm --model_args pretrained=RUN --tasks ...

This is the harness's own command line, to which the model `ci-llm` was added: the harness finds models in its own
package only. `agent=0` in `--model_args` takes one agent instead of the crowd. The crowd's distribution is the
aggregated one, by default the mean of the agents' probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ci_llm.crowd.asking import ends_of_answers
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoding import Decoding, num_positions
from ci_llm.crowd.generation import TextSoFar, cut, stop_strings_of
from ci_llm.crowd.scoring import score
from ci_llm.data.batches import pack
from ci_llm.data.encoder import chat_template
from ci_llm.errors import BadInput, CiLlmError, ConfigError

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ConfigError(
        "lm-evaluation-harness is not installed",
        where="ci_llm.integrations.lm_eval",
        hint="pip install 'ci-llm[lm-eval]'",
    ) from error

#: Tokens that are generated where a task does not say how many.
MAX_NEW_TOKENS = 256

Tokens = list[int]
#: (what it is under in the harness's cache, tokens of the context, tokens of the continuation)
Pair = tuple[Any, Tokens, Tokens]


@register_model("ci-llm")
class CrowdLM(TemplateLM):  # type: ignore[misc]
    """What the harness calls.

    Args:
        pretrained: the folder of a run, or a checkpoint.
        agent: "crowd", or the number of one agent.
        aggregator: of the crowd, a module of `ci_llm.crowd.aggregators`.
        batch_size: rows at a time.
        device: by default CUDA if there is one, otherwise the CPU.
        max_length: tokens that a row may have; by default the positions of the base.

    Raises:
        BadInput: there is no checkpoint or no such agent.
    """

    def __init__(
        self,
        pretrained: str,
        agent: int | str = "crowd",
        aggregator: str = "probability",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if others:
            known = "pretrained, agent, aggregator and max_length"
            raise BadInput(f"{', '.join(others)} is no option of ci-llm", where="--model_args", hint=f"it has {known}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise BadInput(f"batch_size {batch_size} is no number", where="--batch_size", hint="give a number of rows")
        # The harness says cuda:0 unless it is told otherwise, and means it as a wish.
        wished = None if str(device).startswith("cuda") and not torch.cuda.is_available() else device
        self.crowd = Crowd.from_pretrained(pretrained, device=wished)
        self.crowd.choose_route()
        assert self.crowd.prompter is not None, "a crowd that was opened has one"
        self.prompter = self.crowd.prompter
        self.tokenizer = self.prompter.tokenizer
        self.tokenizer.chat_template = chat_template(self.tokenizer)  # in force in training, also if it is built in
        self.agent = _agent_number(agent, self.crowd.num_agents)
        self.aggregator, self.batch_size = aggregator, int(batch_size)
        self.max_length = max_length or num_positions(self.crowd.model)
        self._device = self.crowd.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        """Token ids by the tokenizer's own rules, as the harness's own model takes them; never BOS twice."""
        begin = self.tokenizer.bos_token
        add = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=add, verbose=False)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the template of the training."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats of whole texts; of a text that is too long in windows, each with as many tokens before it as fit."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(nats for nats, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """For each pair the nats of the continuation, and whether every token of it is the most probable one."""
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        longest_first = sorted(range(len(rows)), key=lambda at: -len(rows[at].input_ids))
        found: dict[int, tuple[float, bool]] = {}
        for at in range(0, len(rows), self.batch_size):
            numbers = longest_first[at : at + self.batch_size]
            scores = score(self.crowd, [pack([rows[n] for n in numbers], numbers)], self.aggregator)
            assert scores is not None, "nobody asks to stop"
            who = self.crowd.num_agents if self.agent is None else self.agent
            nats, greedy = (-scores.nll[who]).tolist(), scores.right[who].tolist()
            found |= {number: (nats[i], greedy[i]) for i, number in enumerate(numbers)}
        for number, pair in enumerate(requests):
            if pair[0] is not None:
                self.cache_hook.add_partial("loglikelihood", pair[0], found[number])
        return [found[number] for number in range(len(rows))]

    def _row(self, context: Tokens, continuation: Tokens) -> Any:
        """The last tokens of both, as far as there is place; what is asked for is the continuation."""
        ids = np.array([*context, *continuation][-self.max_length :], np.int32)
        supervised = np.arange(len(ids)) >= len(ids) - len(continuation)
        supervised[:1] = False  # before it comes nothing that it could be predicted from
        return SimpleNamespace(input_ids=ids, supervised=supervised)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop strings.

        Raises:
            BadInput: a task asks for what the crowd cannot do, such as beams.
        """
        answers: dict[int, str] = {}
        numbers = sorted(range(len(requests)), key=lambda number: repr(requests[number].args[1]))
        for _, group in groupby(numbers, key=lambda number: repr(requests[number].args[1])):
            for batch in _batched(list(group), self.batch_size):
                contexts = [requests[number].args[0] for number in batch]
                arguments = requests[batch[0]].args[1]
                for number, text in zip(batch, self._generate(contexts, arguments, batch[0]), strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]

    def _generate(self, contexts: Sequence[str], arguments: dict[str, Any], first: int) -> Iterator[str]:
        wanted = normalize_gen_kwargs(arguments, MAX_NEW_TOKENS)
        until, length = stop_strings_of(wanted.pop("until", [])), wanted.pop("max_gen_toks")
        decoding = self._decoding(length, until, wanted)
        place = self.max_length - length
        if place < 1:
            raise BadInput(
                f"{length} new tokens leave no place for a prompt within {self.max_length} positions",
                where="max_gen_toks of the task",
                hint="--gen_kwargs max_gen_toks=...",
            )
        prompts = [self.tok_encode(context)[-place:] for context in contexts]
        alone = self.agent is not None
        generated = self.crowd.generate_ids(
            prompts,
            decoding,
            include_agents=alone,
            numbers=range(first, first + len(prompts)),
            is_over=lambda ids: TextSoFar(self.tokenizer, until).update(ids),
        )
        texts = generated.crowd if self.agent is None else generated.agents[self.agent]
        return (cut(self.prompter.text(ids), until) for ids in texts)

    def _decoding(self, length: int, until: Sequence[str], wanted: dict[str, Any]) -> Decoding:
        sampled = bool(wanted.pop("do_sample", False))
        temperature = wanted.pop("temperature", 1.0)
        kept = {name: wanted.pop(name) for name in ("top_p", "top_k") if name in wanted}
        if wanted or (sampled and self.agent is not None):
            what = f"{', '.join(wanted)} of the task" if wanted else "do_sample with a single agent"
            raise BadInput(f"{what} is not supported", where="generation_kwargs", hint="set it aside by --gen_kwargs")
        ends = ends_of_answers(self.crowd, until)
        if not sampled:
            return Decoding(length, ends, self.aggregator)
        return Decoding(length, ends, self.aggregator, do_sample=True, temperature=temperature, **kept)


def _agent_number(agent: int | str, count: int) -> int | None:
    """The number of the agent; None for the crowd."""
    if agent == "crowd":
        return None
    number = str(agent).removeprefix("agent")
    if not number.isdecimal() or int(number) >= count:
        raise BadInput(f"there is no agent {agent!r}", where="--model_args", hint=f"agent=crowd, or 0 to {count - 1}")
    return int(number)


def _batched(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))


def main() -> None:
    """The harness's command line; errors of ours are one message."""
    try:
        cli_evaluate()
    except CiLlmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
