"""Resources on other machines, object stores by their URLs and the Hugging Face hub, and where their copies lie here.

A URL is shown without secrets. One quick request to the hub shows whether it is reachable; if not, only its local cache
is used. Without this, every name costs half a minute of retries, with a line each, before it is an error.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ci_llm.errors import BadInput, first_line

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: object) -> bool:
    """True if a text has the form of a URL, and so is not a path."""
    return isinstance(text, str) and _URL.match(text) is not None


def without_secrets(url: str) -> str:
    """A URL as it may be shown: without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest)[0].rpartition('@')[2]}" if is_url(url) else url


def why_no_mirror(url: str) -> tuple[str, str] | None:
    """(The reason why a text cannot be the URL of a mirror, what to do instead); None if it can."""
    parts = urlsplit(url) if is_url(url) else None
    if parts is None or parts.scheme not in SCHEMES:
        hint = f"give a URL such as s3://bucket/prefix; schemes: {', '.join(SCHEMES)}"
        if parts is not None and parts.scheme == "hf":
            hint = "a bucket of the hub is reached by S3: s3://NAME with AWS_ENDPOINT_URL; push_to_hub publishes a run"
        return f"{without_secrets(url)!r} is not the URL of a mirror", hint
    has_user = "@" in parts.netloc and parts.scheme not in ("abfs", "abfss")  # there it is the container
    if has_user or parts.query or parts.password is not None:
        hint = "set them in the environment, as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return f"the URL of a mirror must not carry credentials: {without_secrets(url)}", hint
    if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
        what = f"{parts.netloc!r} stands where a file URL has a machine, not a folder: {without_secrets(url)}"
        return what, "give the whole path of the folder, after three slashes: file:///path/of/the/mirror"
    if parts.scheme == "file" and not parts.path.strip("/"):
        return "the mirror must have a folder of its own", "give file:///path/of/the/mirror"
    return None


OFFLINE: Final = "HF_HUB_OFFLINE"
TIMEOUT_S: Final = 5.0
_ID: Final = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_CHECKPOINT: Final = re.compile(r"/(checkpoint_step_\d+|final_checkpoint)$")
_FILE: Final = re.compile(r".*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|ya?ml|gguf)(\.(gz|bz2|xz|zst))?")


def may_be_on_hub(name: str) -> bool:
    """True if `name` has the form of a hub id, and no local file or folder has this name."""
    if name == "embedded" or _FILE.fullmatch(name):
        return False
    return _ID.fullmatch(name) is not None and not os.path.exists(os.path.expanduser(name))


def may_be_repository(name: str) -> bool:
    """True if `name` has the form of a model on the hub, `user/name`, and no local file or folder has this name."""
    return name.count("/") == 1 and not _CHECKPOINT.search(name) and may_be_on_hub(name)


def why_unreachable() -> str | None:
    """The reason why the hub does not answer; None if it does, with any status. Respects HF_ENDPOINT and proxies."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError:
        return None  # an error status is an answer as well
    except urllib.error.URLError as error:
        # The libraries check the certificate themselves, and may trust other authorities than this request does.
        return None if isinstance(error.reason, ssl.SSLError) else f"{endpoint}: {error.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{endpoint}: {error}"


def offline_note(names: Iterable[str]) -> str | None:
    """Set HF_HUB_OFFLINE if the hub is unreachable. It must be called before the libraries are imported.

    Args:
        names: the names of the base model and the data set; if none of them may be on the hub, no request is made.

    Returns:
        a line for people, with the reason; None if the hub is reachable, or was not asked.
    """
    if OFFLINE in os.environ or not any(map(may_be_on_hub, names)) or (reason := why_unreachable()) is None:
        return None
    os.environ[OFFLINE] = "1"
    return f"unreachable, only its local cache is used ({reason})"


def fetch(repository: str, patterns: Sequence[str]) -> Path:
    """The folder with files of a model on the hub; they come from the local cache where the hub is unreachable.

    Args:
        repository: as `user/name`.
        patterns: the patterns of the files' names.

    Raises:
        BadInput: there is no such model, it may not be read, or it is not in the cache and the hub is unreachable.
    """
    from huggingface_hub import errors, snapshot_download

    offline = f"{OFFLINE} is set" if os.environ.get(OFFLINE, "0") not in ("", "0") else why_unreachable()
    name, login = f"{repository} (no folder has this name)", "hf auth login, if it is private"
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), local_files_only=offline is not None))
    except errors.LocalEntryNotFoundError as error:
        reason = offline or first_line(error)
        what = f"there is no such folder, the hub cannot be asked ({reason}), and its local cache does not hold it"
        raise BadInput(what, where=name, hint="give a folder that exists, or connect to the hub") from error
    except errors.GatedRepoError as error:
        raise BadInput("this model on the hub may not be read", where=name, hint="hf auth login") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise BadInput("there is no such folder, and no such model on the hub", where=name, hint=login) from error
    except errors.HfHubHTTPError as error:
        what = f"the hub refuses: {first_line(error)}"
        raise BadInput(what, where=name, hint="try again later, or give a folder") from error


def cache_folder(of: str) -> Path:
    """The folder of copies that can be made again: `CI_LLM_CACHE`, or below `XDG_CACHE_HOME`, or `~/.cache`."""
    if given := os.environ.get("CI_LLM_CACHE"):
        return Path(given, of).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ci_llm", of).absolute()
