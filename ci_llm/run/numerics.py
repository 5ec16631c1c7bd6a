"""What decides the bits of a run: names of processor, libraries and settings, and the digest of one of its layers.

Names alone promise nothing: a library picks its kernels by what it finds, and may pick others under the same names.
So one decoder layer and the head of the run are computed as well, forward and backward, on fixed tokens and by the code
that trains. A resumed run is called bitwise only where names and digest are both those of the checkpoint.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ci_llm._version import __version__
from ci_llm.base.targets import layer_list, layer_numbers
from ci_llm.checkpoints.manifest import digest
from ci_llm.core import determinism
from ci_llm.crowd.model import Crowd
from ci_llm.data.agent_rows import AgentRows, TrainingRows, sampled
from ci_llm.data.batches import AgentBatches, MicroBatch, pack
from ci_llm.data.encoder import Example
from ci_llm.lora.passes import describe_error

#: The version of this package's own arithmetic. Raise it with every change of ours that changes bits: another order of
#: a sum, another operation, another draw.
NUMERICS: Final = 1

LIBRARIES: Final = ("accelerate", "numpy", "safetensors", "tokenizers", "torch", "transformers")
#: Variables of the environment by which a library picks its kernels.
SETTINGS: Final = {
    "cpu": re.compile(r"ATEN_CPU_CAPABILITY|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS|ONEDNN_MAX_CPU_ISA|DNNL_\w+"),
    "cuda": re.compile(r"CUBLAS_WORKSPACE_CONFIG|CUBLASLT_\w+|CUDNN_\w+|NVIDIA_TF32_OVERRIDE"),
}
#: Units of a processor with kernels of their own, beside those that torch's capability stands for.
UNITS: Final = frozenset(
    {"avx_vnni", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_fp16", "amx_int8"}
    | {"bf16", "i8mm", "sve", "sve2"}
)
MOST_TOKENS: Final = 512  # of the fixed rows: as many as show which kernels are taken
WEIGHTS_UP_TO: Final = 0.05  # of the fixed agents: with B = 0 half of their products would be zero
NOT_A_STEP: Final = -1  # keys what is drawn
UNKNOWN: Final = "not set"


def names(device: torch.device) -> dict[str, Any]:
    """Everything with a name that decides bits on this device in this process; `differences` compares two of them."""
    pattern = SETTINGS["cuda" if device.type == "cuda" else "cpu"]
    return {
        "numerics": NUMERICS,
        "machine": _gpu(device) if device.type == "cuda" else {"processor": processor(), "instruction set": _units()},
        "settings": {key: value for key, value in sorted(os.environ.items()) if pattern.fullmatch(key)},
        "versions": {"ci_llm": __version__} | {name: version(name) for name in LIBRARIES} | _built_in(),
    }


def names_of_all(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The names of the first process, and what is called otherwise in another one."""
    found = {**each[0]}
    for kind in ("machine", "settings"):
        own = {f"{key} of process {i}": value for i, names in enumerate(each) for key, value in names[kind].items()}
        odd = {key: value for key, value in own.items() if found[kind].get(key.partition(" of process ")[0]) != value}
        found[kind] = found[kind] | odd
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is called otherwise than before, in words."""
    odd = [f"another {key}: {new}, was {old}" for key, old, new in _changed(before, now, "machine")]
    for key, old, new in _changed(before, now, "settings"):
        odd.append(f"{key} {UNKNOWN}, was {old}" if new == UNKNOWN else f"{key}={new}, was {old}")
    if before["numerics"] != now["numerics"]:
        odd.append(f"the arithmetic of ci-llm is another one: numerics {now['numerics']}, was {before['numerics']}")
    return odd


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, str]]:
    """(name, its value before, its value now) of what has changed."""
    for key in {**before[kind], **now[kind]}:
        old, new = (names[kind].get(key, UNKNOWN) for names in (before, now))
        if old != new:
            yield key, old, new


def processor() -> str:
    """The model of this machine's processor, as its maker calls it."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # no Linux
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _units() -> str:
    """Architecture, the vector units that torch uses, and what else the processor has."""
    try:
        words = {*re.split(r"[\s:]+", Path("/proc/cpuinfo").read_text())}
    except OSError:
        words = set()
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *sorted(UNITS & words)])


def _gpu(device: torch.device) -> dict[str, str]:
    about = torch.cuda.get_device_capability(device)
    try:
        driver = re.search(r"\s(\d+(?:\.\d+)+)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:  # a container may hide it
        driver = None
    return {
        "GPU": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, about)),
        "driver": driver[1] if driver else "unknown",
        "cuDNN": str(torch.backends.cudnn.version()),
    }


def _built_in() -> dict[str, str]:
    """Versions of the libraries inside of torch that compute its products."""
    kinds = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
    found = {name: re.search(pattern, torch.__config__.show()) for name, pattern in kinds.items()}
    return {name: match[1] for name, match in found.items() if match}


def longest_lengths(rows: TrainingRows, count: int) -> list[int]:
    """Tokens of each row of the longest micro-batch of `count` rows, by a sample; at most `MOST_TOKENS` in all."""
    each = rows.each if isinstance(rows, AgentRows) else [rows]
    lengths: list[int] = []
    for length in sorted((len(row.input_ids) for row in sampled(each)), reverse=True)[:count]:
        if sum(lengths) + min(length, MOST_TOKENS) <= MOST_TOKENS:
            lengths.append(min(length, MOST_TOKENS))
    return lengths


class Summed(Protocol):
    """What training on micro-batches returns."""

    sums: Tensor


Train = Callable[[list[MicroBatch]], Summed]


def layer_digest(crowd: Crowd, batch: MicroBatch, train: Train) -> str:
    """xxh3-128 of what one decoder layer and the head give: outputs, losses, gradients of the agents.

    Generators, weights, gradients and mode are afterwards as they were before. A base whose layers cannot be run by
    themselves is run whole.

    Args:
        batch: see `fixed_batch`.
        train: forward and backward on micro-batches, as the run does it.
    """
    try:
        return _digest(crowd, batch, train, alone=True)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        describe_error(error)  # raises what says nothing about the base
    return _digest(crowd, batch, train, alone=False)


def fixed_batch(crowd: Crowd, lengths: Sequence[int], *, own_rows: bool) -> MicroBatch:
    """Rows of these lengths with fixed tokens, all of them targets; the same for each agent that has its own.

    Their numbers are below zero: no data set has them.
    """
    draw = determinism.generator_for(0, "fixed tokens")
    vocabulary = crowd.model.get_input_embeddings().weight.shape[0]
    ids = [torch.randint(0, vocabulary, (length,), generator=draw).numpy() for length in lengths]
    rows = [Example(each, np.arange(len(each)) > 0) for each in ids]
    batch = pack(rows, range(-len(rows), 0))
    return AgentBatches((batch,) * crowd.num_agents) if own_rows else batch


def _digest(crowd: Crowd, batch: MicroBatch, train: Train, *, alone: bool) -> str:
    found: list[Any] = []
    with ExitStack() as after:
        layer = after.enter_context(_one_layer(crowd)) if alone else crowd.model.base_model
        trained = [each for each in layer.parameters() if each.requires_grad]
        after.enter_context(_without_a_trace(crowd, trained))
        hook = layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output))
        after.callback(hook.remove)
        found += [train([batch.to(crowd.device)]).sums, [each.grad for each in trained]]
        return digest(_bytes(each) for each in tree_leaves(found) if isinstance(each, Tensor))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def _one_layer(crowd: Crowd) -> Iterator[nn.Module]:
    """Leave the base its first layer with an adapter, and no other one."""
    agents, model = crowd.agents, crowd.model
    name, layers = layer_list(model)
    layer = layers[min(layer_numbers(model, agents.layers).values())]
    every, trunk = model.get_submodule(name), agents.trunk
    model.set_submodule(name, nn.ModuleList([layer]))
    agents.trunk = None
    try:
        yield layer
    finally:
        model.set_submodule(name, every)
        agents.trunk = trunk


@contextmanager
def _without_a_trace(crowd: Crowd, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give these parameters fixed numbers inside, and everything what it had afterwards."""
    agents, training, generators = crowd.agents, crowd.training, determinism.capture()
    kept, key, draw = [each.detach().clone() for each in trained], agents.dropout.micro_step, torch.Generator()
    draw.manual_seed(0)
    try:
        with torch.no_grad():
            for each in trained:
                each.copy_(torch.empty(each.shape).uniform_(-WEIGHTS_UP_TO, WEIGHTS_UP_TO, generator=draw))
        yield
    finally:
        with torch.no_grad():
            for each, numbers in zip(trained, kept, strict=True):
                each.copy_(numbers)
        agents.take_gradients_away()
        agents.dropout.micro_step = key
        crowd.train(training)
        determinism.restore(generators)
