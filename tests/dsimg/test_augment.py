from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop, functional

from dsimg.augment import (
    JITTER,
    TRIVIAL,
    TRIVIAL_OPERATIONS,
    Augmentation,
    geometry_for,
    mix,
    trivial_operation,
    uniform,
)
from dsimg.errors import ConfigError

KEY: dict[str, Any] = {"seed": 3, "epoch": 5}


def pictures(count: int, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Return smooth random images (count, 3, height, width) uint8, channels_last in memory."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator) * 255
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    return fine.clamp(0, 255).to(torch.uint8).contiguous(memory_format=torch.channels_last)


def ids(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64)


def test_uniform_is_the_same_on_every_machine_and_in_every_version() -> None:
    drawn = uniform(np.array([0, 1, 10**12]), seed=1, epoch=2, draws=2, stream=3)
    assert drawn.tolist() == [
        [0.019448547817121575, 0.8790370434512248],
        [0.6575657003136212, 0.6022129734580162],
        [0.6333872596058207, 0.3553507869559992],
    ]


def test_uniform_depends_on_each_argument_and_not_on_the_company() -> None:
    together = uniform(ids(100), **KEY, draws=3, stream=1)
    assert np.array_equal(uniform(np.array([7, 3]), **KEY, draws=3, stream=1), together[[7, 3]])
    assert np.array_equal(uniform(ids(100), **KEY, draws=1, stream=1), together[:, :1])
    for changed in ({"seed": 4}, {"epoch": 6}, {"stream": 2}):
        other = uniform(ids(100), **{**KEY, "draws": 3, "stream": 1, **changed})
        assert not np.any(other == together)


def test_uniform_is_uniform() -> None:
    drawn = uniform(ids(100_000), seed=0, epoch=0, draws=2, stream=0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram2d(drawn[:, 0], drawn[:, 1], bins=10, range=[[0, 1], [0, 1]])[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # chi squared, 99 degrees of freedom: p = 0.0007


def test_padded_crops_reach_every_offset() -> None:
    augmentation = Augmentation(name="light", size=(32, 32), geometry="padded_crop")
    assert augmentation.padding == (4, 4)
    offsets = augmentation.offsets(ids(5000), **KEY)
    assert {tuple(pair) for pair in offsets.tolist()} == {(top, left) for top in range(9) for left in range(9)}


@pytest.mark.parametrize("size", [(200, 300), (40, 400), (400, 20), (1, 1)])
def test_resized_crops_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    augmentation = Augmentation(name="standard", size=(64, 64))
    draws = augmentation.box_draws(ids(3000), **KEY)
    ours = np.array([augmentation.box(*size, row) for row in draws])
    assert ours.min() >= 0
    assert ours[:, 2:].min() >= 1
    assert np.all(ours[:, 0] + ours[:, 2] <= size[0])
    assert np.all(ours[:, 1] + ours[:, 3] <= size[1])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transform, image = RandomResizedCrop(64), torch.zeros(3, *size)
        params: list[Any] = [transform.make_params([image]) for _ in range(3000)]
    theirs = np.array([[row[name] for name in ("top", "left", "height", "width")] for row in params])
    spread = np.maximum(theirs.std(0), 1e-9)
    assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) < 5 * spread * np.sqrt(2 / 3000) + 1e-9)
    assert np.all(np.abs(ours.std(0) - theirs.std(0)) <= 0.1 * theirs.std(0))


@pytest.mark.parametrize("name", ["light", "standard", "strong"])
@pytest.mark.parametrize("size", [(32, 32), (48, 80)])
def test_an_image_is_augmented_alike_in_any_batch_with_any_number_of_threads(name: str, size: tuple[int, int]) -> None:
    augmentation = Augmentation(name=name, size=size)
    images, numbers = pictures(48, *size), ids(48) * 7
    together = augmentation.pixel_ops(images.clone(), numbers, **KEY)
    assert (together != images).any(dim=(1, 2, 3)).sum() > 15  # most are changed, or this shows nothing
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [augmentation.pixel_ops(images[k : k + 1].clone(), numbers[k : k + 1], **KEY) for k in range(48)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)
    other_epoch = augmentation.pixel_ops(images.clone(), numbers, seed=3, epoch=6)
    assert not torch.equal(other_epoch, together)


def test_random_generators_are_left_alone() -> None:
    augmentation = Augmentation(name="strong", size=(32, 32))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)
    augmentation.pixel_ops(pictures(32), ids(32), **KEY)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_equal(np.random.get_state(legacy=False), numpy_state)


def test_none_changes_nothing_and_light_only_mirrors_half() -> None:
    images = pictures(200)
    none = Augmentation(name="none", size=(32, 32), geometry="padded_crop")
    assert none.padding == (0, 0)
    assert torch.equal(none.pixel_ops(images.clone(), ids(200), **KEY), images)
    light = Augmentation(name="light", size=(32, 32)).pixel_ops(images.clone(), ids(200), **KEY)
    mirrored = (light == images.flip(-1)).flatten(1).all(1)
    untouched = (light == images).flatten(1).all(1)
    assert bool((mirrored ^ untouched).all())
    assert 75 < int(mirrored.sum()) < 125
    without_flip = Augmentation(name="light", size=(32, 32), flip=False)
    assert torch.equal(without_flip.pixel_ops(images.clone(), ids(200), **KEY), images)


def test_standard_jitters_within_a_fifth_and_turns_a_quarter() -> None:
    augmentation = Augmentation(name="standard", size=(33, 33), flip=False)
    grey = torch.full((400, 3, 33, 33), 100, dtype=torch.uint8)
    brightness = augmentation.pixel_ops(grey, ids(400), **KEY)[:, 0, 16, 16].tolist()
    assert min(brightness) in (80, 81)  # contrast and saturation leave a grey image alone
    assert max(brightness) in (119, 120)
    # A bright column through the centre: turned, it leaves its place at the top.
    column = torch.zeros(400, 3, 33, 33, dtype=torch.uint8)
    column[:, :, :, 16] = 200
    turned = augmentation.pixel_ops(column, ids(400), **KEY)
    tilted = turned[:, 0, 0, 16].float() < 0.7 * turned[:, 0, 16, 16].float()
    assert 55 < int(tilted.sum()) < 100


def test_jitter_agrees_with_torchvisions_adjustments() -> None:
    augmentation = Augmentation(name="standard", size=(32, 32), flip=False)
    images = pictures(64) // 2 + 50  # far from black and white: clipped between torchvision's steps otherwise
    ours = augmentation.pixel_ops(images.clone(), ids(64), **KEY)
    factors = 1 + 0.2 * (2 * uniform(ids(64), **KEY, draws=3, stream=JITTER) - 1)
    close = 0
    for index, (brightness, contrast, saturation) in enumerate(factors.tolist()):
        theirs = functional.adjust_brightness(images[index], brightness)
        theirs = functional.adjust_contrast(theirs, contrast)
        theirs = functional.adjust_saturation(theirs, saturation)
        close += int((theirs.int() - ours[index].int()).abs().max()) <= 3
    assert 40 <= close <= 60  # all but those that are also turned


@pytest.mark.parametrize("name", TRIVIAL_OPERATIONS[1:])
def test_trivial_operations_are_torchvisions(name: str) -> None:
    images = pictures(6, 40, 56)
    level, sign = np.array([0, 6, 13, 18, 25, 30]), np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    ours = trivial_operation(images, name, level=level, sign=sign)
    assert ours.shape == images.shape
    for index in range(6):
        theirs = torchvisions(images[index], name, level[index] / 30, sign[index])
        difference = (ours[index].int() - theirs.int()).abs()
        if name in ("shear_x", "shear_y", "rotate"):  # nearest neighbours: a pixel can fall to either side
            assert (difference > 0).float().mean() < 0.01
        else:
            assert int(difference.max()) <= 1


def torchvisions(image: Tensor, name: str, strength: float, sign: float) -> Any:
    straight: dict[str, Any] = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    slant = float(np.degrees(np.arctan(0.99 * strength * sign)))
    shift = int(32 * strength * sign)
    factor = 1 + 0.99 * strength * sign
    return {
        "shear_x": lambda: functional.affine(image, **{**straight, "shear": [slant, 0.0]}, center=[0, 0]),
        "shear_y": lambda: functional.affine(image, **{**straight, "shear": [0.0, slant]}, center=[0, 0]),
        "translate_x": lambda: functional.affine(image, **{**straight, "translate": [shift, 0]}),
        "translate_y": lambda: functional.affine(image, **{**straight, "translate": [0, shift]}),
        "rotate": lambda: functional.rotate(image, 135 * strength * sign),
        "brightness": lambda: functional.adjust_brightness(image, factor),
        "color": lambda: functional.adjust_saturation(image, factor),
        "contrast": lambda: functional.adjust_contrast(image, factor),
        "sharpness": lambda: functional.adjust_sharpness(image, factor),
        "posterize": lambda: functional.posterize(image, 8 - round(6 * strength)),
        "solarize": lambda: functional.solarize(image, 255 * (1 - strength)),
        "autocontrast": lambda: functional.autocontrast(image),
        "equalize": lambda: functional.equalize(image),
    }[name]()


def test_strong_does_one_trivial_operation_then_erases_a_box_in_a_quarter() -> None:
    augmentation = Augmentation(name="strong", size=(32, 40), flip=False)
    images = pictures(400, 32, 40)
    done = augmentation.pixel_ops(images.clone(), ids(400), **KEY)
    draws = uniform(ids(400), **KEY, draws=3, stream=TRIVIAL)
    erased = []
    for index, (operation, level, sign) in enumerate(draws.tolist()):
        name = TRIVIAL_OPERATIONS[int(operation * 14)]
        strength = {"level": np.array([int(level * 31)]), "sign": np.array([-1.0 if sign < 0.5 else 1.0])}
        before = images[index : index + 1]
        before = before if name == "identity" else trivial_operation(before, name, **strength)
        changed = (done[index] != before[0]).any(0)
        if changed.any():
            rows, columns = torch.where(changed.any(1))[0], torch.where(changed.any(0))[0]
            box = done[index, :, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].flatten(1)
            assert torch.equal(box[:, 0], before[0].float().mean((1, 2)).round().to(torch.uint8))
            assert bool((box == box[:, :1]).all())
            erased.append(box.shape[1] / (32 * 40))
    assert 70 < len(erased) < 130
    assert min(erased) < 0.08
    assert 0.25 < max(erased) < 0.36


def test_geometry_follows_the_sizes() -> None:
    assert geometry_for((32, 32), [(32, 32), (32, 32)]) == "padded_crop"
    assert geometry_for((32, 32), [(8, 8)]) == "padded_crop"
    assert geometry_for((32, 32), [(32, 32), (40, 32)]) == "random_resized_crop"
    assert geometry_for((128, 128), [(128, 128)]) == "random_resized_crop"


def test_unknown_names_are_refused_with_the_near_one() -> None:
    with pytest.raises(ConfigError) as error:
        Augmentation(name="strongg", size=(32, 32))
    assert str(error.value) == (
        "augment is 'strongg', did you mean 'strong'? Choose from none, light, standard, strong."
    )


def in_pairs(count: int) -> NDArray[np.int64]:
    """Return partners 0-1, 2-3, ...; the last one of an odd number stays alone."""
    partner = np.arange(count) ^ 1
    return np.where(partner < count, partner, np.arange(count))


def test_mixup_shares_one_lam_in_a_pair_and_leaves_the_odd_one() -> None:
    images, labels = torch.randn(7, 3, 4, 4), torch.arange(7)
    mixed, partner_labels, lam = mix(images, labels, ids(7) * 3, in_pairs(7), **KEY, mixup=0.8)
    assert partner_labels.tolist() == [1, 0, 3, 2, 5, 4, 6]
    assert lam[0] == lam[1]
    assert lam[2] == lam[3] != lam[0]
    assert lam[6] == 1
    share = lam[:, None, None, None]
    torch.testing.assert_close(mixed, share * images + (1 - share) * images[in_pairs(7)])
    assert torch.equal(mixed[6], images[6])


def test_cutmix_swaps_one_box_whose_share_is_lam() -> None:
    count = 200
    images = torch.arange(count).float()[:, None, None, None].expand(count, 3, 10, 14).clone()
    mixed, _, lam = mix(images, torch.arange(count), ids(count), in_pairs(count), **KEY, cutmix=1.0)
    own = mixed == images
    assert bool((own | (mixed == images[in_pairs(count)])).all())
    torch.testing.assert_close(own.float().mean((1, 2, 3)), lam)
    assert (1 - lam).std() > 0.05
    for picture in own[:20, 0]:
        rows, columns = (~picture).any(1), (~picture).any(0)
        assert int((~picture).sum()) == int(rows.sum()) * int(columns.sum())  # a box


def test_both_given_each_pair_is_one_or_the_other() -> None:
    count = 400
    images = torch.arange(count).float()[:, None, None, None].expand(count, 3, 8, 8).clone()
    mixed, _, _ = mix(images, torch.arange(count), ids(count), in_pairs(count), **KEY, mixup=1.0, cutmix=1.0)
    blended = (mixed.amax((1, 2, 3)) - mixed.amin((1, 2, 3)) < 0.5) & (mixed[:, 0, 0, 0] % 1 != 0)
    assert 140 < int(blended.sum()) < 260


@pytest.mark.parametrize(("alpha", "deviation"), [(0.2, 0.4226), (1.0, 0.2887), (4.0, 0.1667)])
def test_lam_is_drawn_from_the_beta_distribution(alpha: float, deviation: float) -> None:
    count = 20_000
    _, _, lam = mix(torch.zeros(count, 1, 1, 1), torch.zeros(count), ids(count), in_pairs(count), **KEY, mixup=alpha)
    assert abs(float(lam.mean()) - 0.5) < 0.01
    assert abs(float(lam.std()) - deviation) < 0.006
    tail = {0.2: 0.3367, 1.0: 0.1, 4.0: 0.00273}[alpha]  # P(lam < 0.1)
    assert abs(float((lam < 0.1).float().mean()) - tail) < 0.01


def test_mixing_does_not_depend_on_how_the_batch_is_cut() -> None:
    images, labels, numbers = torch.randn(16, 3, 8, 8), torch.arange(16), np.arange(16)[::-1].copy()
    whole = mix(images, labels, numbers, in_pairs(16), **KEY, mixup=0.4, cutmix=1.0)
    parts = [
        mix(images[k : k + 4], labels[k : k + 4], numbers[k : k + 4], in_pairs(4), **KEY, mixup=0.4, cutmix=1.0)
        for k in range(0, 16, 4)
    ]
    for result, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(result, torch.cat(pieces))


def test_mixing_is_off_at_zero_and_refused_below() -> None:
    images, labels = torch.randn(4, 3, 2, 2), torch.arange(4)
    mixed, partner_labels, lam = mix(images, labels, ids(4), in_pairs(4), **KEY)
    assert mixed is images
    assert partner_labels is labels
    assert lam.tolist() == [1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"mixup is -0.1 and cutmix 0.0; both must be 0 \(off\) or above"):
        mix(images, labels, ids(4), in_pairs(4), **KEY, mixup=-0.1)
