"""The crowd and one agent of the same compute on real rows: the answers of GSM8K, on a base that knows its questions.

    OMP_NUM_THREADS=1 python -m benchmarks.real_rows DATA --folder runs --rows 100 --seeds 42 43 44

DATA is a `save_to_disk` copy of GSM8K. The base, a Llama of 1.2 million parameters, and its tokenizer are made here, so
that nothing is downloaded: it is pretrained on the questions of the training split alone. The agents learn the answers
of the first rows, and are judged by the NLL of the answers of the test split, in nats per token. No such small model
solves a problem, so there is no exact match. Learning rates are compared with `--learning-rates`, on 300 rows of the
training split and with a seed that is used for nothing else. Runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from benchmarks.crowd import over_seeds, train
from benchmarks.gsm8k import LONGEST, texts, trained_tokenizer

VOCABULARY, WIDTH, LAYERS = 2048, 128, 4
PASSES, TEXTS_PER_STEP, RATE = 5, 32, 3e-3
SEED_OF_CHOICES = 7
SYSTEMS = {
    "the crowd": {"num_agents": "4", "max_train_steps": "100"},
    "one agent of 4x the steps": {"num_agents": "1", "max_train_steps": "400"},
}


def base(data: Path, folder: Path) -> Path:
    """The folder of the base; it is made if it is not there."""
    if (folder / "config.json").exists():
        return folder
    questions, answers = texts(data)
    words = {"unk_token": "<pad>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained_tokenizer([*questions, *answers], VOCABULARY), model_max_length=LONGEST, **words
    )
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LONGEST}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **shape, **heads, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), fused=True)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # which leaves padding out of the loss
    ids = [[1, *tokenizer(text)["input_ids"], 2][:LONGEST] for text in questions]
    steps = PASSES * len(ids) // TEXTS_PER_STEP
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    order = torch.cat([torch.randperm(len(ids)) for _ in range(PASSES)]).tolist()
    for step in range(steps):
        chosen = order[step * TEXTS_PER_STEP : (step + 1) * TEXTS_PER_STEP]
        loss = model(**collate([{"input_ids": ids[number]} for number in chosen])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"pretraining {step} of {steps}: {loss.item():.3f}", file=sys.stderr, flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def trained(name: str, keys: dict[str, str], folder: Path) -> dict[str, float]:
    """NLL of the agents' mean and of the crowd, from the run in `folder`, which is made if it is not there."""
    everything = {"batch_size": "8", "eval_samples": "null", "generation_eval_samples": "0"}
    train({**SYSTEMS[name], **everything, **keys}, folder)
    nll = json.loads((folder / "evaluation.json").read_text())["nll"]
    print(f"{folder.name} {name}: {nll}", file=sys.stderr, flush=True)
    return {"agents, mean": sum(nll["agents"]) / len(nll["agents"]), "crowd": nll["crowd"]}


def main() -> None:
    """Print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a save_to_disk copy of GSM8K")
    parser.add_argument("--folder", type=Path, required=True, help="for the base and the runs")
    parser.add_argument("--rows", type=int, default=100, help="training rows (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], help="default: 42 43 44")
    parser.add_argument("--rates", nargs=2, default=["1.6e-2", "1e-3"], help="of the crowd and of one agent")
    parser.add_argument("--learning-rates", nargs="+", default=[], help="compare these on rows of the training split")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    common = {"model_name": str(base(options.data, folder / "base")), "dataset_name": str(options.data.absolute())}
    common |= {"max_seq_length": str(LONGEST), "max_train_samples": str(options.rows)}
    if options.learning_rates:
        for name in SYSTEMS:
            for rate in options.learning_rates:
                own = {**common, "learning_rate": rate, "val_set_size": "300", "seed": str(SEED_OF_CHOICES)}
                found = trained(name, own, folder / f"{options.rows}" / "rates" / name.replace(" ", "_") / rate)
                print(f"{name} at {rate}: {found['crowd']:.4f}", flush=True)
        return
    print("| | NLL, nats per token |\n|---|---|")
    for (name, _), rate in zip(SYSTEMS.items(), options.rates, strict=True):
        own = {**common, "learning_rate": rate, "eval_split": "test"}
        place = folder / f"{options.rows}" / name.replace(" ", "_")
        found_each = [trained(name, {**own, "seed": str(seed)}, place / f"{seed}") for seed in options.seeds]
        if name == "the crowd":
            print(f"| agents, mean of 4 | {told([found['agents, mean'] for found in found_each])} |")
        print(f"| {name} | {told([found['crowd'] for found in found_each])} |", flush=True)


def told(values: list[float]) -> str:
    """Mean with a 95 % interval over seeds."""
    return over_seeds(torch.tensor(values, dtype=torch.float64), ".4f")


if __name__ == "__main__":
    main()
