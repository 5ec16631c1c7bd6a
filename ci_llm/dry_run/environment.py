"""Checks of the environment of a run: libraries, disk, precision, port, processes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from ci_llm.core.determinism import processor
from ci_llm.core.durable import remove_tree, write_bytes
from ci_llm.core.quantities import size
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.precision import check_precision, chosen, runs_on_cpu, speed_of_bf16
from ci_llm.distributed.processes import Processes, check_process_group
from ci_llm.dry_run.context import CheckContext
from ci_llm.errors import ConfigError, LaunchError
from ci_llm.logs.trackers import require_installed
from ci_llm.mirror.objects import open_objects, require_writable
from ci_llm.run.trainer import check_folder

PROBE_BYTES = 8 << 20
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "datasets")


def environment(context: CheckContext) -> str:
    """Libraries, device and trackers are there."""
    require_installed(context.config.report_to)
    device = f"{processor()}, no GPU" if runs_on_cpu() else torch.cuda.get_device_name()
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return f"Python {platform.python_version()}, {libraries}; {device}, {torch.get_num_threads()} CPU thread(s)"


def disk(context: CheckContext) -> str:
    """The folder of the run can be written, and a file on its disk can be synced and renamed."""
    folder = context.config.run_folder
    check_folder(folder)
    if not context.launch.is_main_process:
        return ""
    place = scratch_parent(folder)
    try:
        context.scratch = Path(tempfile.mkdtemp(prefix=".ci_llm_check_", dir=place))
        context.at_end.callback(_remove_scratch, context.scratch)
        start = time.perf_counter()
        write_bytes(context.scratch / "probe", os.urandom(PROBE_BYTES))
        speed = PROBE_BYTES / (time.perf_counter() - start)
    except OSError as error:
        raise ConfigError(
            f"a file cannot be made durable here: {error.strerror}",
            where=str(place),
            hint="give an output_dir on a disk that works and has space",
        ) from error
    return f"{folder} can be written, {size(speed)}/s to the device, {size(shutil.disk_usage(place).free)} free"


def mirror(context: CheckContext) -> str:
    """The store of the mirror writes, reads, conditionally replaces and removes an object."""
    if (url := context.config.mirror) is None:
        return "none is configured"
    if context.launch.is_main_process:
        require_writable(open_objects(url))
    return f"{url} can be written"


def scratch_parent(folder: Path) -> Path:
    """The folder for the scratch folder: beside that of the run if possible, on the same disk."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if nearest != folder.absolute():
        return nearest
    same_disk = nearest.parent.stat().st_dev == nearest.stat().st_dev
    return nearest.parent if same_disk and os.access(nearest.parent, os.W_OK) else nearest


def _remove_scratch(folder: Path) -> None:
    try:
        remove_tree(folder)
    except OSError as error:
        print(f"a folder of the dry run stays: {error}", file=sys.stderr)


def precision(context: CheckContext) -> str:
    """The device supports the precision of the configuration."""
    speed = speed_of_bf16()
    choice = chosen(context.config, speed)
    config = context.config.model_copy(update=choice)
    check_precision(config)
    base = config.model_dtype or ("fp32" if runs_on_cpu() else "the checkpoint's own")
    mixed = config.mixed_precision
    stored = f", its linear layers in {context.config.quantization}" if context.config.quantization else ""
    why = f" (auto: {speed.why})" if choice else ""
    return f"base in {base}{stored}" + ("" if mixed == "no" else f", forward pass in {mixed}") + why


def port(context: CheckContext) -> str:
    """The processes of this launch connect; a single process connects to itself for a moment."""
    met = check_process_group() if context.launch.num_processes == 1 else None
    context.processes = Processes(context.config, launch=context.launch, interrupts=context.interrupts)
    context.config, _ = context.processes.settle_precision(context.config)
    context.at_end.callback(context.processes.shutdown)
    if met:
        return met
    address = context.launch.variables
    return f"{context.processes.num_processes} processes met at {address['MASTER_ADDR']}:{address['MASTER_PORT']}"


def accelerate(context: CheckContext) -> str:
    """Processes vote, reduce, broadcast and see one folder; autocast has the precision of the configuration."""
    processes = context.processes
    numbers = list(range(processes.num_processes))
    verdict = processes.agree(Ballot(num_targets=1, sums=[float(processes.process_index)]))
    total = processes.reduce_flat_(torch.ones(3, device=processes.device)).tolist()
    if (verdict.num_targets, verdict.sums) != (len(numbers), (float(sum(numbers)),)) or total != [len(numbers)] * 3:
        raise LaunchError(f"processes do not add up: {verdict}, {total}", where=str(processes.device))
    context.scratch = processes.broadcast_object(context.scratch if processes.is_main_process else Path())
    processes.require_same_folder(context.scratch)
    with processes.autocast():
        dtype = (torch.ones(2, 2, device=processes.device) @ torch.ones(2, 2, device=processes.device)).dtype
    precision = str(dtype).removeprefix("torch.")
    return f"{processes.num_processes} process(es) on {processes.device.type}, {precision}, one sum"
