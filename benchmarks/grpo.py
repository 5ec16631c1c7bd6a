"""Do agents learn by checked rewards, and what does a step of GRPO cost beside TRL's? One thread.

    python -m benchmarks.grpo --parts learns --seeds 42 43 44
    python -m benchmarks.grpo --parts cost --rounds 5
    python -m benchmarks.grpo --parts real --steps 24 --rates 1e-5 1e-4 3e-4 1e-3

All but `real` is on the embedded base.

learns  K = 4 agents take a short SFT on 100 rows. From there they go on in two ways, on the 1,400 other prompts of the
        training split: GRPO with the reward `final_number`, and SFT on the answers for as many CPU seconds. Answers to
        held-out prompts are greedy; the reward is the share whose last number is right. `--split validation` is for
        choices of a rate.
cost    the four agents in one run here, against four runs of TRL's GRPOTrainer that begin with the same adapters: the
        same 8 prompts in every step, 8 completions of each, the same reward function. A step is what lies between
        two calls of that function, so neither start nor end of a run counts. The rate is so small that the agents, and
        so the lengths of their completions, stay as they are.

resume  runs of four steps in two epochs are called again from each of their checkpoints. How far are the
        final weights from those of the run that was not interrupted?

real    SmolLM2-135M-Instruct (`python -m tools.real_base` fetches it) names the module of a docstring. An agent takes a
        short SFT on 64 rows; four that begin as this one go on with the prompts of the other rows and the reward
        `exact_match`, in one job, each with a rate of its own. Held-out answers are greedy.

TRL is one of the development packages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import ci_llm
from benchmarks.crowd import BARE, over_rows, over_seeds
from benchmarks.harness import median_and_range, turn
from ci_llm.crowd.crowd import Crowd
from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.objectives.grpo.rewards import last_number

PARTS: Final = ("learns", "cost", "resume", "real")
K, SFT_ROWS, SFT_STEPS = 4, 100, 60
PROMPTS, GENERATIONS, LONGEST = 8, 8, 40  # of a step; of a prompt; tokens of a completion
LEARNED_FROM: Final = 16  # prompts of a step that is to teach
COMMON: Final = {**BARE, "eval_samples": 1, "num_workers": 0, "num_agents": K, "eval_dataset_name": "embedded"}
#: CPU seconds of this process at every call of `clocked`, with the number of completions and of their tokens.
CALLS: list[tuple[float, int, int]] = []


def clocked(completions: Sequence[str], completion_ids: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """The reward `final_number`, which notes when it is called."""
    CALLS.append((time.process_time(), len(completions), sum(map(len, completion_ids))))
    return [float(last_number(own) == last_number(want)) for own, want in zip(completions, answer, strict=True)]


def train(folder: Path, **keys: Any) -> float:
    """CPU seconds of a run."""
    began = time.process_time()
    ci_llm.train({**COMMON, **keys}, output_dir=folder)
    return time.process_time() - began


def sft(folder: Path, seed: int) -> float:
    """CPU seconds of the SFT that comes first."""
    return train(folder, max_train_samples=SFT_ROWS, max_train_steps=SFT_STEPS, batch_size=12, seed=seed)


def grpo(folder: Path, start: Path, prompts: Path, **keys: Any) -> float:
    """CPU seconds of GRPO by the agents of another run."""
    return train(
        folder, objective="grpo", init_from=start / "final_checkpoint", dataset_name=prompts,
        num_generations=GENERATIONS, max_completion_length=LONGEST, **{"batch_size": PROMPTS, **keys},
    )  # fmt: skip


def written(file: Path, some: Sequence[dict[str, str]]) -> Path:
    """A file of these rows."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in some), encoding="utf-8")
    return file


# Do they learn?


@dataclass(frozen=True)
class Learned:
    """The results of one seed.

    Attributes:
        rewards: by way, [2] the reward of held-out greedy answers: the agents' mean, and the crowd's.
        cpu_s: by way, of its training; without SFT, which comes first.
    """

    rewards: dict[str, Tensor]
    cpu_s: dict[str, float]


def score(run: Path, held_out: Sequence[dict[str, str]]) -> Tensor:
    """[2] the reward of greedy answers: the agents' mean, and the crowd's."""
    crowd = Crowd.from_pretrained(run)
    said = crowd.generate([row["question"] for row in held_out], max_new_tokens=LONGEST, batch_size=50, details=True)
    right = [
        [float(last_number(text) == last_number(row["answer"])) for text in (*answer.agents, answer.answer)]
        for row, answer in zip(held_out, said, strict=True)
    ]
    of_each = torch.tensor(right, dtype=torch.float64).mean(0)
    return torch.stack([of_each[:-1].mean(), of_each[-1]])


def learn(seed: int, folder: Path, steps: int, rate: str, sft_rate: str, held_out: Sequence[dict[str, str]]) -> Learned:
    """SFT, then GRPO, and beside it more SFT for as many CPU seconds."""
    prompts = written(folder / "prompts.jsonl", rows("train")[SFT_ROWS:])
    before, after, beside = (folder / f"{name}_{seed}" for name in ("sft", "grpo", "more_sft"))
    sft_s = sft(before, seed)
    cpu_s = {"GRPO": grpo(after, before, prompts, rewards="final_number", max_train_steps=steps, learning_rate=rate,
                          batch_size=LEARNED_FROM, seed=seed)}  # fmt: skip
    as_long = max(1, round(SFT_STEPS * cpu_s["GRPO"] / sft_s))
    cpu_s["SFT on answers"] = train(
        beside, init_from=before / "final_checkpoint", dataset_name=prompts, batch_size=12, max_train_steps=as_long,
        learning_rate=sft_rate, seed=seed,
    )  # fmt: skip
    runs = {"before": before, "GRPO": after, "SFT on answers": beside}
    found = Learned({name: score(run, held_out) for name, run in runs.items()}, cpu_s)
    shown = {name: [round(float(x), 4) for x in of_both] for name, of_both in found.rewards.items()}
    print(f"seed {seed}: {shown}, CPU s {cpu_s}, {as_long} steps of SFT", flush=True)
    return found


def learned_table(found: Sequence[Learned]) -> str:
    """Means over seeds, and the changes paired by seed, with Student's 95 % intervals."""
    lines = ["| | CPU s | agents, mean | change | crowd | change |", "|---|---|---|---|---|---|"]
    before = torch.stack([one.rewards["before"] for one in found])
    for name in found[0].rewards:
        own = torch.stack([one.rewards[name] for one in found])
        cost = f"{statistics.mean(one.cpu_s[name] for one in found):.0f}" if name in found[0].cpu_s else ""
        cells = [name, cost]
        for who in (0, 1):
            change = "" if name == "before" else over_seeds(own[:, who] - before[:, who], "+.3f").replace("± +", "± ")
            cells += [over_seeds(own[:, who], ".3f"), change]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# What does a step cost?


@dataclass(frozen=True)
class Steps:
    """CPU seconds of a step and policy, and tokens of a completion."""

    cpu_s: float
    tokens: float


def _steps(calls_per_step: int, steps: int, policies: int) -> Steps:
    calls = CALLS[: calls_per_step * (steps + 1)]  # later ones are of an evaluation
    marks = [at for at, _, _ in calls[::calls_per_step]]
    return Steps((marks[-1] - marks[0]) / steps / policies, sum(c[2] for c in calls) / sum(c[1] for c in calls))


def ours(folder: Path, start: Path, prompts: Path, steps: int) -> Steps:
    """A run of K policies; a group of completions is a call."""
    CALLS.clear()
    grpo(folder, start, prompts, rewards="benchmarks.grpo:clocked", max_train_steps=steps + 1, learning_rate=1e-6)
    return _steps(K * PROMPTS, steps, K)


def trainer_of_trl(folder: Path, start: Path, agent: int, num_rows: int, **arguments: Any) -> Any:
    """A GRPOTrainer that goes on with an agent."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.use_deterministic_algorithms(False)  # our run has asked for them, which may cost others time
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    asked = [{"prompt": f"{tokenizer.bos_token}{row['question']}\n", "answer": row["answer"]} for row in rows("train")]
    common: dict[str, Any] = {
        "num_generations": GENERATIONS, "max_completion_length": LONGEST, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, start / "final_checkpoint" / f"agent{agent}", is_trainable=True)
    some = Dataset.from_list(asked[SFT_ROWS:][:num_rows])
    how = GRPOConfig(str(folder), **{**common, **arguments})
    return GRPOTrainer(policy, clocked, how, train_dataset=some, processing_class=tokenizer)


def trl(folder: Path, start: Path, steps: int) -> Steps:
    """K runs of GRPOTrainer, the mean; all completions of a step are a call."""
    each = []
    for k in range(K):
        trainer = trainer_of_trl(
            folder, start, k, PROMPTS, per_device_train_batch_size=PROMPTS * GENERATIONS, max_steps=steps + 1,
            learning_rate=1e-6,
        )  # fmt: skip
        CALLS.clear()
        trainer.train()
        each.append(_steps(1, steps, 1))
    return Steps(statistics.mean(one.cpu_s for one in each), statistics.mean(one.tokens for one in each))


def cost(folder: Path, rounds: int, steps: int) -> dict[str, list[Steps]]:
    """Both in turns, `steps` steps in each round."""
    start, prompts = folder / "start", written(folder / "few.jsonl", rows("train")[SFT_ROWS:][:PROMPTS])
    sft(start, 42)
    found: dict[str, list[Steps]] = {"ours": [], "TRL": []}
    for number in range(rounds):
        for name in turn([*found], number):
            own = folder / f"{name}_{number}"
            found[name].append(ours(own, start, prompts, steps) if name == "ours" else trl(own, start, steps))
            print(f"round {number + 1}: {name} {found[name][-1]}", flush=True)
    return found


def cost_table(found: dict[str, list[Steps]]) -> str:
    """Medians over rounds, and the ratio paired by round."""
    lines = ["| | CPU s per step and policy | tokens of a completion | times ours |", "|---|---|---|---|"]
    for name, each in found.items():
        ratio = median_and_range([a.cpu_s / b.cpu_s for a, b in zip(each, found["ours"], strict=True)])
        medians = [statistics.median(x) for x in ([one.cpu_s for one in each], [one.tokens for one in each])]
        lines.append(f"| {name} | {medians[0]:.3f} | {medians[1]:.1f} | {'1' if name == 'ours' else ratio} |")
    return "\n".join(lines)


# Does a resume end with the same weights?

IN_STEP, IN_EPOCH, EPOCHS = 2, 2, 2  # prompts; steps


def resumed_by_trl(folder: Path, start: Path) -> list[float]:
    """For each checkpoint, the largest difference of final weights."""

    def final(begin: str | None) -> list[Tensor]:
        trainer = trainer_of_trl(
            folder, start, 0, IN_STEP * IN_EPOCH, per_device_train_batch_size=IN_STEP * GENERATIONS,
            num_train_epochs=EPOCHS, learning_rate=1e-3, save_strategy="steps", save_steps=1,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=begin)
        return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]

    whole = final(None)
    kept = Path(shutil.copytree(folder, f"{folder}_kept"))
    each = [final(str(kept / f"checkpoint-{step}")) for step in range(1, IN_EPOCH * EPOCHS)]
    return [max(float((a - b).abs().max()) for a, b in zip(whole, one, strict=True)) for one in each]


def resumed_by_us(folder: Path, start: Path) -> list[float]:
    """The same of a run here."""
    prompts = written(folder.with_suffix(".jsonl"), rows("train")[SFT_ROWS:][: IN_STEP * IN_EPOCH])

    def final(run: Path) -> Tensor:
        grpo(
            run, start, prompts, rewards="final_number", batch_size=IN_STEP, learning_rate=1e-3,
            max_train_steps=IN_EPOCH * EPOCHS, save_steps=1, save_total_limit=None,
        )  # fmt: skip
        return Crowd.from_pretrained(run).storage.weights.detach().clone()

    whole, each = final(folder), list[float]()
    for step in range(1, IN_EPOCH * EPOCHS):
        run = Path(shutil.copytree(folder, f"{folder}_{step}"))
        shutil.rmtree(run / "final_checkpoint")
        for later in range(step + 1, IN_EPOCH * EPOCHS + 1):
            shutil.rmtree(run / f"checkpoint_step_{later}", ignore_errors=True)
        each.append(float((final(run) - whole).abs().max()))
    return each


def resume_table(folder: Path) -> str:
    """Of both the difference for each checkpoint."""
    start = folder / "begin"
    sft(start, 42)
    found = {"ours": resumed_by_us(folder / "own", start), "TRL": resumed_by_trl(folder / "trl", start)}
    steps = range(1, IN_EPOCH * EPOCHS)
    lines = [f"| resumed after step | {' | '.join(map(str, steps))} |", f"|---{'|---' * len(steps)}|"]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(f'{x:.1e}' for x in each)} |" for name, each in found.items())]
    )


# Which rate on a real base?

REAL: Final = Path("configs/smollm2_135m.yaml")
DOCSTRINGS: Final = Path("configs/data/docstrings")
REAL_ROWS, REAL_SFT_STEPS, REAL_LONGEST = 64, 8, 12  # of SFT; of 16 rows; tokens of a completion


def real_run(folder: Path, seed: int, **keys: Any) -> Path:
    """A run on the real base; returns its folder."""
    few = {**BARE, "eval_samples": 1, "eval_dataset_name": DOCSTRINGS, "row_weights": "uniform", "logging_steps": 1}
    ci_llm.train(REAL, **{**few, "seed": seed, "output_dir": folder, **keys})
    return folder


def right_answers(run: Path, held_out: Sequence[dict[str, str]]) -> Tensor:
    """[K, rows] 1 where the greedy answer of an agent is right."""
    crowd = Crowd.from_pretrained(run)
    said = crowd.generate(
        [row["question"] for row in held_out], max_new_tokens=REAL_LONGEST, batch_size=50, details=True
    )
    texts = [answer.agents if crowd.num_agents > 1 else [answer.answer] for answer in said]
    right = [[float(text.strip() == row["answer"]) for text in own] for own, row in zip(texts, held_out, strict=True)]
    return torch.tensor(right, dtype=torch.float64).T


def learn_on_real_base(folder: Path, seed: int, steps: int, rates: Sequence[str], num_rows: int) -> str:
    """A line for the agent after SFT and for each rate, with 95 % intervals over rows, changes paired by row."""
    train_rows, held_out = (
        [json.loads(line) for line in (DOCSTRINGS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in ("train", "test")
    )
    prompts, held_out = written(folder / "others.jsonl", train_rows[REAL_ROWS:]), held_out[:num_rows]
    sft = {"num_agents": 1, "max_train_samples": REAL_ROWS, "max_train_steps": REAL_SFT_STEPS, "learning_rate": 1e-3}
    before_run = real_run(folder / f"real_sft_{seed}", seed, **sft)
    [before] = right_answers(before_run, held_out)
    print(f"seed {seed}: before {before.mean():.3f}", flush=True)
    run = real_run(
        folder / f"real_grpo_{seed}", seed, objective="grpo", rewards="exact_match", dataset_name=prompts,
        init_from=before_run / "final_checkpoint" / "agent0", num_agents=len(rates), learning_rate=[*map(float, rates)],
        num_generations=GENERATIONS, max_completion_length=REAL_LONGEST, batch_size=PROMPTS, max_train_steps=steps,
    )  # fmt: skip
    lines = ["| rate | exact match | change |", "|---|---|---|", f"| SFT | {before.mean():.3f} | |"]
    for rate, after in zip(rates, right_answers(run, held_out), strict=True):
        change = after - before
        lines.append(f"| {rate} | {after.mean():.3f} | {change.mean():+.3f} ± {over_rows(change):.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print a markdown table of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS[:3]], help="default: all but real")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], help="default: 42 43 44")
    parser.add_argument("--steps", type=int, help="of GRPO (default: 80; 24 on the real base), or of a round (3)")
    parser.add_argument("--rate", default="1e-3", help="of GRPO (default: 1e-3)")
    parser.add_argument("--sft-rate", default="8e-3", help="of SFT on the other rows (default: 8e-3)")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="held-out rows (default: test)")
    parser.add_argument("--rows", type=int, default=1000, help="held-out rows (default: 1000)")
    parser.add_argument("--rates", nargs="+", default=["1e-5", "1e-4", "3e-4", "1e-3"], help="of the agents of real")
    parser.add_argument("--rounds", type=int, default=5, help="of cost (default: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "learns" in options.parts:
            held_out = rows(options.split)[: options.rows]
            how = (folder, options.steps or 80, options.rate, options.sft_rate, held_out)
            print(learned_table([learn(seed, *how) for seed in options.seeds]))
        if "cost" in options.parts:
            print(cost_table(cost(folder, options.rounds, options.steps or 3)))
        if "resume" in options.parts:
            print(resume_table(folder))
        for seed in options.seeds if "real" in options.parts else ():
            print(learn_on_real_base(folder, seed, options.steps or 24, options.rates, options.rows))


if __name__ == "__main__":  # the reward is imported by name: one module has to hold its calls
    importlib.import_module("benchmarks.grpo").main()
