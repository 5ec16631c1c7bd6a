"""Checks of what goes in: the base's architecture, the data, its template, a batch that this machine can bear."""

from __future__ import annotations

import statistics

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.core.memory import free_memory
from ci_llm.crowd.base import require_positions
from ci_llm.data.chat_template import use_chat_template
from ci_llm.data.rows import Rows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.dry_run.architecture import find_shape
from ci_llm.dry_run.checks import count, size
from ci_llm.dry_run.context import SAMPLED_ROWS, TOY_EVAL_ROWS, TOY_STEPS, CheckContext, Lengths
from ci_llm.dry_run.cost_model import Untraceable, trace
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ConfigError, ModelError

#: What CUDA, its libraries and torch take on a GPU for themselves, about.
CUDA_CONTEXT_BYTES = 10**9


def architecture(scene: CheckContext) -> str:
    """The base is a known architecture, a causal language model."""
    scene.shape = find_shape(scene.config.model_name)
    text = scene.shape.config.get_text_config()
    layers, width = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    limit = scene.shape.positions or "any number of"
    source = "; the hub is out of reach, its published figures are taken" if scene.shape.offline else ""
    return f"{text.model_type}, {layers} layers of {width}, {text.vocab_size} tokens, {limit} positions{source}"


def data(scene: CheckContext) -> str:
    """The data set is there, has columns that can be used, and rows to train on and to evaluate on."""
    scene.rows = load_rows(scene.config, "train")
    scene.eval_rows = load_rows(scene.config, "eval")
    return f"{scene.rows.description[0]}; {len(scene.eval_rows)} to evaluate on"


def template(scene: CheckContext) -> str:
    """Rows become tokens, and what is learned of them is found under the chat template in force."""
    assert scene.rows is not None
    tokenizer = _tokenizer(scene)
    if not scene.shape.offline:
        use_chat_template(tokenizer, scene.config.chat_template)
    wanted = max(SAMPLED_ROWS, TOY_STEPS * scene.toy_batch * scene.processes.count)
    scene.examples = tokenized(scene, scene.rows, tokenizer, wanted)
    scene.eval_examples = tokenized(scene, scene.eval_rows, tokenizer, TOY_EVAL_ROWS * scene.processes.count)
    source, *lines = scene.examples.description[len(scene.rows.description) :]
    if scene.shape.offline:
        source = "tokens of the embedded base, as the base's own tokenizer is not at hand"
    else:
        scene.lengths = _lengths(scene.examples)
    return "\n".join([f"{source}; of {wanted if wanted < len(scene.rows) else 'all'} rows:", *lines])


def _lengths(examples: TokenizedRows) -> Lengths:
    sampled = [examples[number] for number in range(len(examples))]
    tokens = [len(example.input_ids) for example in sampled]
    learned = sum(int(example.supervised.sum()) for example in sampled)
    return Lengths(statistics.mean(tokens), statistics.pstdev(tokens), max(tokens), learned / sum(tokens))


def _tokenizer(scene: CheckContext) -> PreTrainedTokenizerBase:
    """The base's; the embedded one's where the hub is out of reach."""
    name = scene.config.model_name
    if name == "embedded" or scene.shape.offline:
        return AutoTokenizer.from_pretrained(BASE_FOLDER)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the base's tokenizer cannot be loaded: {str(error).strip().splitlines()[0]}",
            where=f"model_name: {name}",
            hint="put tokenizer.json and tokenizer_config.json beside config.json",
        ) from error


def tokenized(
    scene: CheckContext, rows: Rows, tokenizer: PreTrainedTokenizerBase, number: int, max_seq_length: int | None = None
) -> TokenizedRows:
    """At most `number` rows, evenly spread, as tokens; kept in the folder that goes away."""
    number = min(number, len(rows))
    chosen = [at * len(rows) // number for at in range(number)]
    return tokenize(
        rows.select(chosen),
        tokenizer,
        max_seq_length=max_seq_length or scene.config.max_seq_length,
        train_on_prompt=scene.config.train_on_prompt,
        cache_folder=scene.scratch / "tokens",
        main_first=scene.processes.main_first(),
    )


def estimate(scene: CheckContext) -> str:
    """What one micro-step costs, found without weights."""
    rows, tokens = scene.micro_batch, scene.crowded_tokens
    learned = max(1, min(tokens - 1, round(scene.lengths.learned * tokens)))
    device = scene.processes.device
    try:
        scene.trace = trace(scene.config, scene.shape.config, device, rows=rows, tokens=tokens, targets=learned)
    except Untraceable as error:
        return f"this architecture cannot be traced without weights: {error}"
    found = scene.trace
    return (
        f"{count(found.base_parameters)} parameters, {scene.config.num_agents} agents of"
        f" {count(found.agent_parameters)}; a micro-step of {_micro_batch(scene)} takes {found.flops / 1e12:.2g} TFLOP"
    )


def _micro_batch(scene: CheckContext) -> str:
    source = "at worst" if scene.lengths.sampled else "by max_seq_length"
    return f"{scene.micro_batch} rows of {scene.crowded_tokens} tokens ({source})"


def batch(scene: CheckContext) -> str:
    """One micro-batch fits: into the positions of the base, and into the memory of this machine."""
    require_positions(scene.shape.config, scene.config.max_seq_length)
    found, device = scene.trace, scene.processes.device
    if found is None:
        return f"{_micro_batch(scene)} fit the base's positions; memory is not estimated"
    on_cpu = device.type == "cpu"
    own = scene.born_bytes if on_cpu else CUDA_CONTEXT_BYTES
    together = scene.launch.num_local_processes if on_cpu else 1
    free, total = free_memory(device)
    taken = together * found.device_bytes + (0 if on_cpu else own)  # this program lies in memory already
    needed = together * (found.device_bytes + own)
    agents = f"{scene.config.num_agents} agents {size(found.agents_bytes)}"
    parts = f"base {size(found.base_bytes)}, {agents}, passing {size(found.passing_bytes)}, the program {size(own)}"
    parts = f"{together} x ({parts})" if together > 1 else parts
    if taken > free:
        raise _too_large(scene, f"{_micro_batch(scene)} need {size(needed)}: {parts}", free // together)
    return f"{_micro_batch(scene)} need about {size(needed)} of {size(total)}: {parts}"


def _too_large(scene: CheckContext, what: str, free: float) -> ConfigError:
    assert scene.trace is not None
    room = free - scene.trace.base_bytes - scene.trace.agents_bytes
    fit = int(scene.micro_batch * room / max(scene.trace.passing_bytes, 1))
    hints = [f"batch_size={fit}"] if fit >= 1 else ["a smaller base, or a machine with more memory"]
    if not scene.config.use_gradient_checkpointing:
        hints.append("use_gradient_checkpointing=true")
    return ConfigError(
        f"{what}; {size(max(free, 0))} are free here",
        where=f"batch_size: {scene.config.batch_size}, model_name: {scene.config.model_name}",
        hint=" or ".join(hints),
    )
