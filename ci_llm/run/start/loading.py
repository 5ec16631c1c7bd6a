"""The input of a run: the base, the rows as tokens, their order, and the settings that follow from the rows.

Several runs of one process can share base and rows.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cached_property
from typing import Any, Final

from ci_llm.base.load import Base, load_architecture, load_base, positions_of, require_positions
from ci_llm.base.quantized import stored_quantization
from ci_llm.base.sharded import ShardedLayers
from ci_llm.config import Config
from ci_llm.config.problems import objective_clashes
from ci_llm.config.schema import ObjectiveKeys, RewardKeys
from ci_llm.core.quantities import count
from ci_llm.data.agent_rows import EvaluationRows, once_each
from ci_llm.data.encoder import Encoder, use_chat_template
from ci_llm.data.prompts import form_of, tokenizer_files
from ci_llm.data.rows import PromptForm, Rows
from ci_llm.data.sources import load_rows_of_each
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.data.units import FEW_CLASSES, Label, are_numbers, class_names, labels_of, name_of
from ci_llm.distributed.precision import autocast_dtype
from ci_llm.distributed.processes import Processes
from ci_llm.errors import ConfigError, DataError
from ci_llm.lora.heads import how_tokenized, require_class
from ci_llm.objectives import BY_ROWS, SFT, RowKind, head_size, measured_as, objective_of
from ci_llm.objectives.grpo.rewards import require_answers, rewards_of

logger = logging.getLogger(__name__)

_OF_ALL: Final = ("objective", "diversity", "lambda_sw", "aggregator")
#: Keys that some objectives read, and others do not.
_OF_OBJECTIVES: Final = [
    key for key in (*ObjectiveKeys.__annotations__, *RewardKeys.__annotations__) if key not in _OF_ALL
]


@dataclass(frozen=True)
class Loaded:
    """Base and rows, which take long to load; runs of the same base and data can share them, one after the other.

    Attributes:
        rows, eval_rows: the rows of every agent; agents that share a data set have one object.
        preferences: pairs or rated rows to evaluate on, for every agent; empty for single rows.
        settled: the values, by the rows, of keys that said auto.
    """

    base: Base
    rows: list[TokenizedRows]
    eval_rows: list[TokenizedRows]
    settled: Mapping[str, Any]
    preferences: list[TokenizedRows] = field(default_factory=list)

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """The files of the tokenizer by name, as every checkpoint holds them."""
        return tokenizer_files(self.base.tokenizer)

    def for_agents(self, count: int) -> Loaded:
        """Base and rows for `count` agents, if they were loaded for one."""
        if len(self.rows) == count:
            return self
        return replace(self, **{name: getattr(self, name) * count for name in ("rows", "eval_rows", "preferences")})


def load(config: Config, processes: Processes, begun_with: int | None = None, given: Base | None = None) -> Loaded:
    """Load base and rows; logs what it found. A collective.

    Args:
        begun_with: the `max_seq_length` with which the run began, if it resumes.
        given: a base that is loaded already, by a call in Python.

    Raises:
        BadInput: the model, the data or their combination cannot be trained; nothing was created.
    """
    asked = config
    shape = given.model.config if given else load_architecture(config.model_name)
    positions = positions_of(shape)
    if asked.is_open("max_seq_length"):
        config = config.model_copy(update={"max_seq_length": positions or sys.maxsize})
    else:
        require_positions(shape, config.max_seq_length)
    per_step = config.rows_per_step(processes.num_processes)
    # First of all: a missing file costs no loading of the base.
    found = load_rows_of_each(config, "train")
    config = config.model_copy(update=objective_by_rows(config, found, per_step))
    if asked.is_open("eval_samples"):
        samples = eval_samples_of(config, [*map(len, found)], per_step)
        config = config.model_copy(update={"eval_samples": samples})
    to_evaluate = load_rows_of_each(config, "eval")
    base = _base(config, processes, given)
    if Encoder(base.tokenizer).has_clock and config.chat_date is None:
        config = config.model_copy(update={"chat_date": processes.gather_object(date.today().isoformat())[0]})
    while True:
        rows = _tokenized(config, base, processes, found, evaluated=False)
        eval_rows = _tokenized(config, base, processes, to_evaluate, evaluated=True)
        narrower = _narrowed(asked, config, rows, eval_rows, per_step, begun_with)
        if narrower is config:
            break
        config = narrower
        to_evaluate = load_rows_of_each(config, "eval")
    preferences = []
    if head_size(config):
        require_class(base.model)
    elif measured_as(config) == "grpo":
        functions = rewards_of(config.rewards or (), config.answer_column, 1)
        for own in (*found, *to_evaluate):
            require_answers(functions, own.column_sets, config.answer_column, own.where)
        config = config.model_copy(update=completion_length(config, rows, positions))
    elif config.objective != SFT:
        to_rank = load_rows_of_each(config, "preferences")
        preferences = _tokenized(config, base, processes, to_rank, evaluated=True)
    if asked.is_open("max_seq_length"):
        config = config.model_copy(update={"max_seq_length": begun_with or _longest(rows, eval_rows)})
    settled = {key: value for key, value in config if value != getattr(asked, key)}
    return Loaded(base, rows, _with_copies_counted(eval_rows, rows), settled, preferences)


def _base(config: Config, processes: Processes, given: Base | None) -> Base:
    """The base of a run with its chat template, on the device of this process; logs what it is."""
    if given is not None:
        given.model.to(processes.device)
    base = given or open_base(config, processes)
    use_chat_template(base.tokenizer, config.chat_template)
    stored = f", linear layers in {kind}" if (kind := stored_quantization(base.model.config)) else ""
    shared = f", layers sharded over {processes.num_processes} process(es)" if config.base_sharding == "layers" else ""
    logger.info(
        f"model     {config.model_name}, {base.num_parameters:,} parameters, frozen, {base.model.dtype}{stored}{shared}"
    )
    return base


def _narrowed(
    asked: Config,
    config: Config,
    rows: Sequence[TokenizedRows],
    eval_rows: Sequence[TokenizedRows],
    rows_per_step: int,
    begun_with: int | None,
) -> Config:
    """With fewer rows to evaluate on, or shorter rows, which have to be read again; `config` itself if these will do.

    Args:
        asked: the configuration in which keys say auto.
        begun_with: see `load`.
    """
    samples = config.eval_samples or 0  # a number where it said auto
    if asked.is_open("eval_samples") and samples > LEAST:
        allowed = tokens_of_evaluation(config, rows, rows_per_step)
        taken = sum(own.facts.tokens for own in {id(own): own for own in eval_rows}.values())
        if taken > allowed:
            fewer = max(LEAST, min(samples - 1, samples * allowed // taken))
            return config.model_copy(update={"eval_samples": fewer})
    if asked.is_open("max_seq_length") and begun_with and begun_with < _longest(rows, eval_rows):
        return config.model_copy(update={"max_seq_length": begun_with})
    return config


def _longest(rows: Sequence[TokenizedRows], eval_rows: Sequence[TokenizedRows]) -> int:
    """The tokens of the longest row."""
    return max(own.facts.longest for own in (*rows, *eval_rows))


#: Tokens of a completion at most, unless the base has fewer positions, as in TRL.
LONGEST_COMPLETION: Final = 512


def completion_length(config: Config, each: Sequence[TokenizedRows], positions: int | None) -> dict[str, int]:
    """The value of `max_completion_length`, if it says auto.

    Raises:
        DataError: the longest prompt leaves no position for a completion.
    """
    longest = max(own.facts.longest for own in each)
    free = LONGEST_COMPLETION if positions is None else positions - longest
    if free < 1:
        raise DataError(
            f"the longest prompt has {longest} tokens, and the base has {positions} positions",
            where="max_seq_length",
            hint=f"max_seq_length={(positions or 2) // 2} leaves longer prompts out",
        )
    if not config.is_open("max_completion_length"):
        return {}
    return {"max_completion_length": min(LONGEST_COMPLETION, free)}


def objective_by_rows(config: Config, each: Sequence[Rows], rows_per_step: int) -> dict[str, Any]:
    """The values of keys that said auto, by the kind of the rows; an objective that is not sft is logged.

    Raises:
        BadInput: rows of agents are of different kinds, or settings do not fit the objective.
    """
    kinds: set[RowKind] = {rows.form.kind for rows in each}
    if len(kinds) > 1:
        raise DataError(
            "some agents train on single rows, and others on pairs or rated ones",
            where="agents, dataset_name",
            hint="one run has one objective: train on one kind at a time",
        )
    labels = [*labels_of(each)]
    by_rows = "regression" if are_numbers(labels) else BY_ROWS[kinds.pop()]
    settled = config.with_objective(by_rows) if config.is_open("objective") else {}
    config = config.model_copy(update=settled)
    for clash in objective_clashes(config):
        raise ConfigError(clash.what, where=", ".join(clash.keys), hint=clash.hint)
    if odd := _unread(config):
        logger.info(f"{', '.join(odd)} has no effect: objective is {config.objective}")
    if config.objective == SFT:
        return settled
    if settled:
        logger.info(f"data      objective {config.objective}, by the columns; objective=sft would refuse them")
        if len(names := {*map(name_of, labels)}) > FEW_CLASSES and all(name.lstrip("-").isdecimal() for name in names):
            logger.warning(
                f"data      the labels are {len(names)} different whole numbers, each a class of its own here;"
                " objective=regression predicts them as numbers"
            )
    needs = objective_of(config.objective, config.each_agent).needs
    if needs.mismatched and rows_per_step == 1:
        raise ConfigError(
            "kto compares a row with the answer of another one in the same step, and a step has one row",
            where="global_batch_size, batch_size",
            hint="batch_size=4, or loss_type=apo_zero_unpaired",
        )
    return settled | (_about_labels(config, labels, each[0].where) if needs.rows == "labelled" else {})


def _unread(config: Config) -> list[str]:
    """The keys of other objectives that have another value than their default."""
    read = set[str]()
    if config.objective != SFT:
        objective = objective_of(config.objective, config.each_agent)
        needs = objective.needs
        read = {field.name for field in fields(objective)}  # type: ignore[arg-type]
        read |= {"num_labels"} if needs.rows == "labelled" else set()
        read |= {"reference"} if needs.reference else set()
    unread = [key for key in _OF_OBJECTIVES if key not in read]
    usual = {key: Config.model_fields[key].default for key in unread} | {"beta": 0.1}
    return [key for key in unread if any(getattr(own, key) != usual[key] for own in config.each_agent)]


def _about_labels(config: Config, labels: Sequence[Label], where: str) -> dict[str, Any]:
    """The settings that follow from the labels: their classes, or nothing if they are predicted as numbers.

    Regression predicts numbers, and so does a loss from outside this package if labels are not whole.
    """
    if config.objective == "regression" or (config.objective != "classification" and are_numbers(labels)):
        if len({*labels}) < 2:
            raise DataError("all rows have the same label", where=f"{where}, label", hint="give rows of several")
        return {}
    names = config.label_names or class_names(labels, config.num_labels, where)
    return {"label_names": names, "num_labels": len(names)}


def _with_copies_counted(evaluated: Sequence[TokenizedRows], trained: Sequence[TokenizedRows]) -> list[TokenizedRows]:
    """The rows to evaluate on, with the count of those that some agent is trained on; copies count as well."""
    different = {id(rows): rows for rows in trained}.values()

    def counted(own: TokenizedRows) -> TokenizedRows:
        if own.rows.num_trained_on:
            return own
        copies = max(own.num_in(rows) for rows in different)
        return TokenizedRows(own.rows.evaluated_although_trained_on(copies), own.path)

    return once_each(evaluated, counted)


def common_form(config: Config, each: Sequence[TokenizedRows]) -> PromptForm:
    """The form in which the crowd words a prompt; if the rows of agents differ in it, that of the first agent."""
    forms = [own.facts.prompts or form_of(own.rows) for own in each]
    if len({*forms}) > 1:
        others = [name for name, form in zip(config.agent_names, forms, strict=True) if form != forms[0]]
        logger.warning(
            f"data      the crowd takes a prompt as {forms[0]}, as in the rows of {config.agent_names[0]};"
            f" {', '.join(others)} were trained on {({*forms} - {forms[0]}).pop()}"
        )
    return forms[0]


def describe_rows(config: Config, each: Sequence[TokenizedRows], eval_rows: EvaluationRows) -> None:
    """Log each data set once, and the rows to evaluate on; warn of rows that are also trained on."""
    different = {id(rows): rows for rows in each}
    for number, rows in different.items():
        if len(different) > 1:
            names = [name for name, own in zip(config.agent_names, each, strict=True) if id(own) == number]
            logger.info(f"data      {', '.join(names)}:")
        for line in rows.description:
            logger.info(f"data      {line}")
        for line in rows.facts.warnings:
            logger.warning(f"data      {line}")
    for evaluated in eval_rows.sets:
        logger.info(f"data      to evaluate on: {_source(evaluated)}")
        if evaluated.rows.num_trained_on:
            level = logging.INFO if evaluated.rows.trained_on == "all" else logging.WARNING
            logger.log(level, f"data      {evaluated.rows.description[-1]}")
    if config.keeps_best and (note := choice_by_test_rows("the best step", eval_rows.sets)):
        logger.info(f"data      {note}")


def choice_by_test_rows(chosen: str, evaluated: Sequence[TokenizedRows]) -> str | None:
    """A note for people if `chosen` is chosen by rows of the split test; else None."""
    if not any(rows.rows.are_of_test for rows in evaluated):
        return None
    return f"{chosen} is chosen on the rows of split test; eval_split, eval_dataset_name or val_set_size names others"


def _source(found: TokenizedRows) -> str:
    """The number, form and source of the rows, in one line."""
    left_out = f", {missing} left out" if (missing := len(found.rows) - len({*found.row_numbers})) else ""
    cut = f", {found.facts.cut} cut at max_seq_length" if found.facts.cut else ""
    return f"{count(len(found), 'row')} of {found.rows.form.name} from {found.rows.where}{left_out}{cut}"


def open_base(config: Config, processes: Processes, model_name: str | None = None) -> Base:
    """Load the base of a run. With `base_sharding` every process keeps a part of the layers: a collective.

    Args:
        model_name: a base in place of that of `config`.
    """
    layers = None
    if shares_layers(config, processes):
        layers = ShardedLayers(processes.device, autocast_dtype(config.mixed_precision))
        processes.follow = layers.follow
    name = model_name or config.model_name
    return load_base(name, config.model_dtype, processes.device, config.quantization, layers)


def shares_layers(config: Config, processes: Processes) -> bool:
    """True if each process stores a part of the base's layers."""
    return config.base_sharding == "layers" and processes.num_processes > 1


def _tokenized(
    config: Config, base: Base, processes: Processes, each: Sequence[Rows], *, evaluated: bool
) -> list[TokenizedRows]:
    """The rows of every agent as tokens; the same rows are tokenised once and stay one object."""

    embeddings = base.model.get_input_embeddings().weight.shape[0]

    def tokens(rows: Rows) -> TokenizedRows:
        tokenized = tokenize(
            rows,
            base.tokenizer,
            max_seq_length=config.max_seq_length,
            train_on_prompt=config.train_on_prompt and not evaluated,
            learn_preferred=learns_preferred(config, rows),
            **how_tokenized(config, base.model.config, base.tokenizer),
            evaluated=evaluated,
            main_process_first=processes.main_process_first(),
        )
        if rows.form.kind == "rated" and not rows.are_answers and not evaluated:
            require_both_classes(tokenized)
        # Some published tokenizers have tokens of pictures that no text holds, and the base has no embedding for.
        if len(base.tokenizer) > embeddings:
            tokenized.require_below(embeddings)
        return tokenized

    return once_each(each, tokens)


def learns_preferred(config: Config, rows: Rows) -> bool:
    """True if these rows are pairs of which the objective learns every token of the chosen row."""
    if rows.form.kind != "pairs" or rows.are_answers:
        return False
    return objective_of(config.objective, config.each_agent).needs.nll == "rows"


def require_both_classes(rows: TokenizedRows) -> None:
    """Refuse rated rows that all have one label.

    Raises:
        DataError: all rows have one label.
    """
    if rows.facts.good in (0, len(rows)):
        raise DataError(
            f"all {len(rows)} rows are {'good' if rows.facts.good else 'bad'}: nothing tells one from the other",
            where=f"{rows.rows.where}, label",
            hint="give rows of both kinds; answers that are all good are learned by objective=sft",
        )


#: The fewest rows of an evaluation: fewer tell nothing.
LEAST: Final = 50
#: Training reads at least this many times as many tokens as all evaluations together.
RATIO: Final = 3


def steps_of(config: Config, num_rows: Sequence[int], rows_per_step: int) -> int:
    """The steps of a run. Its epochs are those of the agent with the most rows: all agents take steps together.

    Args:
        num_rows: the number of rows of every agent that has its own, or of all.
        rows_per_step: the rows per step of all agents, or of each that has its own; fixed at step 1.
    """
    steps_per_epoch = max(-(-number // rows_per_step) for number in num_rows)
    # Rounded before it is rounded up: 0.1 x 30 is a little more than 3, and must not make a fourth step.
    by_epochs = math.ceil(round(config.epochs * steps_per_epoch, 6))
    return config.max_train_steps or max(1, by_epochs)


def _evaluations(config: Config, steps: int) -> int:
    return -(-steps // config.eval_steps) if config.eval_steps else 1


def eval_samples_of(config: Config, num_rows: Sequence[int], rows_per_step: int) -> int:
    """The rows of an evaluation, if all rows have the same length; for the arguments see `steps_of`."""
    steps = steps_of(config, num_rows, rows_per_step)
    read = steps * max(num_rows) // -(-max(num_rows) // rows_per_step)  # the last step of an epoch may be short
    return max(LEAST, read // (RATIO * _evaluations(config, steps)))


def tokens_of_evaluation(config: Config, each: Sequence[TokenizedRows], rows_per_step: int) -> int:
    """The most tokens of an evaluation, as a share of those that an agent trains on, in the mean of agents.

    Args:
        each: the training rows of every agent.
    """
    steps = steps_of(config, [len(own) for own in each], rows_per_step)
    read = sum(steps / -(-len(own) // rows_per_step) * own.facts.tokens for own in each) / len(each)
    return int(read) // (RATIO * _evaluations(config, steps))
