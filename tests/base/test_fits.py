"""What copies of a base take in memory, told from the headers of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ci_llm.base import fits
from ci_llm.config import Config
from ci_llm.errors import LaunchError

NUMBERS = 3_000_000


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3 million numbers in bf16, in two files, where 30 MB are free."""
    monkeypatch.setattr(fits, "free_host_memory", lambda: (30_000_000, 60_000_000))
    for number, rows in enumerate((2000, 1000)):
        weights = torch.zeros(rows, 1000, dtype=torch.bfloat16)
        save_file({"weight": weights}, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    return tmp_path


@pytest.mark.parametrize(
    ("copies", "keys"),
    [
        (2, {}),  # 12 MB each, as fp32
        (5, {"model_dtype": "bf16"}),
        (5, {"model_dtype": "auto"}),
        (10, {"quantization": "int8"}),
        (20, {"quantization": "nf4"}),
        (3, {"base_sharding": "layers"}),
    ],
)
def test_copies_that_fit(copies: int, keys: dict[str, str], base: Path) -> None:
    config = Config(model_name=str(base), **keys)  # type: ignore[arg-type]
    fits.require_memory(config, copies)
    if "base_sharding" not in keys:
        with pytest.raises(LaunchError, match=f"{copies + 1} processes need [\\d.]+ MB"):
            fits.require_memory(config, copies + 1)


def test_the_refusal_names_the_memory_needed_and_free(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_count_parameters", lambda _name: 1_100_000_000)
    monkeypatch.setattr(fits, "free_host_memory", lambda: (14_000_000_000, 16_000_000_000))
    with pytest.raises(LaunchError) as refused:
        fits.require_memory(Config(model_name=str(base)), 4)
    assert refused.value.what == "4 processes need 17.6 GB of memory for their bases alone, and 14 GB are free"
    assert refused.value.where == f"model_name={base}: 4.4 GB each"


def test_a_base_from_the_hub_is_found_in_its_cache(
    base: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert fits._count_parameters("some/base") == 0
    (cache / "models--some--base" / "snapshots").mkdir(parents=True)
    (cache / "models--some--base" / "snapshots" / "0123").symlink_to(base)
    (cache / "models--some--base" / "refs").mkdir()
    (cache / "models--some--base" / "refs" / "main").write_text("0123")
    (base / "config.json").write_text("{}")
    assert fits._count_parameters("some/base") == NUMBERS
