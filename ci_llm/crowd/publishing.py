"""The publication of a run's agents on the Hugging Face Hub, with the card that says how to use them.

It uploads the files that `Crowd.from_pretrained("user/name")` reads, the card, and the agents' tokenizers, but not the
optimizer's state. No path and no address is sent: only the last part of the name of a base or data set. The manifest
that is sent lists the files as they are sent. The hub takes a commit as a whole or not at all, and knows the files that
it has; so an interrupted push resumes when it is called again. A later push replaces an earlier one: its commit deletes
files of the earlier crowd that the new one does not have, such as a fifth agent. Other files of the repository stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manifest import MANIFEST, FileImage, Manifest, read_manifest, verify_folder
from ci_llm.config.foreign import FIELDS
from ci_llm.config.schema import with_trait
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.remote import OFFLINE, why_unreachable
from ci_llm.core.run_folder import PushRecord, keep_push, last_push
from ci_llm.crowd.card import public_name
from ci_llm.crowd.given_path import require_checkpoint
from ci_llm.crowd.pretrained import FILES, weights_fingerprint
from ci_llm.errors import BadInput, CheckpointError, first_line

PREFIX: Final = "hub:"
#: The files that a push sends, and replaces.
PUBLISHED: Final = (*FILES, "README.md", "agent*/tokenizer*", "agent*/chat_template.jinja")
#: Fields of files that name a base, data or a template, and those that say where something lies.
NAMES: Final = frozenset(
    {"model_name", "dataset_name", "eval_dataset_name", "chat_template", "imported_from"}
    | {"base_model_name_or_path", "name_or_path", "_name_or_path"}
)
PLACES: Final = frozenset({*with_trait("place"), "restart_from", "init_from", "mirror"})


@dataclass(frozen=True)
class Publication:
    """A finished publication.

    Attributes:
        repository: `user/name`.
        url: the address for people.
        private: True if others cannot see it.
        files: the number of files that were published.
        sent: their names.
        shortened: those of them that were sent without paths and addresses.
    """

    repository: str
    url: str
    private: bool
    files: int
    sent: tuple[str, ...] = ()
    shortened: tuple[str, ...] = ()


def publish(run: Path, to: str | None, *, private: bool = True) -> Publication:
    """Publish the `final_checkpoint` of a run; call it again if it was interrupted.

    Args:
        to: `user/name`, or `name` for a repository of one's own; None takes the name of the run's folder.
        private: make a new repository private; an existing one stays as it is.

    Raises:
        BadInput: there is no final checkpoint, no login, or the hub refuses.
        DamagedCheckpoint: a file differs from its digest in the manifest.
        CheckpointError: the hub does not answer.
    """
    from huggingface_hub import HfApi

    folder = _final(run)
    verify_folder(folder)
    why = why_unreachable()
    if why is not None:
        raise CheckpointError(f"the hub cannot be reached: {why}", where=to or run.name, hint="call it again later")
    hub, asked, manifest = HfApi(library_name="ci-llm"), _asked_for(run, to), read_manifest(folder)
    with TemporaryDirectory() as scratch:
        for path in (path for pattern in PUBLISHED for path in folder.glob(pattern)):
            link = Path(scratch, path.relative_to(folder))
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        shortened = _shorten(Path(scratch), manifest)
        sent = tuple(sorted(str(path.relative_to(scratch)) for path in Path(scratch).rglob("*") if path.is_file()))
        with _asking(asked):
            made = hub.create_repo(asked, private=private, exist_ok=True).repo_id
            hub.upload_folder(
                repo_id=made,
                folder_path=scratch,
                commit_message=f"{run.resolve().name}, step {manifest.step}",
                delete_patterns=[*PUBLISHED],
            )
            private = bool(hub.repo_info(made).private)
    done = Publication(made, f"{hub.endpoint}/{made}", private, len(sent), sent, shortened)
    if folder.name == FINAL:
        keep_push(folder.parent, PushRecord(asked, made, done.url, manifest.step, weights_fingerprint(manifest)))
    return done


def is_published(run: Path, to: str | None) -> bool:
    """True if the present `final_checkpoint` is recorded as published there; for arguments see `publish`."""
    known = last_push(run)
    return known is not None and known.has(weights_fingerprint(read_manifest(_final(run))), _asked_for(run, to))


def _asked_for(run: Path, to: str | None) -> str:
    return (to or run.resolve().name).removeprefix(PREFIX)


def _final(run: Path) -> Path:
    folder = require_checkpoint(run, str(run), final_first=True)
    if not (folder / "README.md").is_file():
        what = f"{folder.name} has no model card: a run that is complete leaves one in its {FINAL}"
        raise BadInput(what, where=str(run), hint="finish the run; ci-llm export writes the agents of any checkpoint")
    return folder


def _shorten(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Take paths and addresses out of files to be sent, and make their manifest; returns the names of these files."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    records, shortened = {name: record for name, record in manifest.files.items() if name in files}, []
    for name, path in files.items():
        data = path.read_bytes() if path.suffix in (".json", ".yaml") and name != MANIFEST else b""
        public = data and (_public_yaml if path.suffix == ".yaml" else _public_json)(data)
        if public != data:
            path.unlink()
            path.write_bytes(public)
            records |= {name: FileImage((public,)).record()} if name in records else {}
            shortened.append(name)
    forms = {key: form for key, form in manifest.forms.items() if {key, f"{key}.json", f"{key}.safetensors"} & {*files}}
    (folder / MANIFEST).unlink()
    info = _public(manifest.info)
    (folder / MANIFEST).write_bytes(replace(manifest, files=records, forms=forms, info=info).dump())
    return tuple(shortened)


def _public_json(data: bytes) -> bytes:
    value = json.loads(data)
    public = _public(value)
    return data if public == value else json.dumps(public, indent=2, ensure_ascii=False).encode()


def _public_yaml(data: bytes) -> bytes:
    """The same for a configuration that `Config.dump` wrote: a key and its value in JSON on each line."""
    lines = data.decode().splitlines(keepends=True)
    for at, (key, colon, value) in enumerate(line.partition(": ") for line in lines):
        if key in NAMES | PLACES | {"agents"}:
            lines[at] = f"{key}{colon}{dump_value(_public(json.loads(value), key))}\n"
    return "".join(lines).encode()


def _public(value: Any, key: str = "") -> Any:
    """A value without paths and addresses; `key` is the field that has it."""
    if isinstance(value, dict):
        return {name: _public(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_public(each, key) for each in value]
    if not isinstance(value, str) or "{{" in value or "{%" in value:  # the text of a template
        return value
    if key in PLACES:
        return FIELDS[key].default
    return ",".join(map(public_name, value.split(","))) if key in NAMES else value


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    """Translate the hub's errors inside into those of this package.

    Raises:
        BadInput: the hub refuses. CheckpointError: it does not answer.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    where = f"{PREFIX}{repository}"
    # The base class of HfHubHTTPError is the HTTPError of httpx or httpx2, whichever the library uses, for a missing
    # answer. A broken upload raises RuntimeError, or ValueError if the hub's storage reports it.
    failing: tuple[type[Exception], ...] = (
        HfHubHTTPError,
        *HfHubHTTPError.__bases__,
        OSError,
        RuntimeError,
        ValueError,
    )
    try:
        yield
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise BadInput(first_line(error), where=where, hint=_LOGIN) from error
    except failing as error:
        response = getattr(error, "response", None)
        if response is not None and response.status_code in _REFUSALS:
            what = f"the hub refuses ({response.status_code}): {first_line(error)}"
            raise BadInput(what, where=where, hint=_LOGIN) from error
        what = f"the hub does not take it: {first_line(error)}"
        hint = "call it again later: what the hub has got is not sent again"
        raise CheckpointError(what, where=where, hint=hint) from error


_REFUSALS: Final = frozenset({400, 401, 403, 404, 422})
_LOGIN: Final = f"log in with `hf auth login`, or set HF_TOKEN to a token that may write; {OFFLINE} must not be set"
