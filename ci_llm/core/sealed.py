"""JSON documents that carry a digest of themselves, so that damage in them is seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ci_llm.core.typed_json import Json, parse_json

#: One of hashlib, called with the bytes.
Algorithm: TypeAlias = Callable[[bytes], Any]


def seal(body: Mapping[str, Json], algorithm: Algorithm) -> bytes:
    """The bytes of a document: its keys in their order, the digest of them last."""
    return _text({**body, "digest": algorithm(_text(body)).hexdigest()})


def unseal(data: bytes, algorithm: Algorithm, name: str) -> dict[str, Json]:
    """The inverse of `seal`, byte for byte. Raises ValueError with the `name` of the document: it is damaged."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{name} is not as it was written: {error}") from error
    if not isinstance(body, dict) or _text(body) != data:
        raise ValueError(f"{name} is not as it was written")
    if body.pop("digest", None) != algorithm(_text(body)).hexdigest():
        raise ValueError(f"{name} does not have its own digest")
    return body


def _text(body: Mapping[str, Json]) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
