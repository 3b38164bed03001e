"""dsimg.cache: what decoded images take, and when they are kept."""

import os
from pathlib import Path

import pytest

from dsimg import cache
from dsimg.errors import ConfigError, DataError
from tests.dsimg.pictures import PADDED, RESIZED, write_split


def test_cache_plan_knows_its_size_before_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "free_memory", lambda: 1_000_000)
    sizes = cache.sample_sizes(write_split(tmp_path, 45))
    assert sizes == [(32, 32)] * 45
    plan = cache.plan_cache(45, sizes, "auto", augmentation=PADDED)
    assert plan == cache.CachePlan(ram=True, text="in RAM: 45 decoded images take 0.1 MB of 1.0 MB free")
    two = cache.plan_cache(45, sizes, "auto", augmentation=PADDED, local_ranks=2)
    assert not two.ram
    assert two.text == (
        "none, decoded by the workers every epoch: 45 decoded images take 0.1 MB in each of 2 ranks, 0.3 MB together, "
        "over a quarter of the 1.0 MB free"
    )
    assert cache.plan_cache(45, sizes, "ram", augmentation=PADDED, local_ranks=2).ram
    assert not cache.plan_cache(45, sizes, "none", augmentation=PADDED).ram
    with pytest.raises(DataError) as error:
        cache.plan_cache(450, sizes, "ram", augmentation=PADDED)
    assert str(error.value) == (
        "--cache ram: 450 decoded images take 1.4 MB; 1.0 MB are free. Use --cache none, a smaller image_size, or "
        "fewer ranks."
    )
    with pytest.raises(ConfigError, match="cache is 'rum', did you mean 'ram'"):
        cache.plan_cache(45, sizes, "rum", augmentation=PADDED)


def test_large_images_are_left_on_disk_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "free_memory", lambda: 10**9)
    split = write_split(tmp_path, 21, size=lambda index: (90 + 7 * index % 40, 60 + 11 * index % 50))
    sizes = cache.sample_sizes(split)
    auto = cache.plan_cache(21, sizes, "auto", augmentation=RESIZED)
    assert not auto.ram
    assert auto.text.endswith("the images are much larger than the model's input")
    pixels = sum(height * width for height, width in sizes)
    for augmentation, size in ((RESIZED, 3 * pixels), (PADDED, 3 * 21 * 32 * 32)):
        kept = cache.plan_cache(21, sizes, "ram", augmentation=augmentation)
        assert f"21 decoded images take {cache.gigabytes(size)} of 1.0 GB free" in kept.text


def test_sampled_sizes_leave_damaged_files_out(tmp_path: Path) -> None:
    split = write_split(tmp_path, 5)
    (tmp_path / split.files[2]).write_bytes(b"no image")
    assert cache.sample_sizes(split) == [(32, 32)] * 4


def test_free_memory_is_that_of_the_machine_at_most() -> None:
    assert 0 < cache.free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
