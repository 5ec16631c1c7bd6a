"""What a run leaves for people: the table at its end, the model card, what to do next, report.html."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci_llm.config import Config, default_file
from ci_llm.report.page import write_report

if TYPE_CHECKING:
    from ci_llm.run.context import Run

logger = logging.getLogger(__name__)


def score_table(record: Mapping[str, Any]) -> str:
    """Agents beside the crowd, from an `evaluation.json`."""
    exact, nll = record["exact_match"], record["nll"]
    lines = [f"{'':<14}{'exact match':>12}{'nll':>10}"]
    for k, (match, loss) in enumerate(zip(exact["agents"], nll["agents"], strict=True)):
        lines.append(f"{f'agent{k}':<14}{match:>12.3f}{loss:>10.4f}")
    count = len(exact["agents"])
    lines.append(f"{'agents, mean':<14}{sum(exact['agents']) / count:>12.3f}{sum(nll['agents']) / count:>10.4f}")
    lines.append(f"{'crowd':<14}{exact['crowd']:>12.3f}{nll['crowd']:>10.4f}")
    if "vote" in exact:
        lines.append(f"{'majority vote':<14}{exact['vote']:>12.3f}")
    for name, key in (("agents' mean", "crowd_minus_mean"), ("best agent", "crowd_minus_best")):
        gain = exact[key]
        lines.append(f"crowd - {name}: {gain['value']:+.3f} ± {gain['interval95']:.3f}")
    what = "final answers, generated" if record["measured_by"] == "generation" else "whole solutions, teacher-forced"
    lines.append(f"exact match of {what}, over {record['n']} held-out rows; ± is a 95 % interval, paired over rows")
    return "\n".join(lines)


def model_card(record: Mapping[str, Any], base_name: str, dataset: str, step: int, folder: Path) -> str:
    """README.md of `final_checkpoint`, with the front matter that the hub reads."""
    count = len(record["exact_match"]["agents"])
    hub = "" if Path(base_name).is_absolute() else f"base_model: {base_name}\n"
    return f"""---
library_name: peft
{hub}tags:
- lora
- ensemble
- ci-llm
---

# A crowd of {count} LoRA agents

{count} LoRA adapters, trained together by [CI-LLM] for {step} optimizer steps on `{dataset}`, on one frozen base:
`{base_name}`. They are meant to answer together: the crowd's distribution is the mean of theirs.

```
{score_table(record)}
```

Each `agent<k>` is a plain PEFT adapter:

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base_name!r})
agent = PeftModel.from_pretrained(base, {str(folder / "agent0")!r})
```

The folder is also a complete checkpoint: `resume_from_checkpoint` takes it.
"""


def next_steps(config: Config, command: Callable[[Mapping[str, str | None]], str]) -> list[str]:
    """What a person may want to do after a completed run.

    Args:
        command: what starts a run like this one with changed keys; None for a key that is left out.
    """
    folder, drawn = config.run_folder, config.run_folder / "tensorboard"
    longer = command({"epochs": None, "max_train_steps": "..."})
    return [
        f"adapters   {folder / 'final_checkpoint'}/agent<k>, plain PEFT",
        *([f"curves     tensorboard --logdir {drawn}"] if drawn.is_dir() else []),
        f"longer     {longer}   goes on from here",
        f"own data   {command(_with_own_data(config))}   with columns question, answer",
    ]


def _with_own_data(config: Config) -> dict[str, str | None]:
    """What changes for a fresh run on somebody's own rows; the toy base gives way to one that can learn from them."""
    changes: dict[str, str | None] = {"continue": None, "resume_from_checkpoint": None}
    if config.model_name == "embedded":
        preset = default_file("configs/qwen2.5_0.5b_gsm8k.yaml")
        base = {"config": str(preset)} if preset else {"model_name": "..."}
        changes |= {"config": None, "model_name": None, **base}
    defaults = Config()
    for key in ("dataset_subset", "dataset_split", "eval_split", "max_train_samples"):
        value, default = getattr(config, key), getattr(defaults, key)
        changes[key] = None if value == default or changes.get("config") else str(default or "null")
    return {**changes, "dataset_name": "my.jsonl", "experiment_name": "mine"}


def leave_page(run: Run) -> None:
    """Write report.html where matplotlib is installed, as the last act of an attempt. It never fails the run.

    A run that was told to end has a grace. The page takes a second or two, and is left out when a third of the grace is
    over: to leave in time is worth more, and `ci-llm report RUN` writes the page later.
    """
    config, told_at = run.config, run.interrupts.stop_requested_at
    grace_s = min(config.grace_s, run.processes.launch.patience_s)
    if told_at is not None and time.monotonic() - told_at > grace_s / 3:
        return
    if not (
        config.write_report and run.processes.is_main and find_spec("matplotlib") and run.manager.store.still_held()
    ):
        return
    try:
        page = write_report(config.run_folder)
    except Exception as error:  # noqa: BLE001 - whatever a drawing library raises, the work of the run is done
        logger.warning(f"report.html was not written: {type(error).__name__}: {error}")
    else:
        logger.info(f"report     {page}")
