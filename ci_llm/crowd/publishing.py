"""The result of a run published on the Hugging Face Hub: its agents, with the card that says how to use them.

What goes there is what `Crowd.from_pretrained("user/name")` reads, the card, and the tokenizers of the agents. The
moments of the optimizer stay. The hub takes a commit as a whole or not at all, and knows files that it has got; so a
push that was interrupted is called again, and goes on. A later push replaces an earlier one: the same commit deletes
what the earlier crowd had and this one has not, such as a fifth agent. Other files of the repository stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar

from ci_llm.checkpoints.folders import FINAL
from ci_llm.checkpoints.manifest import read_manifest, verify_folder
from ci_llm.core.remote import OFFLINE, why_unreachable
from ci_llm.core.run_folder import PushRecord, keep_push, last_push
from ci_llm.crowd.given_path import require_checkpoint
from ci_llm.crowd.pretrained import FILES, weights_fingerprint
from ci_llm.errors import BadInput, CheckpointError, first_line
from ci_llm.mirror.objects import backoff_s

if TYPE_CHECKING:
    from ci_llm.crowd.merge_methods import Merge

T = TypeVar("T")

PREFIX: Final = "hub:"
PUBLISHED: Final = (*FILES, "README.md", "agent*/tokenizer*", "agent*/chat_template.jinja")
MERGED: Final = "merged"
#: What a push replaces as a whole.
REPLACED: Final = (*PUBLISHED, f"{MERGED}/*")
TRIES: Final = 4


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


def publish(
    run: Path,
    to: str | None,
    *,
    private: bool = True,
    merge: Merge | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Publication:
    """Publish the `final_checkpoint` of a run; call it again if it was interrupted.

    Args:
        to: `user/name`, or `name` for an own repository; None: the name of the run's folder.
        private: of a repository that is made now; one that exists stays what it is.
        merge: one adapter made of all agents, published beside them in the folder `merged`.
        sleep: waits between two tries.

    Raises:
        BadInput: there is no final checkpoint, no login, or the hub refuses. DamagedCheckpoint.
        CheckpointError: the hub does not answer.
    """
    folder = _final(run)
    verify_folder(folder)
    if (why := why_unreachable()) is not None:
        raise CheckpointError(f"the hub cannot be reached: {why}", where=to or run.name, hint="call it again later")
    hub = _Hub(sleep)
    made = hub.repository(_asked_for(run, to), private)
    files = {path.relative_to(folder).as_posix(): path for pattern in PUBLISHED for path in folder.glob(pattern)}
    with TemporaryDirectory() as scratch:
        if merge is not None:
            merged = _merged(run, merge, Path(scratch, MERGED))
            files |= {f"{MERGED}/{path.name}": path for path in merged.iterdir()}
        manifest = read_manifest(folder)
        hub.commit(made, files, f"{run.resolve().name}, step {manifest.step}")
    done = Publication(made, hub.url(made), hub.is_private(made), len(files))
    if folder.name == FINAL:
        pushed = PushRecord(_asked_for(run, to), made, done.url, manifest.step, weights_fingerprint(manifest))
        keep_push(folder.parent, pushed)
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


def _merged(run: Path, merge: Merge, target: Path) -> Path:
    from ci_llm.crowd.exporting import prepare

    prepared = prepare(str(run), agent=None, merge=merge, base_model=None)
    prepared.write(target, prepared.scores() if prepared.can_be_scored else None)
    return target


class _Hub:
    """The hub, with the errors that people can do something about, and tries that come later and later."""

    def __init__(self, sleep: Callable[[float], object]) -> None:
        from huggingface_hub import HfApi

        self._api, self._sleep = HfApi(library_name="ci-llm"), sleep

    def repository(self, name: str, private: bool) -> str:
        """Make a repository, or find it; returns `user/name`."""
        return self._asked(name, lambda: self._api.create_repo(name, private=private, exist_ok=True).repo_id)

    def commit(self, to: str, files: Mapping[str, Path], message: str) -> None:
        """One commit: all files, and without those of an earlier push; what the hub has got is not sent again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        added = [CommitOperationAdd(name, path) for name, path in files.items()]

        def commit() -> None:
            # Listed anew at each try: the one before may have arrived although its answer was lost.
            stale = [name for name in self._api.list_repo_files(to) if name not in files and _is_published(name)]
            deleted = [CommitOperationDelete(name) for name in stale]
            self._api.create_commit(to, [*added, *deleted], commit_message=message)

        self._asked(to, commit)

    def is_private(self, name: str) -> bool:
        return self._asked(name, lambda: bool(self._api.repo_info(name).private))

    def url(self, name: str) -> str:
        return f"{self._api.endpoint}/{name}"

    def _asked(self, name: str, ask: Callable[[], T]) -> T:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

        # Its base class is the HTTPError of httpx or httpx2, whichever the library uses: no answer came. An upload that
        # was broken off is a RuntimeError, and an answer of its storage that says so a ValueError.
        failing: tuple[type[Exception], ...] = (
            *(HfHubHTTPError, *HfHubHTTPError.__bases__),
            *(OSError, RuntimeError, ValueError),
        )
        where, failures = f"{PREFIX}{name}", 0
        while True:
            try:
                return ask()
            except (HFValidationError, LocalTokenNotFoundError) as error:
                raise BadInput(first_line(error), where=where, hint=_LOGIN) from error
            except failing as error:
                response = getattr(error, "response", None)
                if response is not None and response.status_code in _REFUSALS:
                    what = f"the hub refuses ({response.status_code}): {first_line(error)}"
                    raise BadInput(what, where=where, hint=_LOGIN) from error
                failures += 1
                if failures == TRIES:
                    what = f"the hub does not take it: {first_line(error)}"
                    raise CheckpointError(what, where=where, hint="call it again later: it goes on") from error
            self._sleep(backoff_s(failures, hurry=False))


def _is_published(name: str) -> bool:
    """Whether a push wrote this file, now or earlier. The slash makes a pattern match the whole path."""
    return any(PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in REPLACED)


_REFUSALS: Final = frozenset({400, 401, 403, 404, 422})
_LOGIN: Final = f"log in with `hf auth login`, or set HF_TOKEN to a token that may write; {OFFLINE} must not be set"
