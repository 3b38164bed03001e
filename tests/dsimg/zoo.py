"""The zoo of awkward files and folders in shared/cases, beside the checkout; not everywhere."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAKE_ZOO = Path(__file__).resolve().parents[2] / "../shared/cases/make_zoo.py"


def make_zoo(folder: Path) -> dict[str, Any]:
    """Write the zoo into the new `folder` and return its expect.json; skip the test where there is no zoo."""
    if not MAKE_ZOO.is_file():
        pytest.skip("the zoo of awkward images, shared/cases beside the checkout, is not here")
    subprocess.run([sys.executable, str(MAKE_ZOO), "--out", str(folder)], check=True, capture_output=True)
    expect: dict[str, Any] = json.loads((folder / "expect.json").read_text())
    return expect
