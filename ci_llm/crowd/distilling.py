"""The distillation of the crowd into one agent, on training rows and on prompts without answers.

The student and a control start as the same agent. Both see the same training rows and prompts. The crowd answers the
prompts for the student, which learns the crowd's distribution at every token. The starting agent answers them for the
control, which learns the texts. So the student's gain over the control comes from the crowd. A step is one pass of the
teachers without gradients and one pass with gradients for each of the two, on one base.

Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015.

Legend: K teachers, S targets, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.agents.agent import factor
from ci_llm.config import Config
from ci_llm.core.determinism import generator_for
from ci_llm.core.work import working
from ci_llm.crowd.adapter_files import Adapter
from ci_llm.crowd.aggregators import aggregate, find_vote
from ci_llm.crowd.answering import ends_of_answers
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.generation import continuation
from ci_llm.crowd.merging import Distillation
from ci_llm.crowd.next_token import Decoding, TokenIds, num_positions
from ci_llm.crowd.pretrained import Pretrained
from ci_llm.data.batches import Batch, Owned, pack
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompter, last_answer, prompts_of_file
from ci_llm.data.sources import load_rows
from ci_llm.embedded import SPLITS, rows, task_rows
from ci_llm.errors import BadInput
from ci_llm.lora.settings import LoraSettings

CONTROL: Final = "own labels"
#: The prompts that the embedded generator makes for a run on its stories, and their seed.
EMBEDDED_PROMPTS: Final = 800
_EMBEDDED_SEED: Final = 13
_AT_A_TIME: Final = 16


@dataclass(frozen=True)
class Lesson:
    """The rows that student and control learn from; the prompts of both are the same.

    Attributes:
        student: training rows, and answers of the crowd.
        control: training rows, and the start's own answers.
    """

    student: Sequence[Example]
    control: Sequence[Example]


def distil(saved: Pretrained, config: Config, how: Distillation) -> tuple[Adapter, Adapter]:
    """The student and the control, which have the shape of the agent that they start as.

    Args:
        saved: the crowd, whose base has no agents on it before and after the call.
        config: the configuration of the run that trained it.

    Raises:
        BadInput: no prompt can be used, or a learning rate must be given.
    """
    start = saved.calibration.agent if saved.calibration else 0  # the best agent, if validation rows have told it
    rate = config.learning_rate / 4 if how.learning_rate is None else how.learning_rate
    lesson = _lesson(saved, config, how, start)
    teachers = saved.settings.num_agents
    shapes = [asdict(saved.settings.of(k)) for k in (*range(teachers), start, start)]
    still = [{**shape, "dropout": 0.0, "dropconnect": 0.0} for shape in shapes]
    crowd = Crowd(saved.base.model, LoraSettings(agents=tuple(still)), saved.base.name, saved.base.pad_id)
    try:
        for k, adapter in enumerate([*saved.agents, saved.agents[start], saved.agents[start]]):
            crowd.agents[k].load_state_dict(adapter.tensors, f"agent{k}")
        crowd.base_model.choose_route()
        _train(crowd, teachers, lesson, config, how, rate)
        files = crowd.adapter_files()
    finally:
        crowd.detach()
    found = [{name: each.clone() for name, each in files[f"agent{teachers + n}/adapter_model"].items()} for n in (0, 1)]
    student, control = (Adapter(saved.agents[start].config, tensors) for tensors in found)
    return student, control


# The rows to learn from


def _lesson(saved: Pretrained, config: Config, how: Distillation, start: int) -> Lesson:
    prompter = saved.prompter
    given = saved.tokenized(replace(load_rows(config, "train"), are_answers=True), config)
    examples = [given[number] for number in range(len(given))]
    end = _end(examples, given.whole_below(config.max_seq_length))
    crowd = Crowd.of(saved)
    try:
        prompts = _prompts(prompter, config, how, num_positions(crowd.model))
        longest = max(answer.stop - answer.start for answer in map(last_answer, examples))
        decoding = Decoding(config.answer_tokens(longest), ends_of_answers(crowd), config.aggregator)
        pairs = list(_answered(crowd, prompts, decoding, start, end))
    finally:
        crowd.detach()
    return Lesson([*examples, *(one for one, _ in pairs)], [*examples, *(other for _, other in pairs)])


def _end(examples: Sequence[Example], max_seq_length: int) -> int:
    """The token that most answers end with, among rows that were not cut."""
    whole = [example for example in examples if len(example.input_ids) < max_seq_length]
    ends = Counter(int(example.input_ids[last_answer(example).stop - 1]) for example in whole or examples)
    [(end, _)] = ends.most_common(1)
    return end


def _prompts(prompter: Prompter, config: Config, how: Distillation, positions: int) -> list[TokenIds]:
    """Token ids of the prompts without answers, from a file or, for a run on its stories, the embedded generator."""
    if how.prompts is not None:
        asked: Sequence[Any] = prompts_of_file(how.prompts)
    elif config.dataset_names == ("embedded",):
        taken = {row["question"] for split in SPLITS for row in rows(split)}
        asked = [row["question"] for row in task_rows(_EMBEDDED_SEED, EMBEDDED_PROMPTS, exclude=taken)]
    else:
        asked = []
    found: list[TokenIds] = [ids for ids in map(prompter.ids, asked) if len(ids) < positions]
    if how.prompts is not None and not found:
        hint = f"at least one prompt of fewer than {positions} tokens"
        raise BadInput("no prompt fits into the base's positions", where="--prompts", hint=hint)
    return found


def _answered(
    crowd: Crowd, prompts: Sequence[TokenIds], decoding: Decoding, start: int, end: int
) -> Iterator[tuple[Example, Example]]:
    """Yield each prompt with the crowd's and with the start's own answer, if both answers have an end."""
    with working("answer", len(prompts), "prompts") as shown:
        for at in range(0, len(prompts), _AT_A_TIME):
            part = prompts[at : at + _AT_A_TIME]
            found = crowd.generate_ids(part, decoding, include_agents=True)
            for prompt, each in zip(part, found, strict=True):
                own = each.agents[start]
                if each.has_ended and each.agents_ended[start]:
                    yield continuation(prompt, [*each.ids, end]), continuation(prompt, [*own, end])
            shown.advance_to(at + len(part))


# The training


def _train(crowd: Crowd, teachers: int, lesson: Lesson, config: Config, how: Distillation, rate: float) -> None:
    """Train the agents behind the teachers, in place.

    Args:
        rate: the learning rate at its peak.
    """
    student, control = teachers, teachers + 1
    optimizer = torch.optim.AdamW(
        [crowd.agents[student].weights, crowd.agents[control].weights],
        lr=rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )
    share = factor("cosine", how.steps // 20, how.steps)
    crowd.eval()
    aggregator = "probability" if find_vote(config.aggregator) else config.aggregator
    order = _order(len(lesson.student), config.batch_size, config.seed)
    with working("distil", how.steps, "steps") as shown:
        for step in range(how.steps):
            numbers = next(order)
            crowd.storage.begin_step(step)
            batch = pack([lesson.student[n] for n in numbers], numbers).to(crowd.device)
            with torch.no_grad():
                states = crowd.states(batch)[:teachers, batch.predict_from]
            _learn(crowd, student, batch, (states, aggregator))
            batch = pack([lesson.control[n] for n in numbers], numbers).to(crowd.device)
            _learn(crowd, control, batch, None)
            crowd.storage.clip([config.max_grad_norm] * crowd.num_agents)
            for group in optimizer.param_groups:
                group["lr"] = rate * share(step)
            optimizer.step()
            shown.advance_to(step + 1)


def _learn(crowd: Crowd, agent: int, batch: Batch, teachers: tuple[Tensor, str] | None) -> None:
    """Add the gradient of one agent on a batch.

    Args:
        teachers: the teachers' states [K, S, D] and the aggregator of their distributions; None to learn the texts.
    """
    [own_states] = crowd.base_model.states([Owned((agent,), batch)])
    states = own_states[0, batch.predict_from]
    leaf = states.detach().requires_grad_()
    for chunk in crowd.head.chunks(batch.num_targets, crowd.num_agents):  # all logits may not fit into memory
        own, wanted = crowd.head.logits(leaf[chunk]), batch.targets[chunk]
        if teachers is not None:
            theirs, aggregator = teachers
            with torch.no_grad():
                wanted = aggregate(crowd.head.logits(theirs[:, chunk]).log_softmax(-1), aggregator)
                wanted = wanted.softmax(-1)
        loss = torch.nn.functional.cross_entropy(own, wanted, reduction="sum")
        (loss / batch.num_targets).backward()
    states.backward(leaf.grad)


def _order(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of row numbers without end; every row once per epoch, in another order each time."""
    waiting: list[int] = []
    epoch = 0
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator_for(seed, "distil", epoch)).tolist()
            epoch += 1
        yield waiting[:size]
        waiting = waiting[size:]
