"""A GGUF file as a base: dequantised once into a plain folder of Transformers, in a cache keyed by the file's digest.

No code in the file is executed: its numbers are read, and its chat template is rendered in Transformers' sandbox, as
for every tokenizer. Torch and Transformers are imported only where a file is converted.
"""

from __future__ import annotations

import logging
import shutil
import struct
from functools import cache
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import xxhash
from safetensors import SafetensorError

from ci_llm.config.parsing import hint_for_missing
from ci_llm.core.durable import PARTIAL, locked, make_folders, new_folder, read_chunks, remove_tree
from ci_llm.core.quantities import size
from ci_llm.core.remote import cache_folder
from ci_llm.core.work import weights_counted
from ci_llm.errors import ModelError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: The exceptions of reading a damaged or foreign file. RuntimeError is left out, as it may mean exhausted memory.
_UNREADABLE: Final = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(ImportError, NotImplementedError, struct.error),
)
#: `tokenizer.ggml.pre` of vocabularies for which llama.cpp, unlike Transformers, splits text at every digit first.
_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def gguf_file(model_name: str) -> Path | None:
    """The GGUF file that the name of a base means: the file itself, or the only one in a folder without config.json.

    It is None for other names.

    Raises:
        ModelError: the folder holds several.
    """
    path = Path(model_name)
    if not path.is_dir():
        return path if path.suffix.lower() == ".gguf" else None
    found = sorted(path.glob("*.gguf")) if not (path / "config.json").exists() else []
    if len(found) > 1:
        raise ModelError(
            f"the folder holds {len(found)} GGUF files and no config.json",
            where=f"model_name: {model_name}",
            hint=f"name one of them, as model_name={found[0]}; the parts of a split model are put together by "
            "llama-gguf-split --merge",
        )
    return found[0] if found else None


def plain_folder(file: Path) -> Path:
    """The folder with the dequantised model of a GGUF file and its tokenizer, for `from_pretrained`; made if missing.

    Several processes may call this at once: one converts, and the others wait for it.

    Raises:
        ModelError: there is no such file, it cannot be read as a base, or the cache's disk refuses the folder.
    """
    folder = kept_folder(file)
    if not folder.is_dir():
        try:
            make_folders(folder.parent)
            with locked(folder.parent / "lock", create=True, required=False):
                if not folder.is_dir():
                    _convert(file, folder)
        except (OSError, SafetensorError) as error:
            raise _no_room(file, folder, first_line(error)) from error
    _say_once(file, folder)
    return folder


def kept_folder(file: Path) -> Path:
    """The path of the folder of a GGUF file, made or not. Raises ModelError if the file cannot be read."""
    try:
        found = file.resolve(strict=True)
        state = found.stat()
        digest = _digest(found, (state.st_ino, state.st_size, state.st_mtime_ns))
    except OSError as error:
        what = f"the GGUF file cannot be read: {error.strerror}"
        raise ModelError(
            what, where=f"model_name: {file}", hint=hint_for_missing(file, "give the path of a GGUF file")
        ) from error
    return cache_folder("bases") / digest / file.stem


@cache
def _digest(file: Path, _state: tuple[int, ...]) -> str:
    digest = xxhash.xxh3_128()
    for chunk in read_chunks(file):
        digest.update(chunk)
    return digest.hexdigest()


@cache
def _say_once(file: Path, folder: Path) -> None:
    """Log the folder once in each process, because the one that logs may not be the one that converted."""
    stored = sum(path.stat().st_size for path in folder.iterdir())
    logger.info(f"model     {file.name} is dequantised in {folder}, {size(stored)}, which later starts use")


def _convert(file: Path, folder: Path) -> None:
    """Make the folder completely or not at all. The caller holds the lock, so other drafts are of killed processes."""
    for draft in folder.parent.glob(f".*{PARTIAL}"):
        remove_tree(draft)
    with weights_counted():
        try:
            needed = _bytes_when_dense(file)
            free = shutil.disk_usage(folder.parent).free
            if free < needed:
                raise _no_room(file, folder, f"it takes {size(needed)}, and {size(free)} are free")
            model, tokenizer = _read(file)
        except _UNREADABLE as error:
            raise ModelError(
                f"the GGUF file cannot be read as a base: {first_line(error)}",
                where=f"model_name: {file}",
                hint="compare its size and digest with those of its source; of an architecture that Transformers"
                " cannot read from GGUF take the Transformers folder of the same model",
            ) from error
        with new_folder(folder) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)


def _no_room(file: Path, folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the GGUF file cannot be dequantised into its folder: {why}",
        where=f"model_name: {file}, dequantised into {folder}",
        hint="set CI_LLM_CACHE to a folder with space and the right to write",
    )


def _bytes_when_dense(file: Path) -> int:
    """The bytes of a file's numbers in fp32. Raises one of `_UNREADABLE` if it is not a whole GGUF file."""
    from transformers.integrations.gguf import GgufHeader

    header, found = GgufHeader.from_file(str(file)), file.stat().st_size
    end = max((header.data_start + tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if not 0 < end <= found:
        raise ValueError(f"it has {found:,} bytes, and its tensors end at byte {end:,}")
    numbers: int = sum(prod(tensor.shape) for tensor in header.tensors)
    return 4 * numbers


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dense model and the tokenizer.

    Raises:
        ValueError: weights are missing. One of `_UNREADABLE`: the file is damaged or foreign.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("it has no tokenizer")
    # Transformers also reads files beside this one, such as an adapter, so it is linked into an empty folder.
    with TemporaryDirectory() as alone:
        Path(alone, "base.gguf").symlink_to(file.absolute())
        opened: dict[str, Any] = {"gguf_file": "base.gguf", "trust_remote_code": False}
        opened["config"] = AutoConfig.from_pretrained(alone, **opened)  # read once: it takes seconds
        tokenizer = AutoTokenizer.from_pretrained(alone, **opened)
        if metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
        dense, whole = GgufConfig(dequantize=True), {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            alone, dtype="float32", quantization_config=dense, **whole, **opened
        )
    if absent := [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]:
        raise ValueError(f"{len(absent)} weights are missing or of another shape, the first is {min(absent)}")
    # Transformers refuses to save a model that was quantised, although its numbers are dense now.
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    model.hf_quantizer, model.is_quantized, model.name_or_path = None, False, file.stem
    # Transformers lets only process 0 save, but any process, on any machine, may be the first here.
    model.should_save_on_this_rank = lambda _: True
    return model.to(_smallest_exact(model)), tokenizer


def _smallest_exact(model: PreTrainedModel) -> torch.dtype:
    """A dtype of 16 bits if it changes no number, as for files in F16 and BF16; otherwise fp32."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight.to(dtype).float(), weight) for weight in model.parameters()):
            return dtype
    return torch.float32
