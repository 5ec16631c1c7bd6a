"""The publication of a run's agents on the Hugging Face Hub, with the card that says how to use them.

It uploads the files that `Crowd.from_pretrained("user/name")` reads, the card, and the agents' tokenizers, but not the
optimizer's state. The hub takes a commit as a whole or not at all, and knows the files that it has; so an interrupted
push resumes when it is called again. A later push replaces an earlier one: its commit deletes files of the earlier
crowd that the new one does not have, such as a fifth agent. Other files of the repository stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manifest import read_manifest, verify_folder
from ci_llm.core.remote import OFFLINE, why_unreachable
from ci_llm.core.run_folder import PushRecord, keep_push, last_push
from ci_llm.crowd.given_path import require_checkpoint
from ci_llm.crowd.pretrained import FILES, weights_fingerprint
from ci_llm.errors import BadInput, CheckpointError, first_line

if TYPE_CHECKING:
    from ci_llm.crowd.merging import Merge

PREFIX: Final = "hub:"
PUBLISHED: Final = (*FILES, "README.md", "agent*/tokenizer*", "agent*/chat_template.jinja")
MERGED: Final = "merged"
#: The files that a push replaces.
REPLACED: Final = (*PUBLISHED, f"{MERGED}/*")


@dataclass(frozen=True)
class Publication:
    """A finished publication.

    Attributes:
        repository: `user/name`.
        url: the address for people.
        private: whether others cannot see it.
        files: how many files were published.
    """

    repository: str
    url: str
    private: bool
    files: int


def publish(run: Path, to: str | None, *, private: bool = True, merge: Merge | None = None) -> Publication:
    """Publish the `final_checkpoint` of a run; call it again if it was interrupted.

    Args:
        to: `user/name`, or `name` for a repository of one's own; None takes the name of the run's folder.
        private: whether a new repository is private; an existing one stays as it is.
        merge: a merge of all agents to publish beside them in the folder `merged`.

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
        if merge is not None:
            _write_merged(run, merge, Path(scratch, MERGED))
        for path in (path for pattern in PUBLISHED for path in folder.glob(pattern)):
            link = Path(scratch, path.relative_to(folder))
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())
        files = sum(path.is_file() for path in Path(scratch).rglob("*"))
        with _asking(asked):
            made = hub.create_repo(asked, private=private, exist_ok=True).repo_id
            hub.upload_folder(
                repo_id=made,
                folder_path=scratch,
                commit_message=f"{run.resolve().name}, step {manifest.step}",
                delete_patterns=[*REPLACED],
            )
            done = Publication(made, f"{hub.endpoint}/{made}", bool(hub.repo_info(made).private), files)
    if folder.name == FINAL:
        keep_push(folder.parent, PushRecord(asked, made, done.url, manifest.step, weights_fingerprint(manifest)))
    return done


def is_published(run: Path, to: str | None) -> bool:
    """Whether the present `final_checkpoint` is recorded as published there; for arguments see `publish`."""
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


def _write_merged(run: Path, merge: Merge, target: Path) -> None:
    from ci_llm.crowd.exporting import prepare

    prepared = prepare(str(run), merge=merge)
    prepared.write(target, prepared.scores() if prepared.can_be_scored else None)


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
