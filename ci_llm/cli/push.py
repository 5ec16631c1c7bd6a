"""`ci-llm push RUN --to hub:user/name`: publish the agents of a run on the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ci_llm.cli.arguments import make_parser
from ci_llm.crowd.merge_methods import merge_of
from ci_llm.errors import BadInput

_DOES = """Publish the final_checkpoint of a run on the Hugging Face Hub: its agents, their tokenizers, and the card
with the figures and the commands that serve them. The repository is private unless --public is given."""
_EXAMPLES = """A push that was interrupted goes on when it is called again. The token comes from `hf auth login`, or
from HF_TOKEN in the environment.

examples: ci-llm push ci_llm_output --to hub:user/name
          ci-llm push ci_llm_output --to hub:user/name --merge svd

exit codes: 0 done; 1 the hub does not answer, a damaged checkpoint; 2 bad call, no final checkpoint, the hub refuses"""


def push(words: Sequence[str]) -> int:
    """Publish a run, and print where it is.

    Raises:
        BadInput: the call is wrong, there is no final checkpoint, or the hub refuses. CheckpointError: no answer.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    merge = merge_of(call.merge) if call.merge else None
    if not call.to.startswith("hub:"):
        raise BadInput("a run is published on the hub", where=f"--to {call.to}", hint="--to hub:user/name")
    from ci_llm.crowd.publishing import publish

    done = publish(call.run, call.to, private=not call.public, merge=merge)
    if call.json:
        print(json.dumps(asdict(done), indent=2))
        return 0
    print(f"{done.url}: {done.files} files, {'private' if done.private else 'public'}")
    print(f'Crowd.from_pretrained("{done.repository}").generate("...")')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ci-llm push", _DOES, _EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="the output_dir of a run that is complete")
    parser.add_argument("--to", required=True, metavar="hub:USER/NAME", help="the repository; made if there is none")
    parser.add_argument("--public", action="store_true", help="make a repository that everybody can see")
    parser.add_argument("--merge", metavar="HOW", help="also one adapter made of all agents, as in ci-llm export")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    return parser
