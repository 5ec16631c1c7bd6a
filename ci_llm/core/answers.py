"""The last number of a text, which rewards and evaluation alike take as its answer (GSM8K: Cobbe et al., 2021)."""

from __future__ import annotations

import re

#: A sign right after a digit is an operation: 10-3 ends with the number 3.
NUMBER = re.compile(
    r"(?P<sign>(?<![0-9])[-+])?\$?(?P<digits>(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def last_number(text: str) -> str | None:
    """The last number in a text as `normalised`; None without one."""
    *_, last = [None, *NUMBER.finditer(text)]
    return normalised(last) or None


def normalised(found: re.Match[str] | None) -> str:
    """A number without its superfluous characters: 1,234.50 becomes 1234.5; "" for None.

    It works on digits, because different long numbers can be equal as floats.
    """
    if found is None:
        return ""
    whole, _, part = found["digits"].replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["sign"] == "-" and value != "0" else value
