"""Typed JSON, in which int keys, tuples, bytes and infinities survive a round trip.

A value that JSON would change is written as an object with one key that starts with "$":

    (1, 2)                {"$tuple": [1, 2]}
    {0: "a"}              {"$dict": [[0, "a"]]}      also a mapping with a key that starts with "$"
    float("inf")          {"$float": "inf"}          so that no file ever holds NaN or Infinity
    b"ab"                 {"$bytes": "YWI="}

A document may carry a digest of itself (`seal`), so that damage in it is seen. What a record has to hold is said by the
annotations of its dataclass (`as_type`).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, cast

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Leaf: TypeAlias = Callable[[object, str], Json]
Tags: TypeAlias = Mapping[str, Callable[[Json], object]]


def reject(value: object, where: str) -> Json:
    """The default leaf of `encode`: every value that is not plain is an error."""
    raise TypeError(f"{where or 'value'}: a {type(value).__name__} has no plain form")


def dump_json(value: object, *, indent: int | None = None) -> bytes:
    """Typed JSON, UTF-8, one newline at the end.

    Raises:
        TypeError: a value has no plain form; the message has its address.
    """
    return (json.dumps(encode(value), indent=indent, allow_nan=False) + "\n").encode()


def load_json(data: bytes | str) -> object:
    """The inverse of `dump_json`. Raises ValueError for anything that `dump_json` does not write."""
    return decode(parse_json(data))


def parse_json(data: bytes | str) -> Json:
    """Strict JSON. Raises ValueError, also for NaN and for nesting beyond the depth of the parser."""
    try:
        value: Json = json.loads(data, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def encode(value: object, leaf: Leaf = reject, where: str = "") -> Json:
    """Plain JSON for `value`. `leaf` gets what is neither plain nor a container, with its address, and encodes it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)  # also for a subclass, such as an IntEnum
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, leaf, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, leaf, where)
    return leaf(value, where)


def _encode_mapping(value: Mapping[object, object], leaf: Leaf, where: str) -> Json:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {str(key): encode(item, leaf, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    pairs: list[Json] = [
        [encode(key, reject, f"{where} key"), encode(item, leaf, f"{where}[{key!r}]")] for key, item in value.items()
    ]
    return {"$dict": pairs}


def decode(value: Json, tags: Tags | None = None) -> object:
    """The inverse of `encode`.

    Args:
        value: plain JSON.
        tags: by tag, the function that decodes an object of `leaf`.

    Raises:
        ValueError: an unknown or malformed tag.
    """
    if isinstance(value, list):
        return [decode(item, tags) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, tags) for key, item in value.items()}
    # A mapping with such a key would have been written as "$dict": this object was not written by `encode`.
    if len(value) != 1:
        raise ValueError(f"malformed tag {sorted(value)}")
    [(tag, content)] = value.items()
    return _decode_tag(tag, content, tags or {})


def _decode_tag(tag: str, content: Json, tags: Tags) -> object:
    if tag in tags:
        return tags[tag](content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode(item, tags) for item in content)
    if tag == "$dict" and isinstance(content, list):
        return _decode_dict(content, tags)
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(str(content))
    if tag == "$bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    raise ValueError(f"unknown or malformed tag {tag}")


def _decode_dict(pairs: list[Json], tags: Tags) -> dict[object, object]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("malformed tag $dict")
    try:
        return {decode(key, tags): decode(value, tags) for key, value in cast("list[list[Json]]", pairs)}
    except TypeError as error:  # such as a list, which cannot be a key
        raise ValueError("malformed tag $dict") from error


def _new_adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # takes 150 ms, and a supervisor's shim, which imports this file, reads no record

    return TypeAdapter(kind)


_adapter: Callable[[Any], Any] = cache(_new_adapter)


class _NullIsNan:
    """Reads null as NaN; pydantic looks for this method."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: math.nan if value is None else value, handler(source)
        )


#: A number of a record that may not be known: NaN here, and null in a file that others read.
Number: TypeAlias = Annotated[float, _NullIsNan()]


def with_nulls(value: Any, is_known: Callable[[float], bool] = math.isfinite) -> Any:
    """Plain values with None for every number that is not known."""
    if isinstance(value, float):
        return value if is_known(value) else None
    if isinstance(value, Mapping):
        return {key: with_nulls(item, is_known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_nulls(item, is_known) for item in value]
    return value


def as_type(kind: type[T], value: object) -> T:
    """A dataclass, or another type, of plain values. Keys that it does not know are skipped: a newer version has them.

    Raises:
        ValueError: a part is missing or not of its type, with the address of the part.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        address = ".".join(map(str, first["loc"]))
        wrong = f"{address}: {first['msg']}" if address else first["msg"]
        raise ValueError(f"it lacks {address!r}" if first["type"] == "missing" else wrong) from error
    return found


def as_plain(value: Any, *, exclude_defaults: bool = False) -> dict[str, Any]:
    """The inverse of `as_type` for a dataclass: its fields as plain values.

    Args:
        exclude_defaults: leave out what has its default value.
    """
    found: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json", exclude_defaults=exclude_defaults)
    return found


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
