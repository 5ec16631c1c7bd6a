"""The first ten minutes of a GPU: what a step of K agents costs beside K runs of PEFT, in one table.

    python -m benchmarks.gpu [--to build/gpu] [--minutes 10] [--model FOLDER]

Each case is written to a file when it ends; a second call runs those that are missing, failed or were cut off.
Bases have the shapes of real ones and random weights; `--model` adds a real one. Rows are as long as those of GSM8K.
A step is forward, backward, ballot, clipping and AdamW in bf16, at rank 16 on all projections. Times are medians, from
idle to idle. PEFT trains one agent at a time: its time counts K times, its memory once. MFU is the share of the speed
that a large product reaches on this GPU. Kernels and waits are counted by the profiler in one step.

`python -m tools.testbed.accelerator --program benchmarks/gpu.py --tiny` runs it without a GPU: its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import peft
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks import harness
from benchmarks.floor import necessary_flops
from benchmarks.step import ALPHA, LEARNING_RATE, MAX_NORM, PROJECTIONS, RANK, Ours, rectangle
from ci_llm.base.load import load_base
from ci_llm.core.durable import make_folders, read_json, write_json
from ci_llm.core.memory import is_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import CiLlmError, first_line
from ci_llm.run.exactness import fixed_batch, layer_digest

Figures = dict[str, Any]

QWEN: Final = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
#: Of 32 layers, because a base in 4 bits is quantised from files, and 16 GB of them take too long.
LLAMA: Final = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
TINY: Final = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AGENTS: Final = (1, 4, 16)
COLUMNS: Final = ("ms", "GB", "tokens/s", "MFU", "kernels", "waits", "what")
DEVICE: Final = torch.device("cuda")


@dataclass(frozen=True)
class Bench:
    """The base and the measurements that the cases share.

    Attributes:
        tiny: toy sizes, for a trial of the program itself, and no 4 bits, whose kernels need a real GPU.
        model: the folder of a real base; None: only random ones.
    """

    tiny: bool
    model: Path | None

    @property
    def rows(self) -> int:
        """The rows of a step."""
        return 1 if self.tiny else 8

    @property
    def side(self) -> int:
        """Rows and columns of a large product."""
        return 64 if self.tiny else 8192

    def batches(self) -> list[Batch]:
        """Two that warm up, those to measure, and one to count in. Each has lengths that no step before it had."""
        words = TINY["vocab_size"] if self.tiny else harness.VOCABULARY
        drawn = harness.batches(None, self.rows, 4 if self.tiny else 8)
        known = (replace(each, input_ids=each.input_ids % words, targets=each.targets % words) for each in drawn)
        return [each.pinned() for each in known]

    def cases(self) -> Iterator[tuple[str, Callable[[], Figures]]]:
        """Every case by its name, in the order in which they are worth most."""
        yield "digest", self.digest
        for agents in AGENTS[: 2 if self.tiny else None]:
            yield from self._of_a_base(f"0.5B, K={agents}", self.qwen, agents)
        yield from self._of_a_base("8 layers of 8B in nf4, K=4", self.llama_nf4, 4)
        if self.model is not None:
            yield from self._of_a_base(f"{self.model.name}, K=4", lambda: _loaded(self.model), 4)

    def _of_a_base(
        self, name: str, base: Callable[[], PreTrainedModel], agents: int
    ) -> Iterator[tuple[str, Callable[[], Figures]]]:
        yield f"{name}: one pass", lambda: self.ours(base(), agents, pass_per_agent=False)
        yield f"{name}: a pass per agent", lambda: self.ours(base(), agents, pass_per_agent=True)
        yield f"{name}: PEFT, one by one", lambda: self.by_peft(base(), agents)

    def qwen(self) -> PreTrainedModel:
        """Qwen2.5-0.5B's shapes."""
        shape = QWEN | TINY if self.tiny else QWEN
        return _random(Qwen2Config(**shape))

    def llama_nf4(self) -> PreTrainedModel:
        """Llama 3.1 8B's shapes, in 4 bits."""
        shape = LLAMA | TINY if self.tiny else LLAMA
        with tempfile.TemporaryDirectory() as folder:
            _random(LlamaConfig(**shape)).save_pretrained(folder)
            AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
            return _loaded(Path(folder), None if self.tiny else "nf4")

    def digest(self) -> Figures:
        """The digest of a layer, by which runs compare machines; computed twice, it should be the same."""
        run = Ours(self.qwen(), agents=2)
        batch = fixed_batch(run.crowd, (128, 64), own_rows=False)
        one, other = (layer_digest(run.crowd, batch, partial(run.compute_gradients, 0)) for _ in range(2))
        return {"what": f"{one}, {'the same twice' if one == other else f'then {other}'}"}

    def ours(self, base: PreTrainedModel, agents: int, *, pass_per_agent: bool) -> Figures:
        """A step of this package."""
        run = Ours(base, agents=agents)
        run.crowd.base_model.choose_attention()
        run.crowd.storage.pass_per_agent = pass_per_agent
        dense = not hasattr(base.config, "quantization_config")  # else a weight does not tell its shape
        return self.measured(run.move, agents, run.crowd if dense else None) | {
            "what": f"by {run.crowd.base_model.attention}"
        }

    def by_peft(self, base: PreTrainedModel, agents: int) -> Figures:
        """A step of one adapter by PEFT and Transformers, as often as there are agents."""
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=PROJECTIONS)
        model = peft.get_peft_model(base, config).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)

        def step(batch: Batch) -> None:
            inputs = {name: each.to(DEVICE, non_blocking=True) for name, each in rectangle(batch).items()}
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return self.measured(step, agents, times=agents) | {"what": "memory of one agent"}

    def measured(
        self, step: Callable[[Batch], object], agents: int, crowd: Crowd | None = None, times: int = 1
    ) -> Figures:
        """The median over batches; `times` of the steps make one of all agents. With a crowd, its MFU."""
        batches = self.batches()
        torch.cuda.reset_peak_memory_stats()
        each = [_seconds(partial(step, batch)) for batch in batches[:-1]]
        nbytes = torch.cuda.max_memory_allocated()
        kernels, waits = counted(partial(step, batches[-1]))
        seconds, middle = times * statistics.median(each[2:]), batches[2]
        flops = 0.0 if crowd is None else necessary_flops(crowd, middle)
        return {
            "ms": round(1e3 * seconds, 1),
            "GB": round(nbytes / 1e9, 2),
            "tokens/s": round(agents * middle.num_tokens / seconds),
            "MFU": round(flops / seconds / self.flops_per_s(), 3) if flops else None,
            "kernels": times * kernels,
            "waits": times * waits,
        }

    def flops_per_s(self) -> float:
        """The speed of a large product in bf16."""
        matrix = torch.ones(self.side, self.side, dtype=torch.bfloat16, device=DEVICE)
        return float(2 * self.side**3 / min(_seconds(lambda: matrix @ matrix) for _ in range(4)))


def _random(shape: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    with DEVICE:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model


def _loaded(folder: Path | None, quantization: Any = None) -> PreTrainedModel:
    return load_base(str(folder), "bf16", DEVICE, quantization).model


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """(kernels and copies that run on the device, calls in which the host waits for it) of some work."""
    simulated = sys.modules.get("tools.testbed.accelerator.face")
    if simulated is not None:  # whose launches the profiler does not see
        trace = simulated.TRACE
        trace.phase = f"counted {time.perf_counter_ns()}"
        work()
        own = trace.phase
        trace.phase = "after"
        return tuple(sum(n for (p, *_), n in c.items() if p == own) for c in (trace.launches, trace.waits))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
    events = profile.events()
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(on_device), sum("Synchronize" in event.name for event in events)


def attempted(case: Callable[[], Figures]) -> Figures:
    """The figures of a case, or the reason for which there are none."""
    try:
        return case()
    except (CiLlmError, RuntimeError, ValueError, TypeError, ImportError) as error:  # the other cases still run
        reason = "out of memory" if is_out_of_memory(error) else first_line(error)
        return {"failed": reason}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def table(found: dict[str, Figures]) -> str:
    """In markdown, with what failed and what is missing."""
    about = torch.cuda.get_device_properties(DEVICE)
    lines = [
        f"{about.name}, {about.total_memory / 1e9:.0f} GB, torch {torch.__version__}\n",
        f"| case | {' | '.join(COLUMNS)} |\n|---{'|---' * len(COLUMNS)}|",
    ]
    for name, figures in found.items():
        what = f"failed: {figures['failed']}" if "failed" in figures else figures.get("what", "")
        cells = [*("" if figures.get(column) is None else str(figures[column]) for column in COLUMNS[:-1]), what]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs what is missing, and prints and writes the table; the exit code is 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("build/gpu"), help="a folder (default: build/gpu)")
    parser.add_argument("--minutes", type=float, default=10.0, help="no case begins later (default: 10)")
    parser.add_argument("--model", type=Path, help="the folder of a real base, measured as well")
    parser.add_argument("--tiny", action="store_true", help="toy shapes: a trial of this program")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU; python -m tools.testbed.accelerator --program benchmarks/gpu.py --tiny tries it")
    make_folders(options.to)
    until, found = time.monotonic() + 60 * options.minutes, {}
    for name, case in Bench(options.tiny, options.model).cases():
        file = options.to / f"{name.replace(' ', '_').replace('/', '_').replace(':', '')}.json"
        figures: Any = read_json(file) if file.exists() else {"failed": "cut off"}
        if "failed" in figures and time.monotonic() < until:
            print(f"{name} ...", flush=True)
            figures = attempted(case)
            write_json(file, figures)
        found[name] = figures
    (options.to / "table.md").write_text(f"{table(found)}\n", encoding="utf-8")
    print(table(found))
    return int(any("failed" in figures for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
