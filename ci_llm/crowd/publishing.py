"""The result of a run published on the Hugging Face Hub: its agents, with the card that says how to use them.

What goes there is what `Crowd.from_pretrained("user/name")` reads, the card, and the tokenizers of the agents. The
moments of the optimizer stay. The hub takes a commit as a whole or not at all, and knows files that it has got; so a
push that was interrupted is called again, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar

from ci_llm.checkpoints.folders import FINAL
from ci_llm.checkpoints.manifest import verify_folder
from ci_llm.checkpoints.mirror.pace import backoff_s
from ci_llm.cluster.hub import OFFLINE, why_unreachable
from ci_llm.crowd.pretrained import FILES
from ci_llm.crowd.recognise import require_checkpoint
from ci_llm.errors import BadInput, CheckpointError

if TYPE_CHECKING:
    from ci_llm.crowd.merge_methods import Merge

T = TypeVar("T")
logger = logging.getLogger(__name__)

PREFIX: Final = "hub:"
PUBLISHED: Final = (*FILES, "README.md", "agent*/tokenizer*", "agent*/chat_template.jinja")
MERGED: Final = "merged"
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
    found = [path for pattern in PUBLISHED for path in folder.glob(pattern)]
    verify_folder(folder)
    if (why := why_unreachable()) is not None:
        raise CheckpointError(f"the hub cannot be reached: {why}", where=to or run.name, hint="call it again later")
    hub = _Hub(sleep)
    made = hub.repository((to or run.resolve().name).removeprefix(PREFIX), private)
    hub.upload(made, folder, f"Step of {run.name}", PUBLISHED)
    if merge is not None:
        with TemporaryDirectory() as scratch:
            hub.upload(made, _merged(run, merge, Path(scratch, MERGED)), f"{merge.name} of all agents", None, MERGED)
    return Publication(made, hub.url(made), hub.is_private(made), len(found))


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
        return self._try(name, lambda: self._api.create_repo(name, private=private, exist_ok=True).repo_id)

    def upload(self, to: str, folder: Path, message: str, patterns: tuple[str, ...] | None, place: str = "") -> None:
        """One commit with the files of a folder; those that the hub has got already are not sent again."""
        self._try(
            to,
            lambda: self._api.upload_folder(
                repo_id=to,
                folder_path=folder,
                path_in_repo=place or None,
                commit_message=message,
                allow_patterns=None if patterns is None else list(patterns),
            ),
        )

    def is_private(self, name: str) -> bool:
        return self._try(name, lambda: bool(self._api.repo_info(name).private))

    def url(self, name: str) -> str:
        return f"{self._api.endpoint}/{name}"

    def _try(self, name: str, ask: Callable[[], T]) -> T:
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

        for failures in range(1, TRIES + 1):
            try:
                return ask()
            except (HFValidationError, LocalTokenNotFoundError) as error:
                raise BadInput(str(error).splitlines()[0], where=f"{PREFIX}{name}", hint=_LOGIN) from error
            except HfHubHTTPError as error:
                status = error.response.status_code if error.response is not None else 0
                if status in _REFUSALS:
                    what = f"the hub refuses ({status}): {str(error).splitlines()[0]}"
                    raise BadInput(what, where=f"{PREFIX}{name}", hint=_LOGIN) from error
                last: Exception = error
            except (httpx.HTTPError, OSError) as error:
                last = error
            logger.info(f"hub       {type(last).__name__}; tried again ({failures} of {TRIES})")
            self._sleep(backoff_s(failures, hurry=False))
        hint = "call it again: what the hub has got is not sent again"
        raise CheckpointError(f"the hub does not take it: {last}", where=f"{PREFIX}{name}", hint=hint) from last


_REFUSALS: Final = frozenset({400, 401, 403, 404, 409, 422})
_LOGIN: Final = f"log in with `hf auth login`, or set HF_TOKEN to a token that may write; {OFFLINE} must not be set"
