"""dsimg.ds_json: finding a DeepSpeed JSON, and reading it as people write them."""

from pathlib import Path
from typing import Any

import pytest

from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.errors import ConfigError


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "user.json"
    path.write_text(text, encoding="utf-8")
    return read_ds_config(path)


def read_error(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path) + "/", "")


# Finding


def test_a_bare_name_finds_the_shipped_file_and_a_path_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_ds_config("zero2").name == "zero2.json"
    assert find_ds_config("zero2.json") == find_ds_config("zero2")
    Path("zero2.json").write_text("{}")
    assert find_ds_config("zero2.json") == Path("zero2.json")
    assert find_ds_config("./zero2.json") == Path("zero2.json")


def test_a_missing_file_names_the_near_one_and_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero22 does not exist, did you mean 'zero2'\? The ones .* bf16, demo"):
        find_ds_config("zero22")
    with pytest.raises(ConfigError, match=r"nowhere/zero3.json does not exist, did you mean 'zero3'"):
        find_ds_config("nowhere/zero3.json")
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        find_ds_config(str(tmp_path))


# Reading


def test_comments_trailing_commas_and_a_bom_are_read(tmp_path: Path) -> None:
    text = '﻿{\n# a\n"a": 1, // b\n/* c\n */ "b": [1, 2.5e3, -1,], "c": {"d": "# // no comment",},\n}\n# end'
    assert read(tmp_path, text) == {"a": 1, "b": [1, 2500.0, -1], "c": {"d": "# // no comment"}}
    assert read(tmp_path, '{"a": true, "b": null, "c": false}') == {"a": True, "b": None, "c": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"a": 1,\n"a": 2\n}', "user.json, line 3: 'a' stands twice, on lines 2 and 3; keep one of them"),
        ('{\n"a": NaN}', "user.json, line 2: NaN is not a number JSON or DeepSpeed can use (NaN, Infinity)"),
        ('{"a": -Infinity}', "user.json, line 1: -Infinity is not a number"),
        ('{"a": 1e999}', "user.json, line 1: 1e999 is too large for a number"),
        ('{\n"a": False,\n}', "user.json, line 2: False is not JSON; write false"),
        ('{"a": None}', "user.json, line 1: None is not JSON; write null"),
        ('{\n"a": 1\n"b": 2}', 'user.json, line 2: a comma is missing at the end, before "b"'),
        ('{\n"a": {\n"b": 1,\n', "user.json, line 4: unexpected end of the file; { of line 2 is never closed by }"),
        ('{"a":', "user.json, line 1: unexpected end of the file"),
        ("", "user.json, line 1: unexpected end of the file"),
        ('{"a": [1, 2', "user.json, line 1: unexpected end of the file; [ of line 1 is never closed by ]"),
        ('{"a" 1}', "user.json, line 1: a colon is missing after 'a'"),
        ("{a: 1}", "user.json, line 1: 'a' is not a key; keys stand in double quotes"),
        ('{"a": AdamW}', "user.json, line 1: AdamW is neither a number, true, false, null nor text"),
        ('{"a": 1.}', "user.json, line 1: 1. is neither a number"),
        ('{"a": "x}', "user.json, line 1: bad text in quotes"),
        ('{"a": 1} {', "user.json, line 1: '{' after the end of the config"),
        ('{ /* "a": 1}', "user.json, line 1: a comment opened with /* is never closed"),
        ('[{"a": 1}]', "user.json holds a list; a DeepSpeed config is one block: { ... }"),
    ],
)
def test_what_is_not_json_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert read_error(tmp_path, text).startswith(message)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "user.json"
    path.write_bytes('{"a": 1}'.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"user.json is not UTF-8 text .* save it as UTF-8"):
        read_ds_config(path)
