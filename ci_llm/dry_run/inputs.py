"""Checks before the toy run: environment, base, data and chat template; then memory for a batch, disk and time.

Disk and time follow from measurements of the toy run if there are any; else they are estimated.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.load import load_architecture, opened_by, positions_of, require_positions
from ci_llm.config.own_keys import AUTO
from ci_llm.core.determinism import processor
from ci_llm.core.durable import remove_tree, write_bytes
from ci_llm.core.memory import free_memory
from ci_llm.core.quantities import duration, short, size
from ci_llm.data.agent_rows import SAMPLED, once_each
from ci_llm.data.encoder import use_chat_template
from ci_llm.data.rows import Rows
from ci_llm.data.sources import load_rows_of_each
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.precision import check_precision, chosen, runs_on_cpu, speed_of_bf16
from ci_llm.distributed.processes import Processes, check_process_group
from ci_llm.dry_run.context import TOY_EVAL_ROWS, TOY_STEPS, CheckContext
from ci_llm.errors import ConfigError, LaunchError, ModelError, first_line
from ci_llm.logs.trackers import require_installed
from ci_llm.lora.heads import how_tokenized
from ci_llm.mirror.objects import open_objects, require_writable
from ci_llm.run.start import cost_model
from ci_llm.run.start.loading import completion_length, eval_samples_of, learns_preferred, objective_by_rows, steps_of
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
    context.config, _ = context.processes.choose_precision(context.config)
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


# The input and the needs

#: The memory that CUDA, its libraries and torch take on a GPU for themselves, roughly.
CUDA_CONTEXT_BYTES = 10**9


def architecture(context: CheckContext) -> str:
    """The base is a known architecture, a causal language model."""
    context.shape = load_architecture(context.config.model_name)
    text = context.shape.get_text_config()
    layers, width = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    limit = positions_of(context.shape) or "any number of"
    return f"{text.model_type}, {layers} layers of {width}, {text.vocab_size} tokens, {limit} positions"


def data(context: CheckContext) -> str:
    """The data set exists, has columns that can be used, and rows to train on and to evaluate on."""
    context.rows = load_rows_of_each(context.config, "train")
    context.settle(objective_by_rows(context.config, context.rows, context.rows_per_step))
    if context.config.is_open("eval_samples"):
        samples = eval_samples_of(context.config, [*map(len, context.rows)], context.rows_per_step)
        context.settle({"eval_samples": samples})
    context.eval_rows = load_rows_of_each(context.config, "eval")
    found = dict.fromkeys(rows.description[0] for rows in context.rows)
    return f"{'; '.join(found)}; {context.num_eval_rows} to evaluate on"


def template(context: CheckContext) -> str:
    """Rows become tokens, and the learned part of them is found under the chat template in force."""
    tokenizer = _tokenizer(context)
    use_chat_template(tokenizer, context.config.chat_template)
    number = context.processes.num_processes
    wanted = max(SAMPLED, TOY_STEPS * context.toy_batch * number)
    longest = (positions_of(context.shape) or sys.maxsize) if context.config.is_open("max_seq_length") else None
    sampled = partial(_sampled, context, tokenizer, longest or context.config.max_seq_length)
    context.examples = once_each(context.rows, partial(sampled, wanted))
    context.eval_examples = once_each(context.eval_rows, partial(sampled, TOY_EVAL_ROWS * number, evaluated=True))
    if longest is not None:
        seen = max(examples.facts.longest for examples in context.examples)
        context.settle({"max_seq_length": seen})
    each = {id(examples): examples for examples in context.examples}.values()
    if context.config.objective == "grpo":
        context.settle(completion_length(context.config, context.examples, positions_of(context.shape)))
    found = [examples[number] for examples in each for number in range(len(examples))]
    context.lengths = cost_model.lengths_of(context.config, found)
    lines: list[str] = []
    for rows, examples in {id(each[1]): each for each in zip(context.rows, context.examples, strict=True)}.values():
        source, *more = examples.description[len(rows.description) :]
        lines += [f"{source}; of {wanted if wanted < len(rows) else 'all'} rows:", *more, *examples.facts.warnings]
    return "\n".join([*lines, *(f"auto: {line}" for line in context.config.told_auto())])


def _tokenizer(context: CheckContext) -> PreTrainedTokenizerBase:
    name = context.config.model_name
    try:
        return AutoTokenizer.from_pretrained(opened_by(name), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the base's tokenizer cannot be loaded: {first_line(error)}",
            where=f"model_name: {name}",
            hint="put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


def _sampled(
    context: CheckContext,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    most: int,
    rows: Rows,
    *,
    evaluated: bool = False,
) -> TokenizedRows:
    """Some of the rows, evenly spread, tokenised into the scratch folder."""
    taken = min(most, len(rows))
    return tokenize(
        rows.select([at * len(rows) // taken for at in range(taken)]),
        tokenizer,
        max_seq_length=max_seq_length,
        train_on_prompt=context.config.train_on_prompt,
        learn_preferred=learns_preferred(context.config, rows),
        **how_tokenized(context.config, context.shape, tokenizer),
        evaluated=evaluated,
        cache_folder=context.scratch / "tokens",
        main_process_first=context.processes.main_process_first(),
    )


def estimate(context: CheckContext) -> str:
    """The cost of one micro-step, found without weights."""
    try:
        settled, _ = cost_model.passes_without_estimate(context.config, context.processes.device)
        becomes = _settle(context, "pass_per_agent", settled) + _settle(context, "use_gradient_checkpointing", None)
        context.trace = found = _traced(context)
    except cost_model.Untraceable as error:
        return f"this architecture cannot be traced without weights: {error}"
    if context.config.base_sharding == "layers" and context.processes.num_processes == 1:
        becomes += "\none process shares the base with nobody: start this check as the run will be started"
    return (
        f"{short(found.base_parameters)} parameters, {context.config.num_agents} agents of"
        f" {short(found.agent_parameters)}; a micro-step of {_micro_batch(context)}"
        f" takes {found.flops / 1e12:.2g} TFLOP{becomes}"
    )


def _settle(context: CheckContext, key: str, settled: bool | None) -> str:
    """Put true or false in place of auto, as the run will; returns a line for people.

    Args:
        settled: the value; None: true if the micro-step would not fit otherwise.
    """
    if getattr(context.config, key) != AUTO:
        return ""
    if settled is None:
        context.settle({key: False})
        found = _traced(context)
        settled = cost_model.recompute_on_all(
            found, context.processes.free_memory() - found.base_bytes, context.processes
        )
    context.settle({key: settled})
    return f"\n{key}=auto becomes {str(settled).lower()} on this machine"


def _traced(context: CheckContext) -> cost_model.Trace:
    """The cost of a micro-step with the configuration of the run."""
    processes = context.processes
    return cost_model.trace_longest(
        context.config, context.shape, processes.device, context.micro_batch, context.lengths, processes.num_processes
    )


def _micro_batch(context: CheckContext) -> str:
    source = "at worst" if context.lengths.sampled else "by max_seq_length"
    return f"{context.micro_batch * context.lengths.branches} rows of {context.longest_tokens} tokens ({source})"


def batch(context: CheckContext) -> str:
    """One micro-batch fits: into the positions of the base, and into the memory of this machine."""
    if not context.config.is_open("max_seq_length"):
        require_positions(context.shape, context.config.max_seq_length)
    found, device = context.trace, context.processes.device
    if found is None:
        return f"{_micro_batch(context)} fit the base's positions; memory is not estimated"
    on_cpu = device.type == "cpu"
    own = context.program_bytes if on_cpu else CUDA_CONTEXT_BYTES
    together = context.launch.num_local_processes if on_cpu else 1
    free, total = free_memory(device)
    taken = together * found.device_bytes + (0 if on_cpu else own)  # on a CPU this program is in memory already
    needed = together * (found.device_bytes + own)
    agents = f"{context.config.num_agents} agents {size(found.agents_bytes)}"
    per_token = found.activation_bytes / (context.micro_batch * context.lengths.branches * context.longest_tokens)
    activations = f"activations {size(found.activation_bytes)}, {size(per_token)} per token"
    parts = f"base {size(found.base_bytes)}, {agents}, {activations}, the program {size(own)}"
    parts = f"{together} x ({parts})" if together > 1 else parts
    if taken > free:
        raise _too_large(context, f"{_micro_batch(context)} need {size(needed)}: {parts}", free // together)
    return f"{_micro_batch(context)} need about {size(needed)} of {size(total)}: {parts}"


def _too_large(context: CheckContext, what: str, free: float) -> ConfigError:
    assert context.trace is not None
    room = free - context.trace.base_bytes - context.trace.agents_bytes
    fit = int(context.micro_batch * room / max(context.trace.activation_bytes, 1))
    hints = [f"batch_size={fit}" if fit >= 1 else "a smaller base, quantization=nf4, or a machine with more memory"]
    if not context.config.use_gradient_checkpointing:
        hints.append("use_gradient_checkpointing=true")
    return ConfigError(
        f"{what}; {size(max(free, 0))} are free here",
        where=f"batch_size: {context.config.batch_size}, model_name: {context.config.model_name}",
        hint=" or ".join(hints),
    )


def space(context: CheckContext) -> str:
    """The checkpoints that are kept, one more that is being written, and the final one, fit on the disk."""
    one = context.checkpoint_bytes
    if one is None and context.trace is not None:  # weights and two moments
        one = 3 * context.trace.agents_bytes // cost_model.agent_copies(context.config, context.processes.device)
    if one is None:
        return "not estimated: this architecture cannot be traced"
    every, steps = context.config.save_steps, _total_steps(context)
    kept = context.config.save_total_limit or (-(-steps // every) if every and steps else 1)
    best = context.config.keeps_best
    needed = one * (kept + 2 + best)
    free = shutil.disk_usage(scratch_parent(context.config.run_folder)).free
    which = f"{kept} checkpoints, {'the best one, ' if best else ''}one being written and the final one"
    what = f"{which}, {size(one)} each: {size(needed)}"
    if needed > free:
        raise ConfigError(
            f"{what}; {size(free)} are free",
            where=f"output_dir: {context.config.run_folder}, save_total_limit: {context.config.save_total_limit}",
            hint="save_total_limit=1, or an output_dir on a larger disk",
        )
    return f"{what} of {size(free)} free"


def _total_steps(context: CheckContext) -> int | None:
    """Optimizer steps of the real run; None if they depend on rows that are not known."""
    if not context.rows:
        return context.config.max_train_steps
    return steps_of(context.config, context.num_rows, context.rows_per_step)


def time_needed(context: CheckContext) -> str:
    """The time of a step, and of all steps with their evaluations."""
    step_s, how = _seconds_per_step(context)
    if step_s is None:
        return f"not estimated: {how}"
    steps = _total_steps(context)
    if steps is None:
        return f"{duration(step_s)} per step ({how}); how many steps there are depends on the data"
    evaluation_s = _evaluation_seconds(context, steps)
    more = f"; evaluations add at most {duration(evaluation_s)}" if evaluation_s else ""
    late = f"\none step outlasts grace_s {context.config.grace_s:g}" if step_s > context.config.grace_s else ""
    about = "about" if context.lengths.sampled else "at most"
    return f"{about} {duration(steps * step_s)}: {steps} steps of {duration(step_s)} ({how}){more}{late}"


def _seconds_per_step(context: CheckContext) -> tuple[float | None, str]:
    """(seconds of one optimizer step, the source of that number)."""
    found = context.trace
    per_step = context.rows_per_step
    of_each = [min(per_step, number) for number in context.num_rows] if context.rows else [per_step]
    if context.tokens_per_s:  # those of each agent count, if each has its own
        of_pass = context.lengths.mean * context.lengths.branches
        return sum(of_each) * of_pass / context.tokens_per_s, "measured"
    tokens = max(of_each) * context.lengths.mean
    if found is None:
        return None, "this architecture cannot be traced"
    flops = found.flops * tokens / (context.micro_batch * context.longest_tokens)
    speed = cost_model.flops_per_s(context.config, context.shape, context.processes.device)
    return flops / (speed * context.processes.num_processes), f"{flops / 1e12:.2g} TFLOP at {speed / 1e12:.2g} TFLOP/s"


def _evaluation_seconds(context: CheckContext, steps: int) -> float:
    """The most seconds of all evaluations; answers may end early."""
    config = context.config
    if not context.rows:
        return 0.0
    times = 1 + ((steps - 1) // config.eval_steps if config.eval_steps else 0)
    rows = context.num_eval_rows
    rounds = -(-min(config.generation_eval_samples, rows) // (config.batch_size * context.processes.num_processes))
    longest = context.lengths.learned_of(context.longest_tokens)
    answering = rounds * config.answer_tokens(longest) * context.token_generated_s
    return times * rows * context.row_evaluated_s + answering
