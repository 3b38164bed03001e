"""dsimg.data: the same batches on any number of ranks and workers, cached or not; each image evaluated once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsimg import augment, data
from dsimg.augment import Augmentation
from dsimg.data import Batch, EvalBatch, EvalLoader, TrainImages, TrainLoader
from dsimg.errors import DataError
from dsimg.folder import Split
from dsimg.pixels import decode_rgb
from dsimg.preprocess import decode, normalise, resize_and_crop
from dsimg.steps import StepPlan
from tests.dsimg.pictures import PADDED, RESIZED, encoded, picture, settings, write_split

SEED = 11


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(tmp_path_factory.mktemp("small"), 45)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Split:
    return write_split(
        tmp_path_factory.mktemp("large"), 21, size=lambda index: (90 + 7 * index % 40, 60 + 11 * index % 50)
    )


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


# Training batches


def test_one_rank_two_ranks_and_accumulation_see_the_same_steps(small: Split) -> None:
    images = TrainImages(small, settings(), PADDED, seed=SEED)
    steps = []
    for world, micro, accumulation in ((1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)):
        plan = StepPlan(samples=45, micro=micro, accumulation=accumulation, world=world)
        seen: list[set[int]] = [set() for _ in range(plan.steps)]
        for rank in range(world):
            step = 0
            for batch in TrainLoader(images, plan, rank=rank, prefetch=False).epoch(0):
                seen[step].update(batch.ids[batch.weights.numpy() > 0].tolist())
                step += batch.boundary
        steps.append(seen)
    assert steps[0] == steps[1] == steps[2] == steps[3]
    assert len(steps[0]) == 6


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
        padded = np.pad(decode_rgb(small.folder / small.files[index]), ((4, 4), (4, 4), (0, 0)))
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
def test_unusable_files_are_replaced_alike_and_named(tmp_path: Path, augmentation: Augmentation) -> None:
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
        assert set(loader.bad) == (names if images.in_ram else set())
        for epoch in range(2):
            list(loader.epoch(epoch))
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
