"""The opening of an evaluation's parts: a saved crowd, the rows to evaluate on, and the questions in them.

The rows are those of the run's own evaluation, of another split, or of another data set.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.config import Config, load_config
from ci_llm.config.schema import with_trait
from ci_llm.core.run_folder import PREDICTIONS
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import find_reference
from ci_llm.crowd.next_token import num_positions
from ci_llm.crowd.objective import GrpoObjective, NextToken, TrainedObjective, objective_of
from ci_llm.crowd.pretrained import Pretrained, calibration_path, given_names, open_base, open_pretrained
from ci_llm.crowd.questions import Questions
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.rows import Rows, question_of
from ci_llm.data.sources import joined_sizes, load_rows
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.processes import OneProcess
from ci_llm.errors import BadInput, CiLlmError, ConfigError, DataError, OutOfMemory
from ci_llm.evaluation.evaluator import Evaluator
from ci_llm.objectives import SFT, head_size
from ci_llm.objectives.grpo.rewards import require_answers

logger = logging.getLogger(__name__)


#: Keys of the configuration that may be changed for an evaluation.
KEYS: Final = tuple(with_trait("evaluable"))
_COLUMNS: Final = tuple(key for key in KEYS if key.endswith("_column"))


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for an evaluation.

    Attributes:
        run: the folder of a run, a checkpoint, a saved crowd, a hub id, or a base alone.
        data: `embedded`, a hub id, a file, a glob or a folder; None for the rows of the run's evaluation.
        split: the split of the data set.
        max_samples: the most rows that are taken, evenly spread.
        keys: the keys of the configuration that are changed for this evaluation.
        metric: one of `ci_llm.crowd.metrics`; None for exact_match, and for the NLL on free text.
        batch_size: how many questions are answered at a time, and a quarter of the rows scored or rewarded at a time;
            None for the batch size of the training.
        output: the predictions file; None for `predictions.jsonl` in the folder of the run.
        overwrite: replace the predictions file, whatever it holds.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.
        calibrate: fit a calibration on the answers, and keep it beside the checkpoint.
        abstain_below: report the answers that remain if those with a lower probability of being right are not given.
    """

    run: str
    data: str | None = None
    split: str | None = None
    max_samples: int | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None
    batch_size: int | None = None
    output: Path | None = None
    overwrite: bool = False
    base_model: str | None = None
    calibrate: bool = False
    abstain_below: float | None = None

    @property
    def is_of_own_rows(self) -> bool:
        """True if these are the rows of the run's own evaluation, by its configuration."""
        return self.data is None and self.split is None and self.max_samples is None


def read_keys(words: Sequence[str]) -> dict[str, Any]:
    """The `key=value` words of a command line, as values of the configuration.

    Raises:
        ConfigError: one is not a key, has another type, or does not concern an evaluation.
    """
    given = load_config(None, words)
    if strange := sorted({*given.model_fields_set, *given.without_effect} - {*KEYS}):
        raise ConfigError(
            f"{', '.join(strange)} cannot be changed for an evaluation",
            where="command line",
            hint=f"these can: {', '.join(KEYS)}",
        )
    return {key: getattr(given, key) for key in given.model_fields_set}


def open_rows(config: Config | None, request: Request) -> tuple[Config, Rows]:
    """The configuration by which rows are read and answered, and the rows to evaluate on.

    Args:
        config: the configuration of the run; None if no run is known.

    Raises:
        DataError: there is no such data set or split, or none of its columns can be used.
        BadInput: no data set is named, and no run is known.
    """
    if config is None and request.data is None:
        raise BadInput(
            "no run of this program trained it: it does not say which rows it is evaluated on",
            where=request.run,
            hint="name a data set by --data",
        )
    wanted = (config or Config()).model_copy(update=_changes(request))
    try:
        return wanted, _loaded(wanted, request)
    except DataError as error:
        raise DataError(error.what, where=_as_options(error.where), hint=_as_options(error.hint)) from error


def _changes(request: Request) -> dict[str, Any]:
    changes = dict(request.keys)
    if request.data is not None:
        changes = {"eval_dataset_name": request.data, "eval_split": None, "eval_samples": None} | changes
        changes.setdefault("dataset_subset", None)  # the run's subset belongs to another data set
    if request.split is not None:
        changes |= {"eval_split": request.split, "val_set_size": None, "eval_samples": None}
    if request.max_samples is not None:
        changes["eval_samples"] = request.max_samples
    return changes


def _loaded(config: Config, request: Request) -> Rows:
    """The rows, read by the columns that the run names if the data has them, or else by those that are found."""
    named = [key for key in _COLUMNS if getattr(config, key) is not None]
    try:
        return load_rows(config, "eval")
    except DataError:
        if request.data is None or not named or {*named} & {*request.keys}:
            raise
        return load_rows(config.model_copy(update=dict.fromkeys(named)), "eval")


def _as_options(text: str | None) -> str | None:
    """A message with this command's options in place of the configuration's keys."""
    return text and text.replace("eval_dataset_name", "--data").replace("eval_split", "--split")


#: The most training rows with which rows to evaluate on are compared, because every one must be read.
COMPARED_AT_MOST = 200_000


@dataclass(frozen=True)
class Job:
    """The loaded parts of an evaluation.

    Attributes:
        names: the names of the agents, for people; empty for a base alone.
        evaluator: scores agents and crowd.
    """

    request: Request
    config: Config
    saved: Pretrained
    crowd: Crowd
    names: list[str]
    batch_size: int
    evaluator: Evaluator

    @property
    def tokenized(self) -> TokenizedRows:
        """The rows."""
        return self.evaluator.rows.sets[0]

    @property
    def questions(self) -> Questions:
        """The questions in the rows; none where heads or rewards judge."""
        return self.evaluator.questions[0]

    @property
    def is_rewarded(self) -> bool:
        """True if rewards judge the answers to prompts."""
        return self.tokenized.rows.form.kind == "prompts"


def default_output(checkpoint: Path | None) -> Path:
    """The predictions file in the folder of the run, where reports look for it, or in the present folder."""
    if checkpoint is None:
        return Path(PREDICTIONS)
    run = checkpoint.absolute().parent
    return (checkpoint.parent if (run / "status.json").is_file() else Path()) / PREDICTIONS


def load(request: Request, checkpoint: Path | None) -> Job:
    """Open the parts of an evaluation; `checkpoint` is None for a base alone."""
    saved = open_base(request.run) if checkpoint is None else open_pretrained(checkpoint, base_model=request.base_model)
    trained = saved.config
    if "objective" in request.keys and (trained is None or trained.objective != request.keys["objective"]):
        what = "this is not the objective that the agents were trained for"
        raise BadInput(
            what, where=f"objective={request.keys['objective']}", hint="give module:name as its config.yaml has it"
        )
    if "rewards" in request.keys and (trained is None or trained.objective != "grpo"):
        what = "rewards judge the answers of agents that learned by rewards, and these did not"
        hint = "leave it out: their answers are compared with those of the rows"
        raise BadInput(what, where=f"rewards={','.join(request.keys['rewards'] or ())}", hint=hint)
    config, rows = open_rows(trained, request)
    rows = _counting_copies(rows, trained)
    crowd = Crowd.of(saved)
    if reason := crowd.base_model.choose_route():
        logger.debug("rows are padded, not packed: %s", reason)
    if request.data is not None and "max_seq_length" not in request.keys:
        # The run's length limit concerns the rows of its training; the base's positions limit others.
        config = config.model_copy(update={"max_seq_length": num_positions(crowd.model)})
    tokenized = _tokenized(saved, rows, config)
    if crowd.settings.outputs:
        _require_no_answers(request, crowd)
    count = config.generation_eval_samples if request.is_of_own_rows else 0
    asks = not (crowd.settings.outputs or rows.form.kind == "prompts")  # heads and rewards judge otherwise
    questions = Questions.of(
        tokenized if asks else [],
        crowd,
        count or len(tokenized),
        tokenized.whole_below(config.max_seq_length),
        metric=request.metric or "exact_match",
        sets=_sets(tokenized) if asks and len({*config.evaluated_on}) > 1 else None,
    )
    preferences = []
    if asks and config.objective not in ("auto", SFT) and _has_reference(crowd, config, checkpoint):
        preferences = [_tokenized(saved, load_rows(config, "preferences"), config)]
    evaluator = Evaluator(
        config,
        crowd,
        EvaluationRows.of([tokenized] * crowd.num_agents),
        _objective(config, crowd, tokenized.rows) if preferences or rows.form.kind == "prompts" else NextToken(),
        preferences,
        OneProcess(),
        partial(_exhausted, request.run),
    )
    evaluator.questions = [questions]
    if request.metric and len(questions):
        evaluator.primary_metric = "exact_match"
    batch_size = request.batch_size or config.batch_size
    return Job(request, config, saved, crowd, given_names(saved.meta), batch_size, evaluator)


def _objective(config: Config, crowd: Crowd, rows: Rows) -> TrainedObjective:
    """The objective of the agents; a crowd from which agents were stopped has the keys of all."""
    if len(config.each_agent) != crowd.num_agents:
        config = config.model_copy(update={"agents": (), "num_agents": crowd.num_agents})
    found = objective_of(config, crowd)
    if isinstance(found, GrpoObjective):
        require_answers(found.rewards, rows.column_sets, config.answer_column, rows.where)
    return found


def _exhausted(run: str, _step: int, complaint: str) -> OutOfMemory:
    what = f"memory ran out with one row at a time: {complaint}"
    return OutOfMemory(what, where=run, hint="max_new_tokens_eval= or max_seq_length= lower")


def _has_reference(crowd: Crowd, config: Config, checkpoint: Path | None) -> bool:
    """True if the reference of the training is available; otherwise a warning says why not."""
    if config.reference == "base" or config.init_from is None or checkpoint is None:
        return config.reference == "base"
    prints: Any = read_manifest(checkpoint).info.get("fingerprints", {})
    try:
        find_reference(crowd, Path(config.init_from), prints.get("start", ""))
    except CiLlmError as error:
        logger.warning(f"answers are not ranked, as the agents' start is missing: {error.what} ({error.where})")
        return False
    return True


def _sets(tokenized: TokenizedRows) -> list[range]:
    """The numbers of each set's rows, which follow one another, where agents have sets of their own."""
    ends = [bisect_left(tokenized.row_numbers, end) for end in accumulate(joined_sizes(tokenized.rows))]
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _counting_copies(rows: Rows, trained: Config | None) -> Rows:
    """The rows with the number of those that the run was trained on, as far as its data can be read."""
    if trained is None or rows.num_trained_on:
        return rows
    try:
        training = replace(load_rows(trained, "train"), are_answers=not head_size(trained))
        if len(training) > COMPARED_AT_MOST:
            logger.warning(f"copies of rows to train on are not looked for: there are {len(training)} of these")
            return rows
        return rows.counting_copies_of(training)
    except DataError as error:
        logger.warning(f"copies of rows to train on cannot be found: {error.what}")
        return rows


def _require_no_answers(request: Request, crowd: Crowd) -> None:
    """Refuse options about answers for agents with heads, and about probabilities unless the heads give classes."""
    given: dict[str, object] = {"--metric": request.metric, "--output": request.output}
    if not crowd.classes:
        given |= {"--abstain-below": request.abstain_below, "--calibrate": request.calibrate or None}
    if odd := [option for option, value in given.items() if value is not None]:
        raise BadInput(
            "these agents have heads, and write no answers"
            if crowd.classes
            else "these agents have heads that give no probabilities, and write no answers",
            where=", ".join(odd),
            hint="leave it out; ci-llm score RUN --file F writes what they say about every text",
        )


def _tokenized(saved: Pretrained, rows: Rows, config: Config) -> TokenizedRows:
    try:
        return saved.tokenized(rows, config)
    except DataError as error:
        what = error.what.replace("to learn from", "to evaluate")
        raise DataError(what, where=error.where, hint=error.hint) from error


def refuse_unanswerable(job: Job) -> None:
    """Refuse rows with questions of which none fits, as teacher-forced figures alone would be misread.

    For plain text, refuse the options that need answers.
    """
    if any(question_of(row) is not None for row in job.tokenized.rows):
        raise DataError(
            f"none of {len(job.tokenized)} rows has place for its answer within {job.config.max_seq_length} tokens",
            where=job.tokenized.rows.where,
            hint="shorten the rows, or raise max_seq_length= up to the positions of the base",
        )
    if job.request.calibrate or job.request.output is not None:
        what = "plain text has no answers: neither is there anything to calibrate on, nor are there predictions"
        raise BadInput(what, where="--calibrate, --output", hint="leave both out")


def require_new_rows(job: Job) -> None:
    """Refuse to calibrate on rows that were all trained on, or whose answers are neither right nor wrong."""
    if job.evaluator.primary_metric == "nll" and len(job.questions):
        raise BadInput(
            "these rows are free text, whose answers are neither right nor wrong",
            where=f"--calibrate: {job.tokenized.rows.where}",
            hint="rows with short answers; or --metric exact_match, which compares the whole texts",
        )
    if job.tokenized.rows.trained_on == "all":
        raise BadInput(
            "these rows were trained on: they show how sure the crowd is of what it remembers",
            where=f"--calibrate: {job.tokenized.rows.where}",
            hint="--split validation, or other rows by --data",
        )


def require_place(checkpoint: Path | None) -> Path:
    """The path for a new calibration. Raises BadInput if this is not a checkpoint in the folder of a run."""
    path = None if checkpoint is None else calibration_path(checkpoint)
    if path is None:
        raise BadInput(
            "a calibration is kept in the folder of a run, and this is not a checkpoint of a run",
            where=f"--calibrate {checkpoint}",
            hint="calibrate the run before you export it: an export includes the calibration",
        )
    return path
