"""The page's formula for memory and disk: it makes the page's table, and agrees with the estimate of `ci-llm check`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ci_llm.base.quantized import stored_bytes
from ci_llm.config import Config
from ci_llm.dry_run.inputs import CUDA_CONTEXT_BYTES
from ci_llm.run.start.cost_model import Trace, agent_copies, trace
from tests.support.markdown import ROOT
from tests.support.presets import KNOWN

PAGE = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")
AGENTS, RANK, TOKENS = 4, 16, 1024
NAMES = {
    "Qwen2.5 0.5B": "Qwen/Qwen2.5-0.5B",
    "Qwen2.5 3B": "Qwen/Qwen2.5-3B",
    "Llama 3.1 8B (Qwen3-8B is alike)": "meta-llama/Llama-3.1-8B",
    "Llama 3.1 70B": "meta-llama/Llama-3.1-70B",
}


def linear_layers(shape: dict[str, Any]) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear layer of the base but for the head."""
    hidden, between, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = head * shape["num_attention_heads"], head * shape["num_key_value_heads"]
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    return [*attention, (hidden, between), (hidden, between), (between, hidden)] * shape["num_hidden_layers"]


def parts(shape: dict[str, Any], *, quantized: bool) -> dict[str, float]:
    """The page's formula, in numbers and bytes."""
    layers = linear_layers(shape)
    words = shape["vocab_size"] * shape["hidden_size"] * (1 if shape["tie_word_embeddings"] else 2)
    dense = sum(inputs * outputs for inputs, outputs in layers)
    trained = RANK * sum(inputs + outputs for inputs, outputs in layers)
    recomputed = 2.2 * shape["num_hidden_layers"] * shape["hidden_size"] + 17 * shape["intermediate_size"]
    kept = shape["num_hidden_layers"] * (9 * shape["intermediate_size"] + 19 * shape["hidden_size"])
    return {
        "N": dense + words,
        "P": trained,
        "base": (0.516 if quantized else 2) * dense + 2 * words,
        "agents": 28 * AGENTS * trained,
        "activations": TOKENS * recomputed,
        "kept": TOKENS * kept,
        "checkpoint": 12 * AGENTS * trained,
    }


def numbers(cell: str) -> list[float]:
    return [float(found) for found in re.findall(r"[\d.]+", cell)]


def rows() -> dict[str, list[str]]:
    table = PAGE.partition("| base | N | P |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: rest for name, *rest in cells}


@pytest.mark.parametrize("row", NAMES)
def test_the_formula_gives_the_row_of_the_table(row: str) -> None:
    dense, small = (parts(KNOWN[NAMES[row]], quantized=quantized) for quantized in (False, True))
    for_all = dense["agents"] + dense["activations"] + CUDA_CONTEXT_BYTES
    batch = Config().batch_size
    by_default = dense["agents"] + batch * dense["kept"] + CUDA_CONTEXT_BYTES
    expected = [
        [dense["N"]],
        [dense["P"] * 1000],
        [dense["base"], small["base"]],
        [dense["agents"]],
        [dense["activations"]],
        [dense["base"] + for_all, small["base"] + for_all],
        [dense["base"] + by_default, small["base"] + by_default],
        [dense["checkpoint"]],
    ]
    for cell, values in zip(rows()[row], expected, strict=True):
        assert numbers(cell) == pytest.approx([value / 1e9 for value in values], abs=0.06, rel=0.01), cell


def traced(layers: int, *, recomputed: bool) -> tuple[dict[str, float], Trace]:
    """The page's formula and the estimate of the check, of one row and so many layers of the smallest base."""
    shape = KNOWN[NAMES["Qwen2.5 0.5B"]] | {"num_hidden_layers": layers}
    config = Config(
        model_name=NAMES["Qwen2.5 0.5B"],
        model_dtype="bf16",
        mixed_precision="bf16" if recomputed else "no",
        use_gradient_checkpointing=recomputed,
        pass_per_agent=True,
        num_agents=AGENTS,
        lora_rank=RANK,
    )
    sizes = {"rows": 1, "tokens": TOKENS, "targets": TOKENS // 2}
    found = trace(config, AutoConfig.for_model(**shape), torch.device("cpu"), **sizes)
    return parts(shape, quantized=False), found


@pytest.mark.slow
def test_the_formula_agrees_with_the_estimate_of_the_check() -> None:
    """On a few layers: what is more of them is more of the same."""
    (few, first), (more, second) = (traced(layers, recomputed=True) for layers in (2, 3))
    assert first.base_parameters == pytest.approx(few["N"], rel=0.001)
    assert first.agent_parameters == few["P"]
    assert first.base_bytes == pytest.approx(few["base"], rel=0.001)
    assert first.agents_bytes == few["agents"] / 28 * 40
    assert first.activation_bytes == pytest.approx(few["activations"], rel=0.05)
    by_layers = second.activation_bytes - first.activation_bytes
    assert by_layers == pytest.approx(more["activations"] - few["activations"], rel=0.05)


@pytest.mark.slow
def test_so_does_the_one_for_layers_that_are_not_recomputed() -> None:
    (few, first), (more, second) = (traced(layers, recomputed=False) for layers in (1, 2))
    assert second.activation_bytes - first.activation_bytes == pytest.approx(more["kept"] - few["kept"], rel=0.05)


def test_the_memory_of_grpo_is_that_of_the_page() -> None:
    """Eight rows of one prompt, and before them 32 open texts."""
    shape = KNOWN[NAMES["Llama 3.1 8B (Qwen3-8B is alike)"]]
    said = parts(shape, quantized=True)
    grpo = " ".join(PAGE.partition("**GRPO**")[2].partition("\n- **")[0].split())
    count = Config().num_generations
    needed = said["base"] + said["agents"] + count * said["activations"] + CUDA_CONTEXT_BYTES
    a_token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    assert f"needs {needed / 1e9:.0f} GB" in grpo
    assert f"{a_token / 1e3:.0f} kB" in grpo
    assert f"{a_token * AGENTS * count * TOKENS / 1e9:.1f} GB for these {AGENTS * count} texts" in grpo


@pytest.mark.parametrize(("device", "each"), [("cuda", 28), ("cpu", 40)])
def test_the_bytes_of_a_trained_number_are_those_of_the_estimate(device: str, each: int) -> None:
    assert 4 * agent_copies(Config(), torch.device(device)) == each
    assert f"{each} × K × P" in PAGE


def test_a_weight_in_four_bits_has_the_bytes_of_the_page() -> None:
    assert stored_bytes("nf4", 4096, 4096) / 4096**2 == pytest.approx(0.516, abs=0.001)
