"""One process of a world that a test launches: makes every exchange between processes.

Usage: world.py FOLDER [then]; writes FOLDER/process_<index>.json. `then` is what happens after that:
"wait" for a signal, or "die" (process 1, without a word).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ci_llm.cluster.launch import read_launch
from ci_llm.interrupts import Interrupts, die_with_parent

CONFIG = SimpleNamespace(
    mixed_precision="bf16", model_dtype=None, global_batch_size=None, batch_size=6, gradient_accumulation_steps=2
)


def talk(processes: Any, folder: Path) -> dict[str, Any]:
    import torch

    from ci_llm.distributed.ballot import Ballot

    index, last = processes.process_index, processes.num_processes - 1
    quiet = processes.agree(Ballot(num_targets=2**40 + index, nonfinite=(False, False)))
    sick = Ballot(
        num_targets=0,
        nonfinite=torch.tensor([False, index == last, False]),
        sums=torch.tensor([0.25, float("nan") if index == last else 1.0]),
        out_of_memory=index == last,
        stop="signal:SIGTERM" if index == last else None,
        save=index == 0,
    )
    with processes.main_process_first():
        seen = (folder / "main was here").exists()
        (folder / "main was here").touch()
    with processes.autocast():
        dtype = str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    return {
        "index": index,
        "count": processes.num_processes,
        "launcher": processes.launch.launcher,
        "device": str(processes.device),
        "num_threads": torch.get_num_threads(),
        "notes": processes.notes,
        "quiet": asdict(quiet),
        "sick": str(processes.agree(sick)),
        "reduced": [digest_of_a_reduction(processes) for _ in range(3)],
        "gathered": processes.gather_object({"index": index}),
        "broadcast": processes.broadcast_object(f"from {index}"),
        "done": processes.on_main(lambda: f"by {index}"),
        "refused": refused_on_main(processes),
        "saw main": seen,
        "dtype": dtype,
        "same folder": refusal(processes, folder / "shared"),
        "own folder": refusal(processes, folder / f"of {index}"),
    }


def digest_of_a_reduction(processes: Any) -> str:
    """Summands of very different size: any other order of summation shows in the bits."""
    import torch

    generator = torch.Generator().manual_seed(processes.process_index)
    flat = torch.randn(100_003, generator=generator).exp().pow(processes.process_index + 1)
    return hashlib.sha256(processes.reduce_flat_(flat).numpy().tobytes()).hexdigest()


def refusal(processes: Any, folder: Path) -> str | None:
    from ci_llm.errors import LaunchError

    try:
        processes.require_same_folder(folder)
    except LaunchError as error:
        return error.what
    return None


def refused_on_main(processes: Any) -> str:
    from ci_llm.errors import WriterBusy

    def refuse() -> None:
        raise WriterBusy(f"process {processes.process_index} is busy", where="here", hint="wait")

    try:
        processes.on_main(refuse)
    except WriterBusy as error:
        return f"{error.exit_code} {error}"
    return "nothing was refused"


def lose_a_peer(processes: Any) -> dict[str, Any]:
    from ci_llm.distributed.ballot import Ballot
    from ci_llm.errors import PeerLost

    if processes.process_index == 1:
        os._exit(9)
    try:
        processes.agree(Ballot(num_targets=1))
    except PeerLost as error:
        return {"lost": error.what}
    return {"lost": None}


def trial(folder: str, then: str = "end") -> int:
    """For the fork server."""
    main(Path(folder), then)
    return 0


def main(folder: Path, then: str) -> None:
    with Interrupts() as interrupts:
        launch = read_launch()
        if not launch.forwards_sigterm:
            die_with_parent()
        from ci_llm.distributed.processes import Processes

        processes = Processes(CONFIG)  # type: ignore[arg-type]
        told = talk(processes, folder)
        if then == "die":
            told |= lose_a_peer(processes)
        if then == "wait":
            print("waiting", flush=True)
            told["heard"] = interrupts.wait() and interrupts.stop_reason
        told["left"] = processes.shutdown()
        told["tokens left"] = [path.name for path in folder.rglob(".launch-*")] if then != "die" else []
        (folder / f"process_{launch.process_index}.json").write_text(json.dumps(told))
        print("told", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "end")
