"""A GGUF file as a base: exact in its plain folder, made once, in any number of processes; refused in one message."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from jinja2.exceptions import SecurityError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci_llm.base import gguf as our
from ci_llm.base.fits import _count_parameters
from ci_llm.base.load import load_architecture, load_base
from ci_llm.core.durable import PARTIAL
from ci_llm.errors import ModelError
from tests.support.campaign import drawn
from tests.support.gguf_files import TEMPLATE, TOKENS, Kind, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bases"


def kept(cache: Path) -> list[Path]:
    """What lies in the cache beside locks and empty folders."""
    return [path for path in cache.rglob("*") if not path.is_dir() and path.name != "lock"]


KINDS = {Kind.F32: torch.bfloat16, Kind.BF16: torch.bfloat16, Kind.Q8_0: torch.float32, Kind.Q4_1: torch.float32}
FILES = [(architecture, kind, dtype) for architecture in ("llama", "qwen2") for kind, dtype in KINDS.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "dtype"), drawn(FILES, 3))
def test_the_plain_folder_has_the_numbers_of_the_file(
    architecture: str, kind: gguf.GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The original is not permuted: so this also shows that the rows of queries and keys are in order again."""
    original = write_gguf(file := tmp_path / "tiny.gguf", architecture, kind)
    base = load_base(str(file), "fp32")
    assert base.name != str(file)
    opened = AutoModelForCausalLM.from_pretrained(base.name)
    assert opened.dtype == dtype, "16 bits where they hold every number"
    for name, weight in original.state_dict().items():
        stored = weight.numpy()
        if weight.ndim == 2:
            stored = gguf.dequantize(gguf.quantize(stored, kind), kind)
        assert torch.equal(opened.state_dict()[name].float(), torch.from_numpy(stored)), name
        assert torch.equal(base.model.state_dict()[name], torch.from_numpy(stored)), name


@pytest.mark.slow
def test_the_tokenizer_is_that_of_the_file(tmp_path: Path) -> None:
    write_gguf(file := tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(load_base(str(file)).name)
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|pad|>")
    chat = [{"role": "user", "content": "at a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|im_start|>user\nat a<|im_end|>\n"
    ids = tokenizer("at a<|im_end|>").input_ids
    assert [TOKENS[one] for one in ids] == ["a", "t", "Ġa", "<|im_end|>"]


def test_a_template_of_the_file_runs_in_a_sandbox(tmp_path: Path) -> None:
    hostile = "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "owned") + "') }}"
    write_gguf(file := tmp_path / "tiny.gguf", template=hostile)
    tokenizer = load_base(str(file)).tokenizer
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert not (tmp_path / "owned").exists()


def test_a_gguf_file_is_dequantised_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    write_gguf(file := tmp_path / "model" / "tiny.gguf")
    with caplog.at_level("INFO"):
        first = load_base(str(file))
    (line,) = (line for line in caplog.messages if "dequantised" in line)
    assert first.name in line
    assert " kB" in line
    assert _count_parameters(str(file)) == first.num_parameters
    monkeypatch.setattr(our, "_convert", lambda *_: pytest.fail("it was dequantised already"))
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "model/tiny.gguf"):
        assert load_base(name).name == first.name
        assert load_architecture(name).model_type == "llama"
    assert Path(first.name).is_relative_to(cache)
    assert Path(first.name).name == "tiny", "the name that cards show"


def _forked(child: Callable[[], None]) -> int:
    if (pid := os.fork()) == 0:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@pytest.mark.slow
def test_one_of_several_processes_that_start_at_once_dequantises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(file := tmp_path / "tiny.gguf")
    convert, (heard, told) = our._convert, os.pipe()

    def counted(file: Path, folder: Path) -> None:
        os.write(told, b".")
        convert(file, folder)

    monkeypatch.setattr(our, "_convert", counted)
    children = [_forked(lambda: our.plain_folder(file) and None) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    os.close(told)
    with os.fdopen(heard, "rb") as pipe:
        assert pipe.read() == b"."


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_counts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(file := tmp_path / "tiny.gguf")

    def killed() -> None:
        monkeypatch.setattr("ci_llm.core.durable.sync_tree", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        our.plain_folder(file)

    assert os.waitstatus_to_exitcode(os.waitpid(_forked(killed), 0)[1]) == -signal.SIGKILL
    assert not our.kept_folder(file).exists()
    (draft,) = cache.rglob(f"*{PARTIAL}")
    load_base(str(file))
    assert not draft.exists(), "nobody else would remove it"


#: What becomes of a file, and what is said of it.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "torn": (lambda file: file.write_bytes(file.read_bytes()[:-100]), "its tensors end at byte"),
    "foreign": (lambda file: file.write_bytes(b"PK\x03\x04" * 1000), "not a GGUF file"),
    "gone": (lambda file: file.unlink(), "No such file"),
    "architecture": (lambda file: write_gguf(file, general="mamba9"), "architecture mamba9 is not supported"),
    "no tokenizer": (lambda file: write_gguf(file, leave_out="tokenizer"), "it has no tokenizer"),
    "no layer": (
        lambda file: write_gguf(file, leave_out="blk.1.ffn_down"),
        "1 weights are missing or of another shape, the first is model.layers.1.mlp.down_proj.weight",
    ),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("damage", "what"), DAMAGE.values(), ids=DAMAGE)
def test_a_path_that_is_not_a_base_is_one_message(
    damage: Callable[[Path], object], what: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(file := tmp_path / "tiny.gguf")
    damage(file)
    for open_it in (load_architecture, load_base):
        with pytest.raises(ModelError) as caught:
            open_it(str(file))
        assert what in caught.value.what
        assert str(file) in str(caught.value.where)
        assert caught.value.hint
    assert kept(cache) == []


def test_a_full_disk_is_one_message(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file := tmp_path / "tiny.gguf")
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage(20_000))
        with pytest.raises(ModelError, match="free") as caught:
            load_base(str(file))
        assert "CI_LLM_CACHE" in str(caught.value.hint)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(ModelError, match="No space left") as caught:
        load_base(str(file))
    assert kept(cache) == []
    assert not list(cache.rglob(f"*{PARTIAL}"))
