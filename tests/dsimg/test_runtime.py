"""Which runtime a run needs, and what is said where it is not here."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dsimg.errors import ConfigError
from dsimg.run import Run
from dsimg.runtime import choose_runtime, require_onnxruntime, require_torch

ROOT = Path(__file__).resolve().parents[2]


def run_with(*roles: str) -> Run:
    return Run(Path("runs/one"), {"files": {role: {} for role in roles}})


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))


def test_a_file_goes_to_onnx_runtime_and_weights_to_torch() -> None:
    assert choose_runtime(run_with("model"), threads=2, provider="cuda") == "onnxruntime"
    assert choose_runtime(run_with("weights"), threads=None, provider="cpu") == "torch"


@pytest.mark.parametrize(("threads", "provider"), [(1, "cpu"), (None, "cuda")])
def test_what_only_onnx_runtime_knows_is_refused_for_torch(threads: int | None, provider: str) -> None:
    with pytest.raises(ConfigError, match=r"runs/one has no ONNX file\. Leave them out, or export the run first"):
        choose_runtime(run_with("weights"), threads=threads, provider=provider)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "package", "extra"), [("model", "onnxruntime", "serve"), ("weights", "torch", "train")]
)
def test_a_runtime_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, role: str, package: str, extra: str
) -> None:
    without(monkeypatch, package)
    with pytest.raises(ConfigError, match=rf"runs/one.* needs {package}: .*'dsimg\[{extra}\]'"):
        choose_runtime(run_with(role), threads=None, provider="cpu")


def test_what_needs_a_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    require_onnxruntime("measuring a session")
    require_torch("training")
    without(monkeypatch, "onnxruntime")
    with pytest.raises(ConfigError, match=r"^measuring a session needs onnxruntime: pip install"):
        require_onnxruntime("measuring a session")
    without(monkeypatch, "torch")
    with pytest.raises(ConfigError, match=r"^training needs torch: pip install 'dsimg\[train\]'\.$"):
        require_torch("training")


@pytest.mark.parametrize(
    ("stage", "package", "extra"),
    [("verify", "onnxruntime", "serve"), ("export", "onnxruntime", "serve"), ("train", "deepspeed", "train")],
)
def test_a_stage_without_its_package_names_the_extra_that_brings_it(stage: str, package: str, extra: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['dsimg', {stage!r}]; "
    program += "from dsimg.__main__ import main; main()"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert answer.returncode == 2, answer.stderr
    said = answer.stdout + answer.stderr
    assert f"needs the package '{package}'" in said
    assert f"'dsimg[{extra}]'" in said
    assert "Traceback" not in said
