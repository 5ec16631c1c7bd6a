"""A run that the first release saved at step 12 of 24, and that a kill ended, resumes here to the bits it had there.

Its config.yaml holds options that are no keys any more.

The fixture holds the killed run, and of the undisturbed one the manifest and the adapters at step 24, as the processor
of that day computed them. `ends.json` has the bits to which the first release itself resumes on other machines, by a
digest of what such a machine computes without a line of this package: were it our own digest, a change of ours would
change it too, and nothing would be compared any more. On a machine with another digest the adapters are compared to a
tolerance. The test prints which.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ci_llm.checkpoints.manifest import FileImage, read_manifest
from ci_llm.config.foreign import NO_EFFECT
from ci_llm.embedded import BASE_FOLDER
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import train_watched

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures/first_wave"
KEYS: dict[str, Any] = {
    "num_agents": 2,
    "lora_rank": 2,
    "lora_alpha": 4,
    "lora_dropout": 0.1,
    "dropconnect_p": 0.05,
    "max_train_samples": 40,
    "max_train_steps": 24,
    "batch_size": 2,
    "learning_rate": 4e-3,
    "num_warmup_steps_ratio": 0.08,
    "lr_scheduler_type": "cosine",
    "max_seq_length": 256,
    "num_workers": 0,
    "logging_steps": 1,
    "eval_samples": 4,
    "max_new_tokens_eval": 8,
    "save_steps": 12,
    "save_interval_seconds": "null",
    "report_to": "none",
    "write_report": "false",
    "output_dir": "killed",
}
LONG_AGO = 1_700_000_000
SAME_WEIGHTS = 1e-3  # what another processor or library makes of 12 steps: Adam turns a rounded sign into a full step


@pytest.mark.usefixtures("threads_as_they_were")
@pytest.mark.parametrize(("backend", "ranks"), [("vanilla", 1), ("distributed", 2)])
def test_a_run_of_the_first_release_ends_with_its_bits(
    server: ForkServer, tmp_path: Path, backend: str, ranks: int
) -> None:
    take_killed(backend, tmp_path)
    said = resume(server, tmp_path, backend, ranks)
    require_end(tmp_path, backend, said)


#: What asks for something that has no effect, as a file has it.
ASKED = {
    "parallel_mode": "true",
    "greater_is_better": "false",
    "use_deepspeed": "true",
    "deepspeed_config_file": '"ds.json"',
    "streaming": "true",
    "compile": "true",
}


@pytest.mark.parametrize("words", [[], [f"{name}={value}" for name, value in ASKED.items()]], ids=["gone", "given"])
def test_an_option_without_effect_changes_nothing_whether_the_old_run_or_this_one_has_it(
    server: ForkServer, tmp_path: Path, words: list[str]
) -> None:
    take_killed("vanilla", tmp_path)
    if not words:
        record_asked(tmp_path / "killed/checkpoint_step_12")
    said = resume(server, tmp_path, "vanilla", 1, words)
    require_end(tmp_path, "vanilla", said)
    assert "another run" not in said
    repeats_the_words = "num_agents=2"
    lines = [line for line in said.splitlines() if repeats_the_words not in line]
    reasons = [f"{name} has no effect: {why}" for name, why in NO_EFFECT.items()] if words else []
    assert [line for line in lines if any(name in line for name in ASKED)] == reasons
    assert not [name for name in ASKED if name in (tmp_path / "killed/checkpoint_step_24/config.yaml").read_text()]


def take_killed(backend: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / backend / "killed", tmp_path / "killed", copy_function=shutil.copyfile)
    for path in (tmp_path / "killed/.attempt-1").iterdir():  # its heartbeat is as old as the checkout otherwise
        os.utime(path, (LONG_AGO, LONG_AGO))


def record_asked(checkpoint: Path) -> None:
    """Make the checkpoint one of a run that asked for every option without effect."""
    file = checkpoint / "config.yaml"
    lines = [line.partition(": ")[::2] for line in file.read_text().splitlines()]
    assert {*ASKED} <= {key for key, _ in lines}
    data = "".join(f"{key}: {ASKED.get(key, value)}\n" if value else f"{key}\n" for key, value in lines).encode()
    manifest = read_manifest(checkpoint)
    file.write_bytes(data)
    changed = replace(manifest, files={**manifest.files, file.name: FileImage((data,)).record()})
    (checkpoint / "manifest.json").write_bytes(changed.dump())


def resume(server: ForkServer, tmp_path: Path, backend: str, ranks: int, words: Iterable[str] = ()) -> str:
    """Resume the run; returns its log."""
    arguments = [f"{key}={value}" for key, value in {**KEYS, "checkpoint_backend": backend}.items()]
    log = tmp_path / "log"
    codes = server.run(train_watched, log, ranks=ranks, folder=str(tmp_path), arguments=[*arguments, *words], fate=None)
    said = log.read_text()
    assert codes == [0] * ranks, said
    assert "step 12 of 24, verified" in said
    return said


def require_end(tmp_path: Path, backend: str, said: str) -> None:
    final, there = tmp_path / "killed/checkpoint_step_24", FIXTURES / backend / "final"
    machine = machine_digest()
    ends: Any = json.loads((FIXTURES / backend / "ends.json").read_text())
    if machine in ends:
        print(f"bit for bit: machine {machine} is known")
        assert digests(final) == ends[machine]["tensors"]
        assert layer_digests(final) == ends[machine]["layer"]
    else:
        print(f"to a tolerance: machine {machine} is not known; this end has {digests(final)}, {layer_digests(final)}")
    for agent in ("agent0", "agent1"):
        ours, theirs = (load_file(folder / agent / "adapter_model.safetensors") for folder in (final, there))
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], atol=SAME_WEIGHTS, rtol=0)


def machine_digest() -> str:
    """Of the logits and gradients of the embedded base, by Transformers and torch alone."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (2, 82), generator=torch.Generator().manual_seed(0))
    states = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=states, use_cache=False).logits
    logits.log_softmax(-1).gather(2, ids[..., None]).sum().backward()
    digest = xxhash.xxh3_128()
    for tensor in (logits.detach(), states.grad, *(parameter.grad for parameter in model.parameters())):
        if tensor is not None:
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def layer_digests(folder: Path) -> list[str]:
    """What the run itself says of the machine, one of each process; see `ci_llm/run/one_layer.py`."""
    manifest: Any = json.loads((folder / "manifest.json").read_text())
    found: list[str] = manifest["surroundings"]["layer"]["digests"]
    return found


def digests(folder: Path) -> dict[str, str]:
    """Of every tensor of the agents and of their moments."""
    files: Any = json.loads((folder / "manifest.json").read_text())["files"]
    return {
        f"{file}: {name}": digest
        for file, record in files.items()
        if file.startswith(("agent", "optimizer")) and "tensors" in record
        for name, digest in record["tensors"].items()
    }
