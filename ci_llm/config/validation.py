"""The combinations of values that cannot work (clashes), or that probably mean something else (notices)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ci_llm.config.foreign import NO_EFFECT
from ci_llm.config.own_keys import KeysOfEach
from ci_llm.core.measures import METRICS, measures_of
from ci_llm.core.remote import is_url, why_no_mirror
from ci_llm.core.run_folder import is_reserved


@dataclass(frozen=True)
class Clash:
    """Keys whose values exclude one another, and the way out."""

    keys: tuple[str, ...]
    what: str
    hint: str


def find_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Every combination that cannot work."""
    kinds = {c.lr_scheduler_type, *(own.get("lr_scheduler_type", c.lr_scheduler_type) for own in c.agents)}
    for kind in sorted(kinds & {"reduce_lr_on_plateau", "greedy"}):
        what = f"lr_scheduler_type {kind} follows the loss, not the step"
        yield Clash(("lr_scheduler_type",), what, "take cosine, linear or constant_with_warmup")
    if c.pass_per_agent is True and c.diversity != "none":
        what = f"diversity {c.diversity} has gradients through all agents, which one pass for all computes"
        yield Clash(("pass_per_agent", "diversity"), what, "set pass_per_agent to auto, or diversity to none")
    yield from _precision_clashes(c)
    yield from objective_clashes(c)
    yield from _data_clashes(c)
    yield from _mirror_clashes(c)
    for key in ("early_stopping_patience", "load_best_model_at_end"):
        if getattr(c, key) and c.eval_steps is None:
            yield Clash(
                (key, "eval_steps"), f"{key} compares evaluations, and eval_steps null makes none", "set eval_steps"
            )
    greater = METRICS[c.metric_for_best_model].greater
    if c.without_effect.get("greater_is_better") not in (None, greater):
        what = f"of {c.metric_for_best_model}, {'more' if greater else 'less'} is better"
        yield Clash(("greater_is_better", "metric_for_best_model"), what, "leave greater_is_better out")
    if c.restart_from is not None and c.overwrite_output_dir:
        yield Clash(
            ("restart_from", "overwrite_output_dir"),
            "restart_from goes back within the existing run, and overwrite_output_dir moves that run aside",
            "keep one of them; resume_from_checkpoint sets where a new run begins",
        )
    yield from _name_clashes(c.experiment_name or "")


def _name_clashes(name: str) -> Iterator[Clash]:
    """Names that no run can have: its folder stands in output_dir, where another run may have its own."""
    if "/" in name or name in (".", ".."):
        what = f"experiment_name {name!r} is a path; it names a folder inside output_dir"
        yield Clash(("experiment_name",), what, "write a plain name, and the path as output_dir")
    elif is_reserved(name):
        what = f"experiment_name {name!r} is a name that a run in output_dir gives to a part of its own"
        yield Clash(("experiment_name",), what, f"write another name, run_{name.lstrip('.')} for instance")


def _precision_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Values that model_dtype fp64 excludes."""
    if c.model_dtype == "fp64" and c.quantization:
        what = f"quantization {c.quantization} stores the weights in fewer bits than model_dtype fp64"
        yield Clash(("model_dtype", "quantization"), what, "set model_dtype to fp32, or quantization to null")
    if c.model_dtype == "fp64" and c.mixed_precision != "no":
        what = f"mixed_precision {c.mixed_precision} would undo model_dtype fp64"
        yield Clash(("model_dtype", "mixed_precision"), what, "set mixed_precision to no, or model_dtype to fp32")


def objective_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Values that only other objectives take."""
    if c.objective == "auto":
        return
    metrics = ("nll", "exact_match", *measures_of(c.objective).metrics)
    if c.metric_for_best_model not in metrics:
        what = f"an evaluation of objective {c.objective} has no {c.metric_for_best_model}"
        yield Clash(("metric_for_best_model", "objective"), what, f"take one of {', '.join(metrics)}")
    if c.num_labels is not None and c.objective in ("reward", "regression"):
        what = f"num_labels is about classes, and this is {c.objective}"
        yield Clash(("num_labels", "objective"), what, "num_labels=null")
    if c.reference == "start" and c.init_from is None:
        what = "agents begin as the base, unless init_from names adapters to start from"
        yield Clash(("reference", "init_from"), what, "reference=base, or init_from=FOLDER")
    yield from _reward_clashes(c)
    if c.objective == "sft":
        if c.text_column and c.answer_column:
            what = "answer_column beside text_column names labels, and objective sft learns none"
            yield Clash(("text_column", "answer_column"), what, "name text_column, or prompt_column with answer_column")
        return
    wrong = {
        "diversity": (c.diversity != "none", "its terms compare how agents predict the same tokens", "none"),
        "train_on_prompt": (c.train_on_prompt, "answers are compared or rated, and not prompts", "false"),
    }
    for key, (holds, why, usual) in wrong.items():
        if holds:
            what = f"{key} is for objective sft, and this is {c.objective}: {why}"
            yield Clash((key, "objective"), what, f"{key}={usual}")


def _reward_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """What the objective that draws completions lacks, and what others do not take."""
    if c.objective != "grpo":
        if any(own.beta == 0 for own in c.each_agent):
            what = f"beta 0 is for objective grpo, and this is {c.objective}"
            yield Clash(("beta", "objective"), what, "beta=0.1, or leave it out")
        return
    if c.base_sharding == "layers":
        what = "base_sharding layers takes the same passes on every process, and completions differ in length"
        hint = "base_sharding=none; model_dtype=bf16 or quantization=nf4 makes a base smaller that one device holds"
        yield Clash(("base_sharding", "objective"), what, hint)
    if not c.rewards:
        what = "objective grpo learns by rewards, and none is named"
        hint = "rewards=final_number, exact_match, regex:PATTERN, length or module:function, or a list of them"
        yield Clash(("objective", "rewards"), what, hint)
    if c.rewards and c.reward_weights and len(c.rewards) != len(c.reward_weights):
        what = f"reward_weights has {len(c.reward_weights)} for {len(c.rewards)} of rewards"
        yield Clash(("reward_weights",), what, "give each reward one weight")
    if c.reward_weights and not any(c.reward_weights):
        yield Clash(
            ("reward_weights",), "every weight is 0, so that nothing is learned", "give a reward another weight"
        )
    if c.loss_type and "bnpo" in c.loss_type:
        what = (
            "loss_type bnpo weighs tokens by the split into micro-batches and processes; over a whole step it is dapo"
        )
        yield Clash(("loss_type",), what, "loss_type=dapo, which is the default")
    if any(own.row_weights != "uniform" for own in c.each_agent):
        what = "row_weights bootstrap weighs rows to learn, and completions have advantages"
        yield Clash(("row_weights", "objective"), what, "row_weights=uniform")


def _mirror_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """A URL that does not name a mirror, or would put a secret into every log."""
    for key in ("mirror", "resume_from_checkpoint", "restart_from"):
        value = getattr(c, key)
        means_mirror = value is not None and (key == "mirror" or is_url(value))
        problem = why_no_mirror(value) if means_mirror else None
        if problem:
            yield Clash((key,), *problem)


def _data_clashes(c: KeysOfEach) -> Iterator[Clash]:
    """Keys about the data that exclude one another."""
    if c.has_own_rows and c.diversity != "none":
        what = f"diversity {c.diversity} compares agents on the same rows, and these train on different ones"
        yield Clash(("diversity",), what, "set diversity to none, or let all agents train on the same rows")
    if c.text_column and c.prompt_column:
        what = "text_column and prompt_column name two ways to read a row"
        yield Clash(("text_column", "prompt_column"), what, "name text_column, or prompt_column with answer_column")
    for key in ("eval_split", "eval_dataset_name"):
        if c.val_set_size and getattr(c, key) is not None:
            what = f"val_set_size holds out training rows, and {key} names others to evaluate on"
            yield Clash(("val_set_size", key), what, "leave one of them away")
    if c.val_set_size and c.val_set_size > 1 and not c.val_set_size.is_integer():
        what = f"val_set_size {c.val_set_size:g} is neither a share below 1 nor a number of rows"
        yield Clash(("val_set_size",), what, "write 0.05 for a twentieth of the rows, or 200 for 200 rows")


def find_notices(config: KeysOfEach) -> list[str]:
    """Lines to log once at the start: settings without effect, and those that probably mean something else."""
    ignored = [f"{name} has no effect: {why}" for name, why in NO_EFFECT.items() if name in config.without_effect]
    return [*ignored, *_doubtful(config)]


def _doubtful(c: KeysOfEach) -> Iterator[str]:
    if c.diversity == "none" and c.lambda_sw and _is_meant(c, "lambda_sw", "diversity"):
        yield (
            f"lambda_sw {c.lambda_sw:g} has no effect: it is the weight of the diversity term, and diversity is none,"
            " because no tested term made a better crowd (docs/crowd.md); lambda_sw=0 silences this line"
        )
    if c.diversity == "swd" and c.swd_representation == "first_token":
        yield "swd_representation first_token is the same in all rows: a causal model has read no other token there"
    if c.global_batch_size is not None and c.batch_size > c.global_batch_size:
        yield f"batch_size {c.batch_size} is never reached: global_batch_size is {c.global_batch_size}"
    if c.num_warmup_steps and c.max_train_steps and c.num_warmup_steps >= c.max_train_steps:
        yield "num_warmup_steps is as long as the run: learning_rate is never reached"


def _is_meant(c: KeysOfEach, key: str, by: str) -> bool:
    """True if `key` was given another value than its default, or any value while `by`, on which it depends, was not."""
    given = key in c.model_fields_set
    return given and (by not in c.model_fields_set or getattr(c, key) != type(c).model_fields[key].default)
