import io
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dsimg import augment, data
from dsimg.augment import Augmentation
from dsimg.data import Batch, EvalBatch, EvalLoader, StepPlan, TrainImages, TrainLoader
from dsimg.errors import ConfigError, DataError, DeviceError, ImageError
from dsimg.folder import Split
from dsimg.preprocess import Preprocess, decode, normalise, resize_and_crop
from tests.dsimg.zoo import make_zoo

SEED = 11


def settings(size: int = 32, **changes: Any) -> Preprocess:
    values: dict[str, Any] = {
        "input_size": (3, size, size),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.25),
        "crop_pct": 1.0,
    }
    return Preprocess(**values | changes)


def picture(index: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return a smooth picture that no other index has."""
    coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_split(
    folder: Path,
    count: int,
    *,
    classes: int = 3,
    size: Callable[[int], tuple[int, int]] = lambda index: (32, 32),
    broken: tuple[int, ...] = (),
) -> Split:
    """Write `count` JPEGs of `size(index)` (width, height) into class folders; those in `broken` are cut short."""
    files = []
    labels = np.sort(np.arange(count) % classes)
    for index, label in enumerate(labels.tolist()):
        file = f"class{label}/{index:05}.jpg"
        content = encoded(picture(index, *size(index)), quality=90)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content[: len(content) // 2] if index in broken else content)
        files.append(file)
    return Split(folder, tuple(files), labels.astype(np.int64))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("small"), 45)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(
        tmp_path_factory.mktemp("large"), 21, size=lambda index: (90 + 7 * index % 40, 60 + 11 * index % 50)
    )


PADDED = Augmentation(name="standard", size=(32, 32), geometry="padded_crop")
RESIZED = Augmentation(name="strong", size=(32, 32))


def by_id(batches: Iterator[Batch]) -> dict[int, NDArray[np.uint8]]:
    """Return the pixels of each sample that counts; no sample may come twice."""
    seen: dict[int, NDArray[np.uint8]] = {}
    for batch in batches:
        for index, pixels, weight in zip(batch.ids.tolist(), batch.images.numpy(), batch.weights.tolist(), strict=True):
            if weight > 0:
                assert index not in seen
                seen[index] = pixels.copy()
    return seen


def epoch_of(images: TrainImages, *, world: int = 1, micro: int = 4, accumulation: int = 1, **options: Any) -> Any:
    """Return the samples of epoch 2 by id, put together from all ranks."""
    plan = StepPlan(samples=len(images), micro=micro, accumulation=accumulation, world=world)
    seen: dict[int, NDArray[np.uint8]] = {}
    for rank in range(world):
        loader = TrainLoader(images, plan, rank=rank, **options)
        part = by_id(loader.epoch(2))
        loader.close()
        assert not set(part) & set(seen)
        seen |= part
    return seen


def assert_same(first: dict[int, NDArray[np.uint8]], second: dict[int, NDArray[np.uint8]]) -> None:
    assert sorted(first) == sorted(second)
    for index, pixels in first.items():
        assert np.array_equal(pixels, second[index]), index


# Decoding


def exif(orientation: int, kind: int = 3) -> bytes:
    entry = struct.pack(">HHIHH", 0x0112, kind, 1, orientation, 0)
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 1) + entry + b"\0\0\0\0"


def with_segment(jpeg: bytes, payload: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


JPEG = encoded(picture(0, 50, 30), quality=90)
XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
ODD_FILES = {
    "plain": JPEG,
    "progressive": encoded(picture(1, 50, 30), progressive=True),
    "no chroma reduction": encoded(picture(1, 50, 30), subsampling=0),
    "grey": encoded(picture(2, 50, 30).convert("L")),
    "cmyk": encoded(picture(3, 50, 30).convert("CMYK")),
    "png": encoded(picture(4, 50, 30), "PNG"),
    "transparent png": encoded(picture(4, 50, 30).convert("LA"), "PNG"),
    "xmp orientation": with_segment(JPEG, XMP),
    "stray bytes at the end": JPEG + b"\0\0",
    "long orientation": with_segment(JPEG, exif(6, kind=4)),
    "broken exif": with_segment(JPEG, exif(6)[:20]),
    **{f"exif {value}": with_segment(JPEG, exif(value)) for value in range(10)},
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_pixels_are_those_of_the_one_decoder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.JPEG"
    path.write_bytes(ODD_FILES[name])
    expected = np.asarray(decode(ODD_FILES[name])).astype(int)
    pixels = data.decode_rgb(path)
    assert pixels.dtype == np.uint8
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected).max() <= 1


def test_rotated_files_are_not_all_alike() -> None:
    """Or the test above would show nothing."""
    assert np.asarray(decode(ODD_FILES["exif 6"])).shape == (50, 30, 3)
    assert np.asarray(decode(ODD_FILES["exif 1"])).shape == (30, 50, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:-2], "truncated"),
        (b"<html></html>", "not an image"),
        (b"\xff\xd8\xff\xe0\xff\xd9", "truncated"),
    ],
)
def test_unusable_files_give_their_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=reason):
        data.decode_rgb(tmp_path / "x.jpg")


def test_a_missing_file_is_unusable_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot be read: No such file or directory"):
        data.decode_rgb(tmp_path / "gone.jpg")


def test_every_file_of_the_zoo_decodes_as_the_one_decoder_does(tmp_path: Path) -> None:
    expect = make_zoo(tmp_path / "zoo")
    decoded = 0
    for row in expect["files"]:
        path = tmp_path / "zoo" / row["path"]
        expected = outcome(lambda path: np.asarray(decode(path.read_bytes())), path)
        found = outcome(data.decode_rgb, path)
        if isinstance(expected, str):
            assert found == expected
            continue
        assert not isinstance(found, str)
        assert np.abs(found.astype(int) - expected).max() <= 1, row["path"]
        decoded += 1
    assert decoded > 20


def outcome(make: Callable[[Path], NDArray[np.uint8]], path: Path) -> NDArray[np.uint8] | str:
    """Return an image, or the reason why there is none."""
    try:
        return make(path)
    except ImageError as error:
        return str(error)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_crops_are_resized_as_pillow_does_it(interpolation: str) -> None:
    sizes = itertools.product((17, 40, 64, 97, 200), repeat=2)
    for number, (height, width) in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        preprocess = settings(input_size=(3, 40, 56), interpolation=interpolation)
        method = getattr(Image.Resampling, interpolation.upper())
        theirs = np.asarray(Image.fromarray(noise).resize((56, 40), method)).astype(int)
        difference = np.abs(data.resize(noise, preprocess) - theirs)
        assert difference.max() <= 1, (height, width)
        assert difference.mean() < 0.02, (height, width)  # 0.2 with the passes in the other order


# The cache


def test_cache_plan_knows_its_size_before_reading(monkeypatch: pytest.MonkeyPatch, small: Split) -> None:
    monkeypatch.setattr(data, "free_memory", lambda: 1_000_000)
    sizes = data.sample_sizes(small)
    assert sizes == [(32, 32)] * 45
    plan = data.plan_cache(45, sizes, "auto", augmentation=PADDED)
    assert plan == data.CachePlan(ram=True, bytes=138_240, text="in RAM: 45 decoded images take 0.1 MB of 1.0 MB free")
    two = data.plan_cache(45, sizes, "auto", augmentation=PADDED, local_ranks=2)
    assert (two.ram, two.bytes) == (False, 0)
    assert two.text == (
        "none, decoded by the workers every epoch: 45 decoded images take 0.1 MB in each of 2 ranks, 0.3 MB together, "
        "over a quarter of the 1.0 MB free"
    )
    assert data.plan_cache(45, sizes, "ram", augmentation=PADDED, local_ranks=2).ram
    assert not data.plan_cache(45, sizes, "none", augmentation=PADDED).ram
    with pytest.raises(DataError) as error:
        data.plan_cache(450, sizes, "ram", augmentation=PADDED)
    assert str(error.value) == (
        "--cache ram: 450 decoded images take 1.4 MB; 1.0 MB are free. Use --cache none, a smaller image_size, or "
        "fewer ranks."
    )
    with pytest.raises(ConfigError, match="cache is 'rum', did you mean 'ram'"):
        data.plan_cache(45, sizes, "rum", augmentation=PADDED)


def test_large_images_are_left_on_disk_unless_asked_for(monkeypatch: pytest.MonkeyPatch, large: Split) -> None:
    monkeypatch.setattr(data, "free_memory", lambda: 10**9)
    sizes = data.sample_sizes(large)
    auto = data.plan_cache(21, sizes, "auto", augmentation=RESIZED)
    assert not auto.ram
    assert auto.text.endswith("the images are much larger than the model's input")
    pixels = sum(height * width for height, width in sizes)
    assert data.plan_cache(21, sizes, "ram", augmentation=RESIZED).bytes == 3 * pixels
    assert data.plan_cache(21, sizes, "ram", augmentation=PADDED).bytes == 3 * 21 * 32 * 32


def test_sampled_sizes_leave_damaged_files_out(tmp_path: Path) -> None:
    split = write_split(tmp_path, 5)
    (tmp_path / split.files[2]).write_bytes(b"no image")
    assert data.sample_sizes(split) == [(32, 32)] * 4


def test_free_memory_is_that_of_the_machine_at_most() -> None:
    assert 0 < data.free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_each_rank_decodes_with_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)))
    assert [data.decoding_workers(ranks) for ranks in (1, 3, 8, 32)] == [8, 6, 2, 1]


# The order and the steps


def test_epoch_order_is_a_permutation_by_seed_and_epoch() -> None:
    order = data.epoch_order(10, seed=1, epoch=0)
    assert order.tolist() == [7, 9, 0, 3, 5, 8, 1, 6, 2, 4]
    assert sorted(order.tolist()) == list(range(10))
    assert data.epoch_order(10, seed=1, epoch=1).tolist() != order.tolist()
    assert data.epoch_order(10, seed=2, epoch=0).tolist() != order.tolist()
    assert data.epoch_order(10, seed=1, epoch=0, shuffle=False).tolist() == list(range(10))


def test_full_steps_are_contiguous_blocks() -> None:
    plan = StepPlan(samples=48, micro=4, accumulation=2, world=3)
    assert (plan.batch_size, plan.steps) == (24, 2)
    blocks = list(plan.blocks(1))
    assert [block.positions.tolist() for block in blocks] == [
        [4, 5, 6, 7],
        [16, 17, 18, 19],
        [28, 29, 30, 31],
        [40, 41, 42, 43],
    ]
    assert [block.step for block in blocks] == [0, 0, 1, 1]
    assert [block.boundary for block in blocks] == [False, True, False, True]
    assert all(block.weights.tolist() == [0.25] * 4 for block in blocks)
    assert all(block.partner.tolist() == [1, 0, 3, 2] for block in blocks)
    assert [block.step for block in plan.blocks(1, start_step=1)] == [1, 1]


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_step_is_the_mean_over_its_samples(micro: int, accumulation: int, world: int) -> None:
    for samples in (1, 2, 3, 7, 31, 48, 50, 97):
        plan = StepPlan(samples=samples, micro=micro, accumulation=accumulation, world=world)
        ranks = [list(plan.blocks(rank)) for rank in range(world)]
        assert len({len(blocks) for blocks in ranks}) == 1
        gradient = np.zeros((plan.steps, samples))
        for blocks in ranks:
            assert [block.step for block in blocks if block.boundary] == list(range(plan.steps))
            for block in blocks:
                assert min(2, micro) <= len(block.positions) <= max(micro, min(2, micro))
                np.add.at(gradient[block.step], block.positions, block.weights / world / accumulation)
                mixed = block.partner != np.arange(len(block.partner))
                assert np.all(block.positions[mixed] // 2 == block.positions[block.partner[mixed]] // 2)
                assert np.all(block.weights[mixed] > 0)
        for step in range(plan.steps):
            low, high = step * plan.batch_size, min((step + 1) * plan.batch_size, samples)
            expected = np.zeros(samples)
            expected[low:high] = 1 / (high - low)
            np.testing.assert_allclose(gradient[step], expected, rtol=1e-6)


def test_the_tail_is_dealt_out_evenly() -> None:
    plan = StepPlan(samples=16 + 13, micro=4, accumulation=2, world=2)
    tails = [[block for block in plan.blocks(rank) if block.step == 1] for rank in range(2)]
    assert [[len(block.positions) for block in blocks] for blocks in tails] == [[2, 4], [4, 3]]
    first, second = tails
    assert [block.positions.tolist() for block in (first[0], second[0], first[1], second[1])] == [
        [16, 17],
        [18, 19, 20, 21],
        [22, 23, 24, 25],
        [26, 27, 28],
    ]
    short = StepPlan(samples=8 + 1, micro=4, accumulation=1, world=2)
    last = [list(short.blocks(rank))[-1] for rank in range(2)]
    assert [block.positions.tolist() for block in last] == [[0, 1], [8, 0]]
    assert [block.weights.tolist() for block in last] == [[0, 0], [2, 0]]
    assert [block.partner.tolist() for block in last] == [[0, 1], [0, 1]]


def test_one_rank_two_ranks_and_accumulation_see_the_same_steps(small: Split) -> None:
    images = TrainImages(small, settings(), PADDED, seed=SEED)
    steps = []
    for world, micro, accumulation in ((1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)):
        plan = StepPlan(samples=45, micro=micro, accumulation=accumulation, world=world)
        seen: dict[int, set[int]] = {}
        for rank in range(world):
            for batch in TrainLoader(images, plan, rank=rank, prefetch=False).epoch(0):
                seen.setdefault(batch.step, set()).update(batch.ids[batch.weights.numpy() > 0].tolist())
        steps.append(seen)
    assert steps[0] == steps[1] == steps[2] == steps[3]
    assert len(steps[0]) == 6


# Training batches


def test_pixels_do_not_depend_on_workers_or_cache_when_crops_are_padded(small: Split) -> None:
    files = TrainImages(small, settings(), PADDED, seed=SEED)
    expected = epoch_of(files)
    assert sorted(expected) == list(range(45))
    assert_same(epoch_of(files, workers=1), expected)
    assert_same(epoch_of(files, workers=2), expected)
    assert_same(epoch_of(files, prefetch=False), expected)
    assert_same(epoch_of(TrainImages(small, settings(), PADDED, seed=SEED, ram=True, threads=2)), expected)
    assert_same(epoch_of(files, world=2, micro=3), expected)
    assert_same(epoch_of(files, world=3, micro=2, accumulation=2), expected)


def test_pixels_do_not_depend_on_workers_or_cache_when_crops_are_resized(large: Split) -> None:
    files = TrainImages(large, settings(), RESIZED, seed=SEED)
    expected = epoch_of(files)
    assert sorted(expected) == list(range(21))
    assert_same(epoch_of(files, workers=2), expected)
    assert_same(epoch_of(TrainImages(large, settings(), RESIZED, seed=SEED, ram=True)), expected)
    assert_same(epoch_of(files, world=3, micro=4), expected)


def test_without_augmentation_training_sees_what_evaluation_sees(large: Split) -> None:
    plain = Augmentation(name="none", size=(32, 32))
    preprocess = settings(crop_pct=0.8)
    for ram in (False, True):
        seen = epoch_of(TrainImages(large, preprocess, plain, seed=SEED, ram=ram))
        for index, file in enumerate(large.files):
            expected = resize_and_crop(decode((large.folder / file).read_bytes()), preprocess)
            assert np.array_equal(seen[index].transpose(1, 2, 0), expected)


def test_a_padded_crop_is_a_shifted_image_with_black_around(small: Split) -> None:
    only_crop = Augmentation(name="light", size=(32, 32), geometry="padded_crop", flip=False)
    seen = epoch_of(TrainImages(small, settings(), only_crop, seed=SEED))
    offsets = only_crop.offsets(np.arange(45), seed=SEED, epoch=2).tolist()
    for index, (top, left) in enumerate(offsets):
        padded = np.pad(data.decode_rgb(small.folder / small.files[index]), ((4, 4), (4, 4), (0, 0)))
        assert np.array_equal(seen[index].transpose(1, 2, 0), padded[top : top + 32, left : left + 32])


def test_batches_carry_labels_and_lie_in_memory_as_channels_last(small: Split) -> None:
    choices: list[dict[str, Any]] = [{"workers": 1}, {"prefetch": True}, {"prefetch": False}]
    for options in choices:
        loader = TrainLoader(
            TrainImages(small, settings(), PADDED, seed=SEED),
            StepPlan(samples=45, micro=8, accumulation=1, world=1),
            **options,
        )
        for batch in loader.epoch(0):
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            assert batch.images.dtype == torch.uint8
            assert batch.labels.tolist() == small.labels[batch.ids].tolist()
        loader.close()


def test_an_epoch_can_be_resumed_at_a_step_and_broken_off(small: Split) -> None:
    plan = StepPlan(samples=45, micro=4, accumulation=2, world=1)
    choices: list[dict[str, Any]] = [{"workers": 2}, {"prefetch": True}]
    for options in choices:
        loader = TrainLoader(TrainImages(small, settings(), PADDED, seed=SEED), plan, **options)
        whole = [batch.images for batch in loader.epoch(1)]
        broken = loader.epoch(1)
        next(broken)
        broken.close()
        rest = [batch.images for batch in loader.epoch(1, start_step=3)]
        assert len(rest) == len(whole) - 6
        assert all(torch.equal(first, second) for first, second in zip(whole[6:], rest, strict=True))
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainings_random_numbers_do_not_move(small: Split, workers: int) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)
    images = TrainImages(small, settings(), Augmentation(name="strong", size=(32, 32)), seed=SEED)
    epoch_of(images, workers=workers)
    list(EvalLoader(small, settings(), batch_size=8, workers=workers))
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy_state)


def test_mixup_gives_the_same_images_on_any_number_of_ranks(small: Split) -> None:
    images = TrainImages(small, settings(), PADDED, seed=SEED)

    def mixed(world: int, micro: int, accumulation: int) -> dict[int, tuple[Any, ...]]:
        plan = StepPlan(samples=45, micro=micro, accumulation=accumulation, world=world)
        seen = {}
        for rank in range(world):
            for batch in TrainLoader(images, plan, rank=rank, prefetch=False).epoch(0):
                inputs = data.to_input(batch.images, settings(), "cpu")
                result = augment.mix(
                    inputs, batch.labels, batch.ids, batch.partner, seed=SEED, epoch=0, mixup=0.2, cutmix=1.0
                )
                for row in np.flatnonzero(batch.weights.numpy() > 0):
                    seen[int(batch.ids[row])] = tuple(part[row].clone() for part in result)
        return seen

    expected = mixed(1, 8, 1)
    assert len(expected) == 45
    assert sum(float(lam) == 1 for _, _, lam in expected.values()) <= 3  # the odd last one, and boxes of no area
    for other in (mixed(2, 4, 1), mixed(1, 4, 2), mixed(2, 2, 2)):
        assert sorted(other) == sorted(expected)
        for index, parts in expected.items():
            assert all(torch.equal(first, second) for first, second in zip(parts, other[index], strict=True))


# Files that cannot be used


@pytest.mark.parametrize("augmentation", [PADDED, RESIZED])
def test_unusable_files_are_replaced_alike_and_reported_once(tmp_path: Path, augmentation: Augmentation) -> None:
    broken = (0, 7, 8, 20)
    split = write_split(tmp_path, 24, broken=broken)
    files = TrainImages(split, settings(), augmentation, seed=SEED)
    expected = epoch_of(files)
    assert sorted(expected) == list(range(24))
    assert_same(epoch_of(files, workers=2), expected)
    assert_same(epoch_of(files, world=3), expected)
    ram = TrainImages(split, settings(), augmentation, seed=SEED, ram=True)
    assert_same(epoch_of(ram), expected)
    names = {split.files[index] for index in broken}
    assert set(ram.bad) == names
    plan = StepPlan(samples=24, micro=4, accumulation=1, world=1)
    for images, workers in ((files, 0), (files, 2), (ram, 0)):
        loader = TrainLoader(images, plan, workers=workers)
        reported = [bad for epoch in range(2) for batch in loader.epoch(epoch) for bad in batch.bad]
        assert len(reported) == 4
        assert dict(reported) == loader.bad
        assert set(loader.bad) == names
        assert all("truncated" in reason for reason in loader.bad.values())
        loader.close()


def test_a_replacement_is_of_the_same_class(tmp_path: Path) -> None:
    split = write_split(tmp_path, 12, classes=3, broken=(4, 5))
    plain = Augmentation(name="none", size=(32, 32))
    seen = epoch_of(TrainImages(split, settings(), plain, seed=SEED))
    for index in (4, 5):
        assert any(np.array_equal(seen[index], seen[other]) for other in (6, 7))


@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"workers": 1}])
def test_a_class_without_a_usable_file_stops_the_run(tmp_path: Path, options: dict[str, Any]) -> None:
    split = write_split(tmp_path, 6, classes=2, broken=(3, 4, 5))
    message = (
        r"class1/0000\d.jpg cannot be decoded, nor can those of its class tried in its place. "
        r"Replace the files of .*class1, or remove that class."
    )
    loader = TrainLoader(
        TrainImages(split, settings(), PADDED, seed=SEED),
        StepPlan(samples=6, micro=2, accumulation=1, world=1),
        **options,
    )
    with pytest.raises(DataError, match=message):
        list(loader.epoch(0))
    loader.close()
    with pytest.raises(DataError, match=message):
        TrainImages(split, settings(), PADDED, seed=SEED, ram=True)


# Workers


def test_too_little_shared_memory_is_an_error_not_a_bus_error(monkeypatch: pytest.MonkeyPatch, small: Split) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DeviceError) as error:
        TrainLoader(
            TrainImages(small, settings(), PADDED, seed=SEED),
            StepPlan(samples=45, micro=8, accumulation=1, world=1),
            workers=2,
        )
    assert str(error.value) == (
        "2 workers need 0.1 MB of shared memory, /dev/shm has 0.0 MB. Start the container with a larger --shm-size, or "
        "use fewer workers."
    )


def worker_ids() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(child) for child in children]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_workers_leave_stopping_to_the_main_process(small: Split) -> None:
    before = set(worker_ids())
    loader = TrainLoader(
        TrainImages(small, settings(), PADDED, seed=SEED),
        StepPlan(samples=45, micro=2, accumulation=1, world=1),
        workers=2,
    )
    batches = loader.epoch(0)
    next(batches), next(batches)  # one from each: both have started
    workers = set(worker_ids()) - before
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGINT)
        os.kill(worker, signal.SIGTERM)
    assert sum(len(batch.ids) for batch in batches) == 45 + 1 - 4  # one of weight 0 beside the last
    loader.close()
    assert not set(worker_ids()) - before


def test_a_process_that_ends_in_the_middle_of_an_epoch_does_not_hang(small: Split) -> None:
    program = f"""
from pathlib import Path
import numpy as np
from dsimg.data import StepPlan, TrainImages, TrainLoader
from dsimg.augment import Augmentation
from dsimg.folder import Split
from dsimg.preprocess import Preprocess
split = Split(Path({str(small.folder)!r}), {small.files!r}, np.array({small.labels.tolist()!r}))
preprocess = Preprocess(input_size=(3, 32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
images = TrainImages(split, preprocess, Augmentation(name="light", size=(32, 32)), seed=0)
batches = TrainLoader(images, StepPlan(samples=45, micro=4, accumulation=1, world=1), workers=2).epoch(0)
next(batches)
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 7


def test_a_killed_worker_gives_the_likely_reason(monkeypatch: pytest.MonkeyPatch, small: Split) -> None:
    def killed(_: Any) -> Any:
        # What torch raises; really to kill one would raise it at any line of this test.
        raise RuntimeError("DataLoader worker (pid 123) is killed by signal: Killed. ")

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", killed)
    loader = TrainLoader(
        TrainImages(small, settings(), PADDED, seed=SEED),
        StepPlan(samples=45, micro=2, accumulation=1, world=1),
        workers=1,
    )
    with pytest.raises(DeviceError) as error:
        list(loader.epoch(0))
    assert str(error.value) == (
        "A process that decodes images was killed (DataLoader worker (pid 123) is killed by signal: Killed). Memory "
        "ran out, most likely: use fewer workers, or a smaller micro-batch."
    )


# Evaluation


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_image_is_evaluated_once_on_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    content = encoded(picture(0, 8, 8))
    (tmp_path / "a").mkdir()
    files = tuple(f"a/{index}.jpg" for index in range(1003))
    for file in files:
        (tmp_path / file).write_bytes(content)
    split = Split(tmp_path, files, np.arange(1003) % 7)
    ids: list[int] = []
    lengths = set()
    for rank in range(world):
        loader = EvalLoader(split, settings(8), batch_size=16, rank=rank, world=world)
        batches = list(loader)
        assert len(batches) == len(loader)
        lengths.add(len(batches))
        for batch in batches:
            assert batch.labels.tolist() == split.labels[batch.ids].tolist()
            ids += batch.ids[batch.valid.numpy()].tolist()
    assert ids == list(range(1003))
    assert len(lengths) == 1


def test_ranks_without_images_keep_in_step(small: Split) -> None:
    few = Split(small.folder, small.files[:3], small.labels[:3])
    ranks = [list(EvalLoader(few, settings(), batch_size=1, rank=rank, world=2)) for rank in range(2)]
    assert [[batch.valid.tolist() for batch in batches] for batches in ranks] == [[[True], [False]], [[True], [True]]]
    assert ranks[0][1].images.shape == (1, 3, 32, 32)
    assert ranks[0][1].bad == []


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_what_serving_sees(large: Split, workers: int) -> None:
    preprocess = settings(crop_pct=0.875)
    for batch in EvalLoader(large, preprocess, batch_size=4, workers=workers):
        assert batch.images.is_contiguous(memory_format=torch.channels_last)
        for index, pixels in zip(batch.ids.tolist(), batch.images.numpy(), strict=True):
            content = (large.folder / large.files[index]).read_bytes()
            assert np.array_equal(pixels.transpose(1, 2, 0), resize_and_crop(decode(content), preprocess))


def summary(batch: EvalBatch) -> tuple[Any, ...]:
    return batch.images.numpy().tobytes(), batch.ids.tolist(), batch.valid.tolist(), batch.bad


@pytest.mark.parametrize("workers", [0, 1])
def test_unusable_files_are_named_and_not_counted_and_the_cache_remembers(tmp_path: Path, workers: int) -> None:
    split = write_split(tmp_path, 10, broken=(4,))
    (tmp_path / split.files[9]).unlink()
    loader = EvalLoader(split, settings(), batch_size=4, workers=workers, cache_bytes=10 * 32 * 32 * 3)
    first = [summary(batch) for batch in loader]
    assert [valid for _, _, valid, _ in first] == [[True] * 4, [False, True, True, True], [True, False]]
    bad = [entry for *_, bad in first for entry in bad]
    assert [file for file, _ in bad] == [split.files[4], split.files[9]]
    assert "truncated" in bad[0][1]
    assert bad[1][1] == "cannot be read: No such file or directory"
    for file in tmp_path.rglob("*.jpg"):
        file.unlink()
    assert [summary(batch) for batch in loader] == first


def test_evaluation_reads_again_what_exceeds_the_cache(tmp_path: Path) -> None:
    split = write_split(tmp_path, 3)
    loader = EvalLoader(split, settings(), batch_size=4, cache_bytes=3 * 32 * 32 * 3 - 1)
    assert [batch.valid.tolist() for batch in loader] == [[True] * 3]
    (tmp_path / split.files[1]).unlink()
    assert [batch.valid.tolist() for batch in loader] == [[True, False, True]]


# To the device


def test_inputs_are_normalised_as_serving_does_it() -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    inputs = data.to_input(tensor, settings(), "cpu")
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(inputs.numpy(), normalise(images, settings()), atol=1e-6)
    assert data.to_input(tensor, settings(), "cpu", channels_last=False).is_contiguous()


def test_the_fast_decoder_is_used_without_its_deprecation_warning(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(JPEG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.decode_rgb(tmp_path / "x.jpg")
    assert callable(torch.ops.image.decode_jpeg)
