"""Facts that more than one page says, asked of the code: rates, own keys, limits, versions, first sentences."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

import ci_llm
from ci_llm.config import Config, describe_keys
from ci_llm.config.foreign import FIELDS
from ci_llm.config.own_keys import OWN_KEYS
from ci_llm.interrupts import STOP_SIGNALS
from ci_llm.run.watchdog import FIRST_S
from ci_llm.supervisor import policy
from tests.support.markdown import ROOT


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


RATES = [
    (base, objective)
    for base in ("embedded", "another")
    for objective in ("sft", "dpo", "kto", "orpo", "simpo", "grpo", "reward", "classification", "regression")
]


def _rate(base: str, objective: str) -> float:
    rewards = {"rewards": "length"} if objective == "grpo" else {}
    found = Config(model_name=base, objective=objective, **rewards).learning_rate
    return float(found)


@pytest.mark.parametrize("where", ["--help", "configs.yaml", "docs/objectives.md"])
def test_the_learning_rates_of_auto_are_said_in_full_wherever_they_are_said(where: str) -> None:
    text = " ".join(describe_keys(["learning_rate"]).split()) if where == "--help" else page(where)
    told = {float(found) for found in re.findall(r"\b\de-\d\b", text[text.index("auto") :])}
    assert {_rate(base, objective) for base, objective in RATES} <= told


def test_a_key_of_the_file_or_the_page_says_no_other_rate_of_auto() -> None:
    """`else 2e-4` was said of every objective."""
    for name in ("README.md", "docs/keys.md", "docs/own_model.md", "configs.yaml"):
        assert "else 2e-4" not in page(name)


def test_the_page_of_agents_names_every_key_that_may_differ() -> None:
    table = (
        (ROOT / "docs/agents.md").read_text(encoding="utf-8").partition("## What may differ")[2].partition("\n## ")[0]
    )
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows))) - {"name"} == {*OWN_KEYS}


def test_the_keys_that_people_set_exist_and_are_as_many_as_the_page_says() -> None:
    said = page("docs/keys.md").partition("**The ")[2]
    count, _, names = said.partition(" that people set**: ")
    names = names.partition(". ")[0]
    found = re.findall(r"`(\w+)`", names)
    assert (len(found), len({*found})) == (int(count), int(count))
    assert {*found} <= {*FIELDS}


def test_the_first_hang_limit_is_that_of_the_page() -> None:
    assert f"before the first measured step, {FIRST_S / 60:.0f} minutes" in page("docs/interruptions.md")


def test_the_signals_that_stop_a_run_are_those_of_the_page() -> None:
    first = page("docs/interruptions.md").partition("## Signals")[2]
    assert all(name in first for name in STOP_SIGNALS)
    assert "SIGXCPU" not in "".join(page(str(each.relative_to(ROOT))) for each in ROOT.glob("docs/**/*.md"))


def test_the_supervisor_s_numbers_are_those_of_the_page() -> None:
    text = page("docs/interruptions.md")
    usual = policy.Policy()
    assert f"or {usual.max_retries} retries" in text


def test_an_environment_is_told_the_ranges_of_the_package() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    told = re.findall(r"`(\w+[<>][^`]+)`", page("docs/install.md"))
    assert len(told) == 5
    assert {*told} <= {*required}


def test_the_package_says_in_its_first_sentence_what_the_readme_says() -> None:
    sentence = "K LoRA adapters on one frozen base, in one job that resumes exactly"
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    for text in (str(ci_llm.__doc__), metadata, page("mkdocs.yml")):
        assert sentence in text
    assert "fused pass" not in page("README.md") + page("CITATION.cff") + metadata


def rows_of(name: str, start: str) -> dict[str, list[list[float]]]:
    """The rows of the first table behind `start`: title -> the numbers of each cell."""
    table = (ROOT / name).read_text(encoding="utf-8").partition(start)[2].partition("\n| ")[2].partition("\n\n")[0]
    cells = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {
        first.strip(): [[float(n) for n in re.findall(r"\d\.\d+", cell)] for cell in rest] for first, *rest in cells
    }


@pytest.mark.parametrize(
    ("here", "recorded"),
    [
        ("crowd, four passes", "the crowd"),
        ("`distilled`", "distilled"),
        ("`svd`", "`svd`"),
        ("an agent, mean of four", "agents, mean of 4"),
        ("one longer agent, four times the steps", "one agent, 1,040 steps"),
    ],
)
def test_the_recipe_of_one_adapter_has_the_recorded_figures(here: str, recorded: str) -> None:
    _, rows_100, rows_400, _ = rows_of("benchmarks/README.md", "## Every way to answer")[recorded]
    told = rows_of("docs/recipes/jobs.md", "## One adapter from a crowd")[here]
    assert told == [[float(f"{n:.2g}") for n in cell] for cell in (rows_100, rows_400)]


CALLS = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("## Calls\n\n```text\n")[2].partition("```")[0]


@pytest.mark.parametrize("call", re.findall(r"^\S.*(?:\n {4}.*)*", CALLS, re.MULTILINE))
def test_a_public_name_is_called_as_the_page_says(call: str) -> None:
    name, _, told = " ".join(call.split()).partition("(")
    found = functools.reduce(getattr, name.split("."), ci_llm)
    signature = inspect.signature(found)
    taken = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name != "self"]
    shown = str(signature.replace(parameters=taken, return_annotation=signature.empty))
    if told.endswith(", ...)"):
        assert shown.startswith(f"({told.removesuffix(' ...)')}")
    else:
        assert shown == f"({told}"


#: Keys of the table of defaults that have one value there, and their names in TRL.
IN_TRL = {
    "learning_rate": "learning_rate",
    "lr_scheduler_type": "lr_scheduler_type",
    "num_warmup_steps_ratio": "warmup_steps",
    "weight_decay": "weight_decay",
    "batch_size": "per_device_train_batch_size",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "lora_dropout": "lora_dropout",
    "report_to": "report_to",
    "num_workers": "dataloader_num_workers",
}


def same(value: object, told: str) -> bool:
    shown = ",".join(value) if isinstance(value, tuple) else str(value).casefold()
    return shown == told or (told[0].isdigit() and float(shown) == float(told))


@pytest.mark.slow  # TRL loads much
def test_the_defaults_that_differ_from_those_of_trl_are_those_of_both_programs() -> None:
    import trl

    theirs = {**trl.SFTConfig.__dataclass_fields__, **trl.ModelConfig.__dataclass_fields__}
    ours = Config(model_name="another", objective="sft")
    text = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8").partition("Defaults that differ")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|$", text.partition("Equal are")[0], re.MULTILINE)
    told = {key: values for key, *values in rows}
    assert IN_TRL.keys() <= told.keys()
    for key, name in IN_TRL.items():
        assert same(getattr(ours, key), told[key][0]), key
        assert same(theirs[name].default, told[key][1]), name
        assert getattr(ours, key) != theirs[name].default, f"{key} is the same"


def test_the_rows_of_a_step_in_the_recipe_s_loop_do_not_depend_on_the_number_of_processes() -> None:
    """With rows per step divided among the processes, and the last rows of an epoch dropped."""

    def steps(processes: int) -> list[set[int]]:
        each = []
        for process in range(processes):
            batches = BatchSampler(ci_llm.StatefulSampler(range(100), seed=1), 8 // processes, drop_last=True)
            each.append([*BatchSamplerShard(batches, processes, process)])
        return [{row for batch in together for row in batch} for together in zip(*each, strict=True)]

    assert len(steps(1)) == 12
    assert steps(1) == steps(2) == steps(4)
