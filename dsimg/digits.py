"""The embedded data set: scikit-learn's handwritten digits, written once as class folders of PNG files."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dsimg.errors import DataError

SIDE = 32  # the pictures are 8x8; enlarged, a padded crop and cifar_resnet fit them
COUNT = 1797
VAL_SHARE = 0.2


def write_digits(root: Path) -> Path:
    """Write train/<digit>/ and val/<digit>/ into `root` and return it; a complete `root` is left as it is.

    1,797 grey 32x32 PNG files, 20 % of each digit in val/, the same on every machine. It appears whole
    or not at all, also when several processes write it at once. Raises DataError: scikit-learn is missing, or
    `root` holds something else.
    """
    if root.exists():
        return _complete(root)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn; run pip install 'dsimg[train]'.") from None
    digits = load_digits()
    root.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        _write(temporary, pixels=np.rint(digits.images * (255 / 16)).astype(np.uint8), labels=digits.target)
        temporary.chmod(0o755)  # mkdtemp makes it for its owner alone
        temporary.rename(root)
    except OSError:
        if not root.exists():
            raise
        return _complete(root)  # another process was first
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return root


def _complete(root: Path) -> Path:
    sizes = [path.stat().st_size for path in root.glob("*/[0-9]/*.png")]
    if len(sizes) != COUNT or 0 in sizes:
        raise DataError(f"{root} is not the complete set of digits; remove it, and it is written again.")
    return root


def _write(folder: Path, *, pixels: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
    """Write the pictures, pixels (N, 8, 8) and labels (N,), as PNG files in class folders."""
    rng = np.random.default_rng(0)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        held_out = round(len(members) * VAL_SHARE)
        for split, indices in (("val", members[:held_out]), ("train", members[held_out:])):
            target = folder / split / str(digit)
            target.mkdir(parents=True)
            for index in indices:
                image = Image.fromarray(pixels[index]).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                image.save(target / f"{index:04d}.png")
