"""The configuration of a run: one flat, frozen `Config`, read from YAML and the command line, strictly."""

from __future__ import annotations

from pathlib import Path

from ci_llm.config_keys import (
    AgentKeys,
    BaseModelKeys,
    CheckpointKeys,
    DataKeys,
    DeclinedKeys,
    EvaluationKeys,
    InterruptionKeys,
    LogKeys,
    ObjectiveKeys,
    RecoveryKeys,
    TrainingKeys,
)


class Config(
    DeclinedKeys,
    RecoveryKeys,
    InterruptionKeys,
    CheckpointKeys,
    LogKeys,
    EvaluationKeys,
    TrainingKeys,
    DataKeys,
    ObjectiveKeys,
    AgentKeys,
    BaseModelKeys,
):
    """All keys of a run. Bases are listed last to first, because pydantic collects their fields in that order."""

    @property
    def run_folder(self) -> Path:
        """`output_dir`, or its sub-folder `experiment_name`."""
        return Path(self.output_dir, self.experiment_name or "")
