"""Find a DeepSpeed JSON by path or name, and read it as people write them. No torch, no deepspeed."""

import json
import math
import re
from pathlib import Path
from typing import Any

from dsimg.errors import ConfigError, near


def find_ds_config(name: str) -> Path:
    """Return the file for `--deepspeed_config`: a path, or the bare name of a shipped one (`zero2`).

    Raises ConfigError when it is a folder or is nowhere, with the names that exist.
    """
    path = Path(name)
    if path.is_file():
        return path
    here = Path(__file__).resolve().parent
    folder = next((f for f in (here / "ds_configs", here.parent / "ds_configs") if f.is_dir()), None)
    shipped = {file.stem: file for file in sorted(folder.glob("*.json"))} if folder else {}
    stem = path.name.removesuffix(".json")
    if path.parent == Path() and stem in shipped:
        return shipped[stem]
    names = f"The ones that come with dsimg are {', '.join(shipped)}." if shipped else "Give the path of a JSON file."
    if path.is_dir():
        raise ConfigError(f"--deepspeed_config {name} is a folder, not a file. {names}")
    raise ConfigError(f"--deepspeed_config {name} does not exist{near(stem, shipped)} {names}")


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON as people write them.

    Comments (`#`, `//`, `/* */`), trailing commas and a byte order mark are fine. DeepSpeed's own reader
    (hjson) also takes unquoted words as text, so that `False,` is true; here they are errors.

    Raises ConfigError with the line number for duplicate keys, NaN, Infinity, and whatever else is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    value = _Reader(path, text).document()
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else json.dumps(value)
        raise ConfigError(f"{path} holds {found}; a DeepSpeed config is one block: {{ ... }}")
    return value


_BLANK = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\s,:{}\[\]]+")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class _Reader:
    """A recursive-descent reader that knows the line it is on."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text, self.at = path, text, 0

    def document(self) -> Any:
        value = self.value()
        if self.peek():
            raise self.error(f"{self.word()!r} after the end of the config; delete it")
        return value

    def error(self, what: str, at: int | None = None) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.line(self.at if at is None else at)}: {what}")

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def peek(self) -> str:
        blank = _BLANK.match(self.text, self.at)
        assert blank is not None  # the pattern matches the empty string
        self.at = blank.end()
        if self.text.startswith("/*", self.at):
            raise self.error("a comment opened with /* is never closed with */")
        return self.text[self.at : self.at + 1]

    def word(self) -> str:
        found = _WORD.match(self.text, self.at)
        return found.group() if found else self.text[self.at : self.at + 1]

    def value(self) -> Any:
        char = self.peek()
        if char == "{":
            return self.block()
        if char == "[":
            return self.list_()
        if char == '"':
            return self.string()
        if not char:
            raise self.error("unexpected end of the file; the rest of the config is missing")
        if number := _NUMBER.match(self.text, self.at):
            parsed = float(number.group())
            if not math.isfinite(parsed):
                raise self.error(f"{number.group()} is too large for a number")
            self.at = number.end()
            return int(number.group()) if number.group().lstrip("-").isdigit() else parsed
        word = self.word()
        if word in _WORDS:
            self.at += len(word)
            return _WORDS[word]
        raise self.error(_not_json(word))

    def string(self) -> str:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.error(f"bad text in quotes ({error.msg})") from None
        return str(value)

    def list_(self) -> list[Any]:
        start, items = self.at, []
        self.at += 1
        while self.peek() != "]":
            items.append(self.value())
            self.separator("]", start)
        self.at += 1
        return items

    def block(self) -> dict[str, Any]:
        start, items, lines = self.at, {}, dict[str, int]()
        self.at += 1
        while (char := self.peek()) != "}":
            if not char:
                raise self.unclosed("}", start)
            if char != '"':
                raise self.error(f"{self.word()!r} is not a key; keys stand in double quotes")
            line = self.line(self.at)
            key = self.string()
            if key in lines:
                raise self.error(f"{key!r} stands twice, on lines {lines[key]} and {line}; keep one of them")
            lines[key] = line
            if self.peek() != ":":
                raise self.error(f"a colon is missing after {key!r}")
            self.at += 1
            items[key] = self.value()
            self.separator("}", start)
        self.at += 1
        return items

    def separator(self, closing: str, start: int) -> None:
        end, char = self.at, self.peek()
        if char == ",":
            self.at += 1
        elif not char:
            raise self.unclosed(closing, start)
        elif char != closing:
            raise self.error(f"a comma is missing at the end, before {self.word()}", at=end)

    def unclosed(self, closing: str, start: int) -> ConfigError:
        opening = self.text[start]
        return self.error(
            f"unexpected end of the file; {opening} of line {self.line(start)} is never closed by {closing}"
        )


def _not_json(word: str) -> str:
    if word.lstrip("+-").lower() in ("nan", "inf", "infinity"):
        return f"{word} is not a number JSON or DeepSpeed can use (NaN, Infinity); write a finite number"
    if word.lower() in (*_WORDS, "none"):
        return f"{word} is not JSON; write {'null' if word.lower() == 'none' else word.lower()}"
    return f"{word} is neither a number, true, false, null nor text in double quotes"
