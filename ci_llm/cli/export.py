"""`ci-llm export` writes the agents of a run for other programs; `ci-llm push` publishes them on the hub.

An export is a PEFT folder for each agent, one adapter made of all, an adapter for llama.cpp, or a model with an adapter
merged into its base.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.cli.answering import find_run
from ci_llm.cli.command import add_json, agent_number, parser_of, print_result, whole_checkpoint
from ci_llm.core.help import at_least
from ci_llm.core.imports import importing
from ci_llm.crowd.merging import DISTILLED, DISTILLED_DOES, METHODS, Distillation, Merge, merge_of
from ci_llm.errors import BadInput, ModelError

if TYPE_CHECKING:
    from ci_llm.crowd.card import Kind
    from ci_llm.crowd.exporting import Export


_COMMON = ("--to", "--agent", "--merge", "--into-base", "--format")


def export(words: Sequence[str]) -> int:
    """Run `ci-llm export ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, or there is no crowd that it could be done with. CheckpointError: the disk failed.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    merge = _checked(call)
    call.run = find_run(call.run, call.base_model, takes_base=False)
    with importing():
        from ci_llm.crowd.exporting import prepare

    with whole_checkpoint(call.run):
        prepared = prepare(call.run, agent=call.agent, merge=merge, base_model=call.base_model)
    kind: Kind = "gguf" if call.format == "gguf" else "model" if call.into_base else "adapter"
    prepared.require_form(kind)
    scores = None
    if prepared.saved.run_config is not None and not call.no_score:
        scores = prepared.scores()
        if not call.json:
            print(scores.table(), flush=True)
    elif not call.json and not call.no_score:
        print("not scored: no run trained these agents, so it is not known which rows to validate on", flush=True)
    scores = prepared.write(call.to, scores, kind, call.dtype)
    about = scores.about_folder(prepared.name) if scores else None
    record = {**_record(prepared, call), "scores": scores.record() if scores else None}
    print_result(call.json, record, *([about] if about else []), _written(prepared, call))
    return 0


def _parser() -> argparse.ArgumentParser:
    does = {**METHODS, DISTILLED: DISTILLED_DOES}
    merges = "\n".join(f"  {name:<16} {what}" for name, what in does.items())
    parser = parser_of("export", _COMMON)
    parser.epilog = str(parser.epilog).replace("MERGES", merges)
    option = parser.add_argument
    option("run", metavar="RUN", help="the output_dir of a run, a checkpoint, a saved crowd, or a hub id")
    option("--to", type=Path, required=True, metavar="DIR", help="where; must not exist yet")
    option("--agent", type=agent_number, metavar="K", help="this agent alone, counted from 0")
    option("--merge", metavar="HOW", help="one adapter made of all agents, as svd; --help all lists all")
    option("--weights", type=_numbers, metavar="W,W,...", help="one per agent, in any unit; default alike")
    option("--rank", type=at_least(1), metavar="R", help="of the merge; default that of the agents")
    distil = parser.add_argument_group("for --merge distilled").add_argument
    distil("--prompts", type=Path, metavar="F", help="prompts without answers, as ci-llm generate --file")
    distil("--steps", type=at_least(1), metavar="N", help="optimizer steps; default 120")
    about = "learning rate of AdamW; default a quarter of the run's"
    distil("--distill-rate", type=at_least(0, float), metavar="R", help=about)
    option("--into-base", action="store_true", help="merge the adapter into the weights of the base")
    option("--format", choices=("peft", "gguf"), default="peft", help="of an adapter: gguf for llama.cpp and Ollama")
    option("--dtype", choices=("fp32", "bf16", "fp16"), help="with --into-base: of the weights; default that on disk")
    option("--base-model", metavar="NAME", help="hub id, folder or file of the base, if it is elsewhere now")
    option("--no-score", action="store_true", help="do not score on the run's evaluation rows first")
    add_json(parser)
    return parser


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, such as 0.5,0.5") from None


def _checked(call: argparse.Namespace) -> Merge | Distillation | None:
    """The merge that is asked for; a wrong call is refused before anything is loaded."""
    if call.to.exists() or call.to.is_symlink():
        raise ModelError("this path exists already", where=f"--to {call.to}", hint="give a path that does not exist")
    distilling, merging = _given(call, "prompts", "steps", "distill_rate"), _given(call, "weights", "rank")
    distils, is_gguf = call.merge == DISTILLED, call.format == "gguf"
    problems = {
        "--format gguf is of an adapter: leave it or --into-base out": is_gguf and call.into_base,
        "only a merged base has a dtype of its own: --dtype belongs to --into-base": call.dtype and not call.into_base,
        f"only a distillation takes this: {distilling}": distilling and not distils,
        f"a distillation does not take this: {merging}": merging and distils,
        f"only a merge takes this: {merging}": merging and not call.merge,
        "a merge is made of all agents: leave --agent or --merge out": call.merge and call.agent is not None,
        "one adapter can be merged into the base or be a GGUF file, and not a crowd: --agent K, or --merge svd": (
            (call.into_base or is_gguf) and call.agent is None and not call.merge
        ),
        f"there is no such file: --prompts {call.prompts}": call.prompts and not call.prompts.is_file(),
    }
    if wrong := [problem for problem, holds in problems.items() if holds]:
        raise BadInput("; ".join(wrong), where="command line", hint="ci-llm export --help all")
    if distils:
        values = {"prompts": call.prompts, "steps": call.steps, "learning_rate": call.distill_rate}
        return Distillation(**{name: value for name, value in values.items() if value is not None})
    return merge_of(call.merge, call.weights, call.rank) if call.merge else None


def _given(call: argparse.Namespace, *names: str) -> str:
    """The options that were given among these, joined by commas."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(call, name) is not None)


def _record(prepared: Export, call: argparse.Namespace) -> dict[str, object]:
    from ci_llm.base.load import short_name

    return {
        "folder": str(call.to),
        "exported": prepared.name,
        "num_agents": prepared.saved.settings.num_agents,
        "ranks": prepared.ranks,
        "into_base": call.into_base,
        "format": call.format,
        "base_model": short_name(prepared.saved.base.name),
    }


def _written(prepared: Export, call: argparse.Namespace) -> str:
    count, names = prepared.saved.settings.num_agents, prepared.saved.names
    if prepared.adapter is None:
        form = f"{count} PEFT adapters, {names[0]} to {names[-1]}"
    elif call.into_base:
        form = f"a model of Transformers with {prepared.name} of {count} agents in its weights"
    else:
        kind = "GGUF" if call.format == "gguf" else "PEFT"
        form = f"a {kind} adapter of rank {prepared.adapter.rank}, {prepared.name} of {count} agents"
    return f"{call.to}: {form}; README.md has the commands that open it"


def push(words: Sequence[str]) -> int:
    """Publish a run, and print where it is.

    Raises:
        BadInput: the call is wrong, there is no final checkpoint, or the hub refuses. CheckpointError: no answer.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("push")
    parser.add_argument("run", type=Path, metavar="RUN", help="the output_dir of a run that is complete")
    parser.add_argument("--to", required=True, metavar="hub:USER/NAME", help="the repository; made if there is none")
    parser.add_argument("--public", action="store_true", help="make a repository that everybody can see")
    add_json(parser)
    call = parser.parse_args(words)
    if not call.to.startswith("hub:"):
        raise BadInput("a run is published on the hub", where=f"--to {call.to}", hint="--to hub:user/name")
    with importing():
        from ci_llm.crowd.publishing import publish

    done = publish(call.run, call.to, private=not call.public)
    lines = [f"{done.url}: {done.files} files, {'private' if done.private else 'public'}"]
    lines.append(f"sent: {', '.join(done.sent)}")
    if done.shortened:
        lines.append(f"sent without paths and addresses: {', '.join(done.shortened)}")
    lines.append(f'Crowd.from_pretrained("{done.repository}").generate("...")')
    print_result(call.json, asdict(done), *lines)
    return 0
