"""The keys about a run's course: evaluation, logs, checkpoints, interruption. They change nothing learned."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from ci_llm.config.key import (
    AutoLimit,
    Backend,
    Count,
    Keys,
    Metric,
    PathText,
    Positive,
    Seconds,
    Size,
    Text,
    Trackers,
    ending,
    free,
    rounding,
)


class EvaluationKeys(Keys):
    """Evaluation"""

    eval_steps: Count | None = free(100, "evaluate every n optimizer steps; null: at the end only")
    eval_samples: AutoLimit = free(
        "auto",
        "rows of each evaluation; null: all; auto: 400 on the embedded base, else at least 50, up to a third of"
        " the training tokens",
    )
    generation_eval_samples: Size = free(100, "of these, rows that agents and crowd answer at the end; 0: none")
    max_new_tokens_eval: Count | Literal["auto"] = free(
        "auto",
        "tokens of a generated answer at most; auto: twice those of the longest reference, at least 16; on"
        " the embedded base 256",
        evaluable=True,
    )
    early_stopping_patience: Count | None = ending(
        None,
        "end after n evaluations in a row that did not improve the crowd",
        no_sweep=("it looks at the crowd, and trials are single agents", "rungs end the losers"),
    )
    metric_for_best_model: Metric = ending(
        "nll",
        "measure of the crowd by which an evaluation is best: nll, exact_match, or one of the objective"
        " (docs/objectives.md)",
    )
    load_best_model_at_end: bool = free(
        False,
        "make final_checkpoint of the best step",
        no_sweep=("it looks at the crowd, and trials are single agents", "leave it out"),
    )


class LogKeys(Keys):
    """Output and logs"""

    output_dir: PathText = free("ci_llm_output", "folder of the run", place=True)
    experiment_name: Text | None = free(
        None, "sub-folder of output_dir for this run; null: output_dir itself", place=True
    )
    logging_steps: Count = free(10, "log every n optimizer steps")
    report_to: Trackers = free(("tensorboard",), "trackers: none, tensorboard, wandb, mlflow, trackio, or a list")
    monitor_gpu: bool = free(False, "write the load of the GPUs to gpu_stats.json while training")


class CheckpointKeys(Keys):
    """Checkpoints"""

    save_steps: Count | None = free(100, "save every n optimizer steps; null: off")
    save_interval_seconds: Seconds | None = free(300.0, "save every n seconds; null: off")
    save_total_limit: Count | None = free(3, "newest checkpoints that are kept; null: all")
    resume_from_checkpoint: PathText | None = free(
        "latest",
        "where the run begins: latest, a checkpoint, the folder of a run, or null for a fresh start; later starts"
        " refuse another value",
        no_sweep=(
            "trials resume from where the sweep left them",
            "leave it out; init_from=FOLDER starts all trials from adapters",
        ),
        place=True,
    )
    restart_from: PathText | None = free(
        None,
        "go back, once, to this step of the run or this checkpoint",
        no_sweep=("trials resume from where the sweep left them", "leave it out"),
    )
    overwrite_output_dir: bool = free(
        False,
        "begin a new run, once, where another one is; that one moves to the sub-folder overwritten",
        no_sweep=("a sweep moves nothing aside", "write experiment_name=NAME for a new sweep"),
    )
    allow_inexact_resume: bool = free(
        False, "resume with a changed configuration or data, although the run will not be the same"
    )
    deterministic: bool | Literal["auto"] = rounding(
        "auto", "deterministic algorithms; auto: wherever they exist", recorded=True
    )
    checkpoint_backend: Backend = free(
        "vanilla", "vanilla: process 0 writes; distributed: every process writes its part"
    )
    mirror: Text | None = free(
        None,
        "object store that gets every checkpoint, as s3://bucket/prefix, and fills an empty disk",
        no_sweep=("a mirror holds one run, and a sweep has many", "leave it out, or copy the folder of the sweep"),
    )
    mirror_max_mb_per_s: Positive | None = free(None, "megabytes per second that the mirror may take")
    push_to_hub: bool = free(
        False,
        "publish the result on the Hugging Face Hub when the run is complete",
        no_sweep=("a sweep has many runs", "leave it out, and push the best one afterwards"),
    )
    hub_model_id: Text | None = free(
        None, "repository for push_to_hub, as user/name or name; null: the name of the run's folder"
    )


class InterruptionKeys(Keys):
    """Interruption, walltime, SLURM"""

    grace_s: Seconds = free(30.0, "seconds between a signal and the kill, if SLURM does not tell")
    max_runtime: Seconds | None = free(None, "save and end before n seconds, 1h30m or HH:MM:SS have passed")
    requeue: bool | Literal["auto"] = free("auto", "ask SLURM to run an interrupted job again; auto: if allowed")
    interrupted_exit_code: Annotated[int, Ge(0), Le(255)] = free(0, "exit code after a clean interruption")
