"""From a command line to a config and an exit code."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsimg import cli
from dsimg.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """Flags of a stage for tests."""

    out: Path = Path("runs/toy")
    """Where it goes."""
    image_size: int = 32
    """Pixels."""
    sizes: tuple[int, ...] = ()
    """Some numbers."""
    ema: bool = False
    """A switch."""
    flip: bool | None = None
    """A switch that may be left to the stage."""


def toy(config: ToyConfig) -> None:
    """A stage for tests."""


def test_flags_have_underscores_and_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('image_size = 64\nema = true\nflip = false\nsizes = [1, 2]\nout = "a b"\n')
    assert cli.parse(toy, []) == ToyConfig()
    assert cli.parse(toy, ["--config", str(recipe)]) == ToyConfig(
        image_size=64, ema=True, flip=False, sizes=(1, 2), out=Path("a b")
    )
    assert cli.parse(toy, [f"--config={recipe}", "--image_size", "96", "--no_ema"]) == ToyConfig(
        image_size=96, flip=False, sizes=(1, 2), out=Path("a b")
    )


@pytest.mark.parametrize("word", ["--local_rank=1", "--local-rank=1", "--deepspeed"])
def test_what_launchers_add_is_dropped(word: str) -> None:
    assert cli.parse(toy, [word, "--image_size", "8"]) == ToyConfig(image_size=8)
    assert cli.parse(toy, ["--local_rank", "1"]) == ToyConfig()


def test_a_wrong_recipe_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("image_sise = 64\n")
    with pytest.raises(ConfigError, match="unknown key 'image_sise', did you mean 'image_size'"):
        cli.parse(toy, ["--config", str(recipe)])
    recipe.write_text("image_size = \n")
    with pytest.raises(ConfigError, match="is not TOML"):
        cli.parse(toy, ["--config", str(recipe)])
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        cli.parse(toy, ["--config", str(tmp_path / "none.toml")])


def dsimg(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "dsimg", *words], capture_output=True, text=True, timeout=120)


def test_help_lists_the_stages_without_torch() -> None:
    code = (
        "import sys, dsimg.__main__ as m; sys.argv = ['dsimg', '--help']; m.main(); assert 'torch' not in sys.modules"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert "train" in answer.stdout
    assert "evaluate" in answer.stdout


def test_a_stages_help_names_recipes_and_says_nothing_for_callers() -> None:
    said = " ".join(dsimg("evaluate", "--help").stdout.split())
    assert "Measure a run on a folder of images" in said
    assert "--config FILE.toml" in said
    assert "Python" not in said


def test_a_misspelt_stage_is_an_error_with_the_near_name() -> None:
    answer = dsimg("tain")
    assert answer.returncode == 2
    assert "there is no stage 'tain', did you mean 'train'?" in answer.stdout


def test_a_users_error_is_one_message_without_traceback(tmp_path: Path) -> None:
    answer = dsimg("train", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run"))
    assert answer.returncode == 2
    (line,) = answer.stdout.strip().splitlines()
    assert line.startswith("error: ")
    assert "nowhere" in line
    assert answer.stderr == ""
    assert not (tmp_path / "run").exists()


def test_an_unknown_flag_is_an_error_with_the_near_name() -> None:
    answer = dsimg("train", "--image_sise", "64")
    assert answer.returncode == 2
    assert "image_size" in answer.stdout + answer.stderr


def test_a_killed_decoding_worker_is_the_users_to_mend_and_a_bug_is_a_bug() -> None:
    here = cli.context()
    code, text = cli._unexpected(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), here)
    assert (code, text.splitlines()[-1][:6]) == (2, "error:")
    assert "--workers" in text
    code, text = cli._unexpected(RuntimeError("shape mismatch"), here)
    assert code == 1
    assert "RuntimeError: shape mismatch" in text
    assert "please report it" in text
