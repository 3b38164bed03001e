"""JSON that strangers sent: what it would need in memory is bounded before it is parsed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONG = 2**16  # bytes; a body above it is parsed beside the event loop


@dataclass(frozen=True, kw_only=True)
class Most:
    """How much of each the images of one request need."""

    lists: int = 0  # and objects
    values: int = 0
    strings: int = 0


def load_json(
    text: bytes, most: Most, *, encoding: str = "utf-8", parse_constant: Callable[[str], Any] | None = None
) -> Any:
    """Return what a text holds. Raises ValueError, also where it holds far more than needed; RecursionError.

    An empty list takes 3 bytes of text and 64 of memory, hence the counts. Each list, value and string has at least one
    of the characters that are counted.
    """
    if len(text) <= LONG:
        return json.loads(text.decode(encoding), parse_constant=parse_constant)
    for what, found, needed in (
        ("lists and objects", text.count(b"[") + text.count(b"{"), most.lists),
        ("values", text.count(b","), most.values),
        ("strings", text.count(b'"') // 2, most.strings),
    ):
        if found > 2 * needed + 1000:
            raise ValueError(f"it holds {found} {what}, and the images of one request need {needed}")
    # Python's own functions: the parser in C holds the interpreter's lock to its end, these let others have it.
    return json.loads(text.decode(encoding), parse_constant=parse_constant, parse_int=_int, parse_float=_float)


def _int(digits: str) -> int:
    return int(digits)


def _float(digits: str) -> float:
    return float(digits)
