"""`ci_llm.train` with rows and a model in memory: the bits of files, resumes, refusals, and what a call shows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaModel, PreTrainedModel

import ci_llm
from ci_llm.base.load import fingerprint_of, holds
from ci_llm.core.run_folder import BASE_MODEL
from ci_llm.data.files import kept_rows
from ci_llm.data.sources import load_rows
from ci_llm.embedded import BASE_FOLDER
from tests.run.test_call import KEYS, same

ROWS = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(30)]
SHORT: dict[str, Any] = {
    **{key: value for key, value in KEYS.items() if key != "max_train_samples"},
    "eval_steps": None,
    "generation_eval_samples": 0,
    "quiet": True,
}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI_LLM_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


def in_a_file(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def loaded() -> tuple[PreTrainedModel, Any]:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER), AutoTokenizer.from_pretrained(BASE_FOLDER)


# Rows


def polars_frame() -> Any:
    return pytest.importorskip("polars", reason="there is no polars; pip install polars").DataFrame(ROWS)


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "Dataset": lambda: Dataset.from_list(ROWS),
    "DatasetDict": lambda: DatasetDict(train=Dataset.from_list(ROWS)),
    "a part of a Dataset": lambda: Dataset.from_list([*ROWS, *ROWS]).select(range(30)),
    "pandas": lambda: pd.DataFrame(ROWS),
    "polars": polars_frame,
    "lazy polars": lambda: polars_frame().lazy(),
    "iterator": lambda: iter(ROWS),
    "function": lambda: lambda: (row for row in ROWS),
    "function of a frame": lambda: lambda: pd.DataFrame(ROWS),
    "streamed": lambda: Dataset.from_list(ROWS).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_each_kind_are_those_of_a_file(kind: str, tmp_path: Path) -> None:
    for split in ("train", "eval"):
        config, written = (
            ci_llm.Config(model_name="other", dataset_name=name, eval_samples=9)
            for name in (kept_rows(KINDS[kind](), "dataset"), str(in_a_file(tmp_path)))
        )
        found, wanted = load_rows(config, split), load_rows(written, split)  # type: ignore[arg-type]
        assert (found.fingerprint, found.numbers) == (wanted.fingerprint, wanted.numbers)


def test_equal_rows_have_equal_names_and_other_rows_have_other_names() -> None:
    first = kept_rows(ROWS, "dataset")
    written = Path(first).stat().st_mtime_ns
    assert kept_rows(iter(ROWS), "dataset") == first
    assert Path(first).stat().st_mtime_ns == written
    assert kept_rows(ROWS[1:], "dataset") != first
    data = Dataset.from_list(ROWS)
    assert kept_rows(data, "dataset") == kept_rows(data, "dataset") != kept_rows(data.select(range(9)), "dataset")


used_up = iter(ROWS)
list(used_up)
BAD_ROWS: dict[str, tuple[Any, str]] = {
    "empty": ([], "there is no row(.|\n)*at least one row"),
    "empty data set": (Dataset.from_list([]), "there is no row"),
    "empty frame": (pd.DataFrame(), "there is no row"),
    "used up": (used_up, "there is no row(.|\n)*the function that makes it"),
    "a number": (3, "its type is int(.|\n)*a list of dicts"),
    "columns": ({"prompt": ["a"], "completion": ["b"]}, "its type is dict(.|\n)*a list of dicts"),
    "bytes": (b"rows", "its type is bytes"),
    "tuples": ([("a", "b")], "row 0 is a tuple, not a dict"),
    "mixed": ([*ROWS, None], "row 30 is a NoneType, not a dict"),
    "an object": ([*ROWS, {"prompt": object()}], "row 30 cannot be kept: (.|\n)*leave other columns"),
    "no column of ours": ([{"colour": "red", "size": 3}], "colour"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("argument", ["dataset", "eval_dataset"])
def test_rows_that_cannot_be_used_are_refused_and_nothing_is_made(kind: str, argument: str, tmp_path: Path) -> None:
    rows, message = BAD_ROWS[kind]
    if argument == "eval_dataset" and kind == "no column of ours":
        message = "colour"
    good = {"dataset": ROWS} if argument == "eval_dataset" else {}
    with pytest.raises(ci_llm.CiLlmError, match=message) as caught:
        ci_llm.train(**{**good, argument: rows}, output_dir=tmp_path / "run", **SHORT)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    if kind != "no column of ours":
        assert f"{argument}=" in str(caught.value)


@pytest.mark.slow
def test_a_resume_with_other_rows_or_another_model_is_refused(tmp_path: Path) -> None:
    keys = {**SHORT, "output_dir": tmp_path / "run", "max_train_steps": 1}
    model, tokenizer = loaded()
    ci_llm.train(dataset=ROWS, model=model, tokenizer=tokenizer, **keys)
    later = {**keys, "max_train_steps": 2}
    with pytest.raises(ci_llm.CiLlmError, match="the training rows are not those of the checkpoint") as caught:
        ci_llm.train(dataset=ROWS[:-1], model=model, tokenizer=tokenizer, **later)
    for way in ("experiment_name=NAME begins a new run", "overwrite_output_dir=true", "allow_inexact_resume=true"):
        assert way in str(caught.value)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] += 1
    with pytest.raises(ci_llm.CiLlmError, match="weights of the base"):
        ci_llm.train(dataset=ROWS, model=model, tokenizer=tokenizer, **later)
    assert not (tmp_path / "run" / BASE_MODEL).exists()


# A model


def state_of(model: PreTrainedModel) -> list[Any]:
    """What a run changes for as long as it lasts."""
    asked = [parameter.requires_grad for parameter in model.parameters()]
    classes = [type(module).__name__ for module in model.modules()]
    hooks = len(model.get_output_embeddings()._forward_pre_hooks)
    return [asked, classes, hooks, model.training, model.config.use_cache, model.config._attn_implementation]


@pytest.mark.slow
def test_a_loaded_model_gives_the_bits_of_its_folder_and_is_afterwards_as_it_was(tmp_path: Path) -> None:
    model, tokenizer = loaded()
    model.train()
    before, template, weights = state_of(model), tokenizer.chat_template, fingerprint_of(model)
    given = ci_llm.train(dataset=ROWS, model=model, tokenizer=tokenizer, output_dir=tmp_path / "given", **SHORT)
    ci_llm.train(dataset=ROWS, model="embedded", output_dir=tmp_path / "named", **SHORT)
    assert same(tmp_path / "given" / "final_checkpoint", tmp_path / "named" / "final_checkpoint")
    assert (state_of(model), tokenizer.chat_template, fingerprint_of(model)) == (before, template, weights)
    assert not (tmp_path / "given" / BASE_MODEL).exists()
    config = json.loads((given.folder / "final_checkpoint/agent0/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(BASE_FOLDER)


@pytest.mark.slow
def test_a_model_that_no_folder_has_is_kept_once_and_the_adapters_open_on_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    _, tokenizer = loaded()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE_FOLDER))
    keys = {**SHORT, "output_dir": tmp_path / "run", "max_train_steps": 1}
    capfd.readouterr()
    result = ci_llm.train(dataset=ROWS, model=model, tokenizer=tokenizer, **keys)
    assert capfd.readouterr() == ("", "")
    kept = tmp_path / "run" / BASE_MODEL
    assert holds(str(kept), model)
    assert f"kept in {kept}" in (tmp_path / "run" / "training.log").read_text()
    written = (kept / "model.safetensors").stat().st_mtime_ns
    assert ci_llm.train(dataset=ROWS, model=model, tokenizer=tokenizer, **{**keys, "max_train_steps": 2}).step == 2
    assert (kept / "model.safetensors").stat().st_mtime_ns == written
    adapter = result.folder / "final_checkpoint" / "agent0"
    name = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(name), adapter).eval()
    ids = torch.arange(4, 12)[None]
    with torch.no_grad(), result.crowd.base_model.active_agent(0) as agent:
        torch.testing.assert_close(alone(input_ids=ids).logits, agent(input_ids=ids, use_cache=False).logits)


def test_a_base_is_found_where_it_is_from_only_while_it_is_the_same(tmp_path: Path) -> None:
    model, _ = loaded()
    name = str(BASE_FOLDER)
    assert holds(name, model)
    assert not holds(str(tmp_path), model)
    assert not holds(name, AutoModelForCausalLM.from_config(model.config))
    model.config.rms_norm_eps = 0.1
    assert not holds(name, model), "the same weights compute something else"
    model, _ = loaded()
    assert holds(name, model.to(torch.bfloat16)), "opened in that precision, it is the same"
    assert not holds(name, model.to(torch.float32)), "what was rounded away is not in the folder"


def with_peft() -> Any:
    return get_peft_model(loaded()[0], LoraConfig(target_modules=["q_proj"]))


def of_a_crowd() -> Any:
    model, _ = loaded()
    ci_llm.Crowd(model, ci_llm.LoraSettings(num_agents=1, rank=2), "embedded")
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE_FOLDER))


def quantised() -> Any:
    model, _ = loaded()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return model


BAD_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapped by PEFT": (with_peft, "there are adapters on this model already(.|\n)*merge_and_unload"),
    "adapters of PEFT inside": (lambda: with_peft().base_model.model, "there are adapters on this model already"),
    "agents of a crowd": (of_a_crowd, r"there are adapters on this model already(.|\n)*crowd.detach\(\)"),
    "on meta": (on_meta, "this model is on meta"),
    "quantised": (quantised, r"this model is quantised(.|\n)*model=NAME"),
    "without a head": (lambda: LlamaModel(AutoConfig.from_pretrained(BASE_FOLDER)), "a LlamaModel is not a causal"),
    "a number": (lambda: 3, "a int is not a causal language model"),
}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_models_that_cannot_be_trained_on_are_refused_and_nothing_is_made(kind: str, tmp_path: Path) -> None:
    make, message = BAD_MODELS[kind]
    with pytest.raises(ci_llm.CiLlmError, match=message):
        ci_llm.train(dataset=ROWS, model=make(), tokenizer=loaded()[1], output_dir=tmp_path / "run", **SHORT)
    assert not (tmp_path / "run").exists()


# What a call shows


@pytest.mark.slow
def test_a_quiet_call_prints_nothing_but_warnings_and_a_handler_gets_everything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    lines: list[str] = []
    own, package = Kept(), logging.getLogger("ci_llm")
    package.addHandler(own)
    try:
        keys = {**SHORT, "max_train_steps": 1, "report_to": "tensorboard"}
        result = ci_llm.train(dataset=Dataset.from_list(ROWS), output_dir=tmp_path / "run", **keys)
        assert package.handlers == [own]
    finally:
        package.removeHandler(own)
    assert capfd.readouterr() == ("", "")
    assert "completed at step 1" in lines
    assert "completed at step 1" in (tmp_path / "run" / "training.log").read_text()
    assert "<iframe srcdoc=" in result._repr_html_()

    class Warns:
        def on_step_end(self, *_: object, **__: object) -> None:
            package.warning("the disk is slow")

    ci_llm.train(dataset=ROWS, output_dir=tmp_path / "warned", callbacks=[Warns()], **{**SHORT, "max_train_steps": 1})
    assert capfd.readouterr().out == "warning: the disk is slow\n"
