"""The result of a run published on the Hugging Face Hub: its agents, with the card that says how to use them.

What goes there is what `Crowd.from_pretrained("user/name")` reads, the card, and the tokenizers of the agents. The
moments of the optimizer stay. The hub takes a commit as a whole or not at all, and knows files that it has got; so a
push that was interrupted is called again, and resumes. A later push replaces an earlier one: the same commit deletes
what the earlier crowd had and this one has not, such as a fifth agent. Other files of the repository stay.
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
#: What a push replaces as a whole.
REPLACED: Final = (*PUBLISHED, f"{MERGED}/*")


@dataclass(frozen=True)
class Publication:
    """What was published.

    Attributes:
        repository: as `user/name`.
        url: for people.
        private: whether others cannot see it.
    """

    repository: str
    url: str
    private: bool
    files: int


def publish(run: Path, to: str | None, *, private: bool = True, merge: Merge | None = None) -> Publication:
    """Publish the `final_checkpoint` of a run; call it again if it was interrupted.

    Args:
        to: `user/name`, or `name` for an own repository; None: the name of the run's folder.
        private: whether a repository that is made now is private; one that exists stays what it is.
        merge: one adapter made of all agents, published beside them in the folder `merged`.

    Raises:
        BadInput: there is no final checkpoint, no login, or the hub refuses. DamagedCheckpoint.
        CheckpointError: the hub does not answer.
    """
    from huggingface_hub import HfApi

    folder = _final(run)
    verify_folder(folder)
    if (why := why_unreachable()) is not None:
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
    """Whether the `final_checkpoint` is known to be published there, as it is now; for arguments see `publish`."""
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

    prepared = prepare(str(run), agent=None, merge=merge, base_model=None)
    prepared.write(target, prepared.scores() if prepared.can_be_scored else None)


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    """The hub, with the errors that people can do something about."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    # Its base class is the HTTPError of httpx or httpx2, whichever the library uses: no answer came. An upload that was
    # broken off is a RuntimeError, and an answer of its storage that says so a ValueError.
    where = f"{PREFIX}{repository}"
    failing: tuple[type[Exception], ...] = (
        *(HfHubHTTPError, *HfHubHTTPError.__bases__),
        *(OSError, RuntimeError, ValueError),
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
