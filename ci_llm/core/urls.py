"""URLs of object stores: which may be a mirror, and how one is shown without secrets."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file", "memory")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: object) -> bool:
    """Whether a text has the form of a URL, and so is no path."""
    return isinstance(text, str) and _URL.match(text) is not None


def without_secrets(url: str) -> str:
    """A URL as it may be shown: without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest)[0].rpartition('@')[2]}" if is_url(url) else url


def why_no_mirror(url: str) -> tuple[str, str] | None:
    """Why a text cannot be the URL of a mirror, and what to do instead; None if it can."""
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
