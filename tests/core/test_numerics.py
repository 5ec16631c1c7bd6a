"""What a checkpoint calls the machine that computed it, and how people are told that another one resumes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.core import determinism
from ci_llm.core.determinism import differences, names, names_of_all

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)


def test_the_same_process_has_the_same_names() -> None:
    assert differences(names(CPU), names(CPU)) == []


def test_settings_are_named_only_where_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(CPU)
    assert before["settings"] == {"numerics": "1"}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16")
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    now = names(CPU)
    assert differences(before, now) == ["DNNL_DEFAULT_FPMATH_MODE not set -> BF16", "MKL_CBWR not set -> COMPATIBLE"]
    assert differences(now, before)[1] == "MKL_CBWR COMPATIBLE -> not set"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda n: n["machine"].update(processor="Abacus 3"), "processor Abacus 3 -> HERE"),
        (lambda n: n["settings"].update(numerics="0"), "numerics 0 -> 1"),
        (lambda n: n["versions"].update(torch="1.0"), f"torch 1.0 -> {version('torch')}"),
        (lambda n: n["versions"].update(blis="1.0"), "blis 1.0 -> not set"),
        (lambda n: n.update(machine={"GPU": "a GPU", "driver": "1.2"}), "device a GPU, 1.2 -> UNITS"),
    ],
)
def test_every_difference_between_machines_is_named(change: Callable[[Any], None], told: str) -> None:
    now = names(CPU)
    before = copy.deepcopy(now)
    change(before)
    here, units = now["machine"]["processor"], ", ".join(now["machine"].values())
    assert differences(before, now) == [told.replace("HERE", here).replace("UNITS", units)]


def test_a_process_on_another_machine_is_named() -> None:
    own = names(CPU)
    other = copy.deepcopy(own)
    other["machine"]["processor"], other["settings"]["MKL_CBWR"] = "Abacus 3", "AVX2"
    together = names_of_all([own, own, other])
    assert names_of_all([own, own]) == own
    assert differences(own, together) == [
        "processor of process 2 not set -> Abacus 3",
        "MKL_CBWR of process 2 not set -> AVX2",
    ]


def test_the_units_of_a_processor_are_those_of_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "model name\t: Xeon 9\nflags\t\t: fpu avx2 amx_tile avx512_bf16 vmx\n"
    monkeypatch.setattr(determinism, "_told_by", lambda _: listed)
    machine = names(CPU)["machine"]
    assert machine["processor"] == "Xeon 9"
    assert machine["instruction set"].endswith(f"{torch.backends.cpu.get_cpu_capability()} amx_tile avx512_bf16")


def test_a_system_without_that_list_has_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "Path", lambda _: Path("/nowhere/at/all"))
    machine = names(CPU)["machine"]
    assert machine["processor"]
    assert torch.backends.cpu.get_cpu_capability() in machine["instruction set"]
