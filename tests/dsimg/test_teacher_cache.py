"""A teacher's logits on disk: what comes back, what is computed again, which cache is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsimg.errors import DsimgError
from dsimg.teacher_cache import TOP_K, TeacherCache, prepare_cache

KEY: dict[str, Any] = {"teacher": "5f", "seed": 0, "augmentation": {"name": "light"}}
ALL = np.array([True, True, True])
IDS = np.array([4, 0, 2])


def cache_in(folder: Path, *, samples: int = 6, classes: int = 3) -> TeacherCache:
    prepare_cache(folder, KEY)
    return TeacherCache(folder, samples=samples, classes=classes)


def logits_of(n: int, classes: int, *, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(n, classes, generator=torch.Generator().manual_seed(classes))


def test_what_was_written_comes_back_in_any_order_and_epoch(tmp_path: Path) -> None:
    logits = logits_of(3, 3)
    given = cache_in(tmp_path / "cache").write(1, IDS, logits, keep=ALL)
    other = cache_in(tmp_path / "cache")
    back = other.read(1, IDS[::-1].copy())
    assert back is not None
    assert torch.equal(back, given.flip(0))
    torch.testing.assert_close(back.softmax(1), logits.flip(0).softmax(1), rtol=0, atol=1e-3)
    # From the best class, in fp16: that is all that is kept.
    assert torch.equal(given, (logits - logits.amax(1, keepdim=True)).half().float())
    assert other.read(0, IDS) is None


def test_one_missing_row_makes_the_batch_missing(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "cache")
    cache.write(0, IDS, logits_of(3, 3), keep=ALL)
    assert cache.read(0, np.array([4, 5])) is None
    assert cache.read(0, np.array([4, 1])) is None  # in the file, and never written
    assert cache.read(0, np.array([4, 2])) is not None


def test_what_fills_a_batch_up_is_not_kept(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "cache")
    logits = logits_of(3, 3)
    given = cache.write(0, IDS, logits, keep=np.array([True, False, True]))
    assert given.shape == (3, 3)
    assert cache.computed == 2
    assert cache.read(0, IDS[:1]) is not None
    assert cache.read(0, IDS[1:2]) is None


@pytest.mark.parametrize("classes", [3, 250])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "zeroed"])
def test_a_torn_row_is_computed_again(tmp_path: Path, classes: int, damage: str) -> None:
    cache = cache_in(tmp_path / "cache", classes=classes)
    logits = logits_of(3, classes)
    cache.write(0, IDS, logits, keep=ALL)
    path = tmp_path / "cache" / "epoch_00000.bin"
    content = bytearray(path.read_bytes())
    assert len(content) == 5 * cache.bytes_of(1) // 6  # the rows up to sample 4
    row = len(content) // 5
    if damage == "truncated":
        content = content[: -row // 2]
    elif damage == "flipped":
        content[4 * row + 1] ^= 1
    else:
        content[4 * row :] = bytes(row)
    path.write_bytes(bytes(content))
    cache = cache_in(tmp_path / "cache", classes=classes)
    assert cache.read(0, IDS) is None
    assert cache.read(0, IDS[1:]) is not None
    cache.write(0, IDS, logits, keep=ALL)
    assert cache.read(0, IDS) is not None


def test_of_many_classes_the_best_and_the_mass_of_the_others_are_kept(tmp_path: Path) -> None:
    logits = logits_of(3, 1000)
    cache = cache_in(tmp_path / "cache", classes=1000)
    assert cache.bytes_of(2) == 2 * 6 * (TOP_K * (2 + 4) + 2 + 4)
    given = cache.write(0, IDS, logits, keep=ALL)
    back = cache.read(0, IDS)
    assert back is not None
    assert torch.equal(back, given)
    whole, kept = logits.softmax(1), back.softmax(1)
    best = whole.topk(TOP_K, dim=1).indices
    torch.testing.assert_close(kept.gather(1, best), whole.gather(1, best), rtol=4e-3, atol=1e-6)
    rest = torch.ones_like(whole).scatter(1, best, 0.0)
    torch.testing.assert_close((kept * rest).sum(1), (whole * rest).sum(1), rtol=4e-3, atol=1e-6)
    assert float((kept * rest)[0].unique().numel()) == 2  # the same for all the others, and 0 where they are not
    assert float(0.5 * (kept - whole).abs().sum(1).max()) < 0.1  # total variation


def test_a_hundred_classes_are_kept_whole(tmp_path: Path) -> None:
    for classes, width in ((TOP_K, 2 * TOP_K + 4), (TOP_K + 1, 6 * TOP_K + 2 + 4)):
        cache = cache_in(tmp_path / str(classes), classes=classes)
        assert cache.bytes_of(1) == 6 * width
        logits = logits_of(3, classes)
        given = cache.write(0, IDS, logits, keep=ALL)
        torch.testing.assert_close(given.softmax(1), logits.softmax(1), rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 250])
def test_logits_beyond_fp16_stay_finite(tmp_path: Path, classes: int) -> None:
    logits = torch.zeros(3, classes)
    logits[:, 0] = 1e6
    given = cache_in(tmp_path / "cache", classes=classes).write(0, IDS, logits, keep=ALL)
    assert given.isfinite().all()
    assert torch.equal(given.softmax(1), logits.softmax(1))


def test_a_full_disk_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_in(tmp_path / "cache")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DsimgError, match=r"cannot write the teacher's cache .*: No space left on device\. Free some"):
        cache.write(0, IDS, logits_of(3, 3), keep=ALL)


def test_a_cache_that_cannot_be_opened_is_the_users_to_mend(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "cache")
    (tmp_path / "cache" / "epoch_00000.bin").mkdir()
    with pytest.raises(DsimgError, match=r"cannot open the teacher's cache .*: Is a directory"):
        cache.read(0, IDS)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"teacher": "60"}, r"was made with another teacher \(5f; now 60\)\. Choose another folder"),
        ({"seed": 1}, r"another seed \(0; now 1\)"),
        ({"augmentation": {"name": "strong"}}, "another augmentation"),
        ({"schema": 9}, "another schema"),
    ],
)
def test_a_cache_of_something_else_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    prepare_cache(tmp_path / "cache", KEY)
    prepare_cache(tmp_path / "cache", KEY)
    before = (tmp_path / "cache" / "cache.json").read_bytes()
    with pytest.raises(DsimgError, match=message):
        prepare_cache(tmp_path / "cache", {**KEY, **other})
    assert (tmp_path / "cache" / "cache.json").read_bytes() == before


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DsimgError, match="holds something other than a cache"):
        prepare_cache(tmp_path, KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(DsimgError, match=r"--cache_teacher .*notes\.txt is no folder to write to: File exists"):
        prepare_cache(tmp_path / "notes.txt", KEY)
