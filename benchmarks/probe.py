"""Whether hidden states tell wrong answers that probabilities do not: a linear probe, fitted on validation rows.

    python -m benchmarks.probe [RUN]

RUN is a run on the embedded task. Its crowd answers the 320 validation rows and the 1,000 test rows, and then reads
every prompt with its answer once more. The probe is a logistic function of the five signals of a calibration and of
the mean of the agents' hidden states at half depth, at four places: over the prompt, at its last token, over the
answer, and at its last token. It is fitted on what the crowd and each agent have answered to the validation rows.
Printed are, for the signals alone and for the probe, the AUROC of wrong answers among the test rows and exact match of
the surest 80 %. Depth, places and penalty were chosen on 1,000 other rows (`task_rows(777, 1000)`).

Sources: Azaria and Mitchell, "The Internal State of an LLM Knows When It's Lying", 2023; Kadavath et al., "Language
Models (Mostly) Know What They Know", 2022.

Legend: K agents, n answers, D hidden width, T tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.uncertainty import Numbers, Row, ask, interval
from ci_llm import Crowd
from ci_llm.base.targets import layer_list
from ci_llm.crowd.aggregators import probability
from ci_llm.crowd.answers import Logistic, signals, token_uncertainty, tokens_of
from ci_llm.crowd.asking import prompter_of
from ci_llm.crowd.generation import continuation
from ci_llm.crowd.judging import auroc
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Example
from ci_llm.evaluation.predictions import at_coverage

#: Of a coefficient of a hidden state and of a signal.
PENALTIES = 30.0, 3.0
ROWS_PER_PASS = 16


@torch.no_grad()
def read(crowd: Crowd, answers: Sequence[tuple[str, str]]) -> tuple[Numbers, Numbers]:
    """Signals [n, 5] and pooled hidden states [n, 4 D] of pairs of a prompt and an answer to it."""
    seen: list[Tensor] = []
    _, layers = layer_list(crowd.model)
    middle = layers[(len(layers) - 1) // 2]
    hook = middle.register_forward_hook(
        lambda module, given, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    found: list[list[float]] = []
    pooled: list[Tensor] = []
    try:
        for at in range(0, len(answers), ROWS_PER_PASS):
            rows = [_row(crowd, *pair) for pair in answers[at : at + ROWS_PER_PASS]]
            batch = pack(rows, range(len(rows))).to(crowd.device)
            final = crowd.states(batch)
            log_probs = crowd.head.logits(final[:, batch.predict_from]).log_softmax(-1)
            numbers = token_uncertainty(log_probs, probability.aggregate(log_probs), batch.targets, is_mean=True)
            tokens = iter(tokens_of(numbers))
            states = iter(seen.pop().reshape(final.shape).mean(0).split([len(row.input_ids) for row in rows]))
            for row, own in zip(rows, states, strict=True):
                begins = int(np.argmax(row.supervised))
                found.append(signals([next(tokens) for _ in range(len(own) - begins)]))
                prompt, answer = own[:begins], own[begins - 1 : -1]
                pooled.append(torch.cat([prompt.mean(0), prompt[-1], answer.mean(0), answer[-1]]))
    finally:
        hook.remove()
    return np.array(found), torch.stack(pooled).double().cpu().numpy()


def _row(crowd: Crowd, prompt: str, answer: str) -> Example:
    prompter = prompter_of(crowd)
    ids = prompter.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return continuation(prompter.ids(prompt), [*ids, min(prompter.ends)])


def labelled(rows: Sequence[Row]) -> tuple[list[tuple[str, str]], list[bool]]:
    """Every different answer of crowd and agents to the rows, and which are right."""
    found: dict[tuple[str, str], bool] = {}
    for row in rows:
        answers = [row["answer"], *row["agents"]]
        for answer, right in zip(answers, [row["correct"], *row["agents_correct"]], strict=True):
            found.setdefault((row["prompt"], answer), right)
    return [*found], [*found.values()]


def table(sure: dict[str, Numbers], right: Numbers) -> str:
    """One line per way, in markdown."""
    lines = ["| from | AUROC of wrong answers | exact match of the surest 80 % |", "|---|---|---|"]
    for name, numbers in sure.items():
        low, high = interval(numbers, right)
        area = f"{auroc(numbers, right) or 0:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {name} | {area} | {at_coverage(numbers, right):.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="ci_llm_output", type=Path, help="a run on the embedded task")
    run: Path = parser.parse_args().run
    validation = ask(run, "validation", run / "probe_validation.jsonl")
    test = ask(run, "test", run / "probe_test.jsonl")
    crowd = Crowd.from_pretrained(run)
    pairs, right = labelled(validation)
    own_signals, states = read(crowd, pairs)
    test_signals, test_states = read(crowd, [(row["prompt"], row["answer"]) for row in test])
    of_states, of_signals = PENALTIES
    penalty = [of_signals] * own_signals.shape[1] + [of_states] * states.shape[1]
    probe = Logistic.fit(np.hstack([own_signals, states]), right, penalty)
    alone = Logistic.fit([row["signals"] for row in validation], [row["correct"] for row in validation])
    sure = {
        "the signals of a calibration": np.array([alone(row["signals"]) for row in test]),
        "and hidden states": np.array([probe(each) for each in np.hstack([test_signals, test_states])]),
    }
    is_right = np.array([row["correct"] for row in test], float)
    print(
        f"{len(test)} rows, exact match {is_right.mean():.3f}; fitted on {len(pairs)} answers to {len(validation)} rows"
    )
    print(table(sure, is_right))


if __name__ == "__main__":
    main()
