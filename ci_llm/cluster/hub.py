"""Whether the Hugging Face hub can be asked, found out once and quickly; where it cannot, only its cache is used.

Without this every name of the hub costs half a minute of retries, each of them a line, before it is an error.
"""

from __future__ import annotations

import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from typing import Final

OFFLINE: Final = "HF_HUB_OFFLINE"
TIMEOUT_S: Final = 5.0
_ID: Final = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILE: Final = re.compile(r".*\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|ya?ml)(\.(gz|bz2|xz|zst))?")


def may_be_on_hub(name: str) -> bool:
    """Whether `name` has the form of a hub id, and nothing here is called so."""
    if name == "embedded" or _FILE.fullmatch(name):
        return False
    return _ID.fullmatch(name) is not None and not os.path.exists(os.path.expanduser(name))


def why_unreachable(timeout_s: float = TIMEOUT_S) -> str | None:
    """Ask the hub for an answer, whatever it is; the reason if there is none. Honours HF_ENDPOINT and proxies."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=timeout_s):
            return None
    except urllib.error.HTTPError:
        return None  # an answer
    except urllib.error.URLError as error:
        # Its certificate is for the libraries to judge, which may know other authorities than this call.
        return None if isinstance(error.reason, ssl.SSLError) else f"{endpoint}: {error.reason}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{endpoint}: {error}"


def go_offline_if_unreachable(*names: str) -> str | None:
    """Keep the libraries from asking the hub in vain. Call it before they are imported: they read it only then.

    Args:
        names: of base model and data set; without one that may be on the hub nobody is asked.

    Returns:
        why the hub is out of reach, if that was found out now.
    """
    if OFFLINE in os.environ or not any(map(may_be_on_hub, names)):
        return None
    reason = why_unreachable()
    if reason is not None:
        os.environ[OFFLINE] = "1"
    return reason
