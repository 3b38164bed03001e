"""Training augmentation: every random number is a function of (seed, epoch, sample id), of nothing else.

| name       | padded crop     | random resized crop | flip | jitter     | rotation    | besides          |
|------------|-----------------|---------------------|------|------------|-------------|------------------|
| `none`     | -               | -                   | -    | -          | -           | as in evaluation |
| `light`    | pad by size / 8 | 0.35 to 1 of area   | 1/2  | -          | -           | -                |
| `standard` | pad by size / 8 | 0.08 to 1 of area   | 1/2  | 0.8 to 1.2 | 10°, 1 in 4 | -                |
| `strong`   | pad by size / 8 | 0.08 to 1 of area   | 1/2  | -          | -           | TrivialAugment,  |
|            |                 |                     |      |            |             | erasing, 1 in 4  |

A padded crop is for images no larger than the target, and that small (CIFAR); all others get the random
resized crop of GoogLeNet (Szegedy et al., 2015), aspect ratios 3/4 to 4/3. `flip=False` leaves the mirror
out, for digits and letters. Jitter scales brightness, contrast and saturation. Neither torch's nor numpy's
generators are drawn from: training's own random numbers do not move, and threads do not disturb each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as torch_functional
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms.v2 import functional

from dsimg.errors import ConfigError, near

NAMES = ("none", "light", "standard", "strong")
GEOMETRIES = ("padded_crop", "random_resized_crop")

# Streams keep the draws for different purposes apart.
ORDER, CROP, FLIP, JITTER, ROTATE, TRIVIAL, ERASE, MIX, REPLACE = range(9)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_RESIZED_RATIO = (3 / 4, 4 / 3)
_RESIZED_ATTEMPTS = 10
_JITTER_STRENGTH = 0.2
_ROTATE_SHARE, _ROTATE_DEGREES = 0.25, 10.0
_ERASE_SHARE, _ERASE_AREA, _ERASE_RATIO = 0.25, (0.02, 0.33), (0.3, 3.3)
_GREY = (0.2989, 0.587, 0.114)  # torchvision's luma
_BETA_ATTEMPTS = 16
TRIVIAL_OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)


def hash_bits(ids: NDArray[np.int64], *, seed: int, epoch: int, draws: int, stream: int) -> NDArray[np.uint64]:
    """Return (N, draws) hashed 64-bit integers for ids (N,): SplitMix64 (Steele et al., 2014), one per id."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, stream):
        key = _scramble(key ^ _scramble(np.array([part & (2**64 - 1)], np.uint64) + _GOLDEN))
    start = _scramble(key ^ _scramble(np.asarray(ids, np.int64).astype(np.uint64) + _GOLDEN))
    return _scramble(start[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN)


def uniform(ids: NDArray[np.int64], *, seed: int, epoch: int, draws: int, stream: int) -> NDArray[np.float64]:
    """Return (N, draws) numbers in [0, 1) for ids (N,), each a function of its own arguments only."""
    bits = hash_bits(ids, seed=seed, epoch=epoch, draws=draws, stream=stream)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What is done to training images; see the table above."""

    name: str  # none, light, standard, strong
    size: tuple[int, int]  # height, width of the model's input
    geometry: str = "random_resized_crop"  # padded_crop, random_resized_crop
    flip: bool = True  # mirror half of the images; wrong for digits and letters

    def __post_init__(self) -> None:
        for what, value, choices in (("augment", self.name, NAMES), ("geometry", self.geometry, GEOMETRIES)):
            if value not in choices:
                raise ConfigError(f"{what} is '{value}'{near(value, choices)} Choose from {', '.join(choices)}.")

    @property
    def fixed_size(self) -> bool:
        """Whether every image is brought to `size` before anything random happens, and can be kept so."""
        return self.name == "none" or self.geometry == "padded_crop"

    @property
    def padding(self) -> tuple[int, int]:
        """Pixels added above and below, left and right of a padded crop; zero without one."""
        if self.name == "none" or self.geometry != "padded_crop":
            return 0, 0
        return round(self.size[0] / 8), round(self.size[1] / 8)

    @property
    def area(self) -> tuple[float, float]:
        """The share of an image's area that a random resized crop covers, least and most."""
        return (0.35 if self.name == "light" else 0.08), 1.0

    def offsets(self, ids: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return (N, 2) top and left corners of padded crops, in pixels of the padded image."""
        draws = uniform(ids, seed=seed, epoch=epoch, draws=2, stream=CROP)
        offsets: NDArray[np.int64] = (draws * (2 * np.array(self.padding) + 1)).astype(np.int64)
        return offsets

    def box_draws(self, ids: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.float64]:
        """Return (N, 22) random numbers, one row for each id's `box`."""
        return uniform(ids, seed=seed, epoch=epoch, draws=2 * _RESIZED_ATTEMPTS + 2, stream=CROP)

    def box(self, height: int, width: int, draws: NDArray[np.float64]) -> tuple[int, int, int, int]:
        """Return top, left, height, width of an image's random resized crop, from a row of `box_draws`."""
        return _resized_box((height, width), draws.tolist(), self.area)

    def pixel_ops(self, images: Tensor, ids: NDArray[np.int64], *, seed: int, epoch: int) -> Tensor:
        """Return the augmented batch, (N, 3, H, W) uint8 in and out, cropped before. May change `images`."""
        if self.name == "none" or len(ids) == 0:
            return images

        def draw(draws: int, stream: int) -> NDArray[np.float64]:
            return uniform(ids, seed=seed, epoch=epoch, draws=draws, stream=stream)

        if self.flip:
            mirrored = np.flatnonzero(draw(1, FLIP)[:, 0] < 0.5)
            _put(images, mirrored, _take(images, mirrored).flip(-1))
        if self.name == "standard":
            images = _jitter(images, draw(3, JITTER))
            rotate = draw(2, ROTATE)
            chosen = np.flatnonzero(rotate[:, 0] < _ROTATE_SHARE)
            degrees = (2 * rotate[chosen, 1] - 1) * _ROTATE_DEGREES
            turned = _affine(_take(images, chosen), _rotations(degrees), "bilinear", "reflection")
            _put(images, chosen, turned)
        if self.name == "strong":
            images = _trivial_augment(images, draw(3, TRIVIAL))
            _erase(images, draw(5, ERASE))
        return images


def geometry_for(size: tuple[int, int], sizes: Sequence[tuple[int, int]]) -> str:
    """Return the geometry for a target `size` (h, w) of pixels, given the sizes of a sample of the images."""
    small = max(size) <= 64 and all(height <= size[0] and width <= size[1] for height, width in sizes)
    return "padded_crop" if small else "random_resized_crop"


def mix(
    images: Tensor,
    labels: Tensor,
    ids: NDArray[np.int64],
    partner: NDArray[np.int64],
    *,
    seed: int,
    epoch: int,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return images (N, 3, H, W) mixed with their partners', the partners' labels (N,), own shares lam (N,).

    `images` are normalised float, on any device; `partner` (N,) is the index in the batch that each is mixed
    with, its own where it stays as it is. The loss is lam * l(labels) + (1 - lam) * l(partner labels). Both
    of a pair share one lam ~ Beta(alpha, alpha), alpha being `mixup` or `cutmix`; where both are above zero,
    a pair is one or the other by chance. lam of cutmix is what is left after its box is clipped at the
    border.

    Source: mixup, arXiv 1710.09412; CutMix, arXiv 1905.04899.
    """
    if mixup < 0 or cutmix < 0:
        raise ConfigError(f"mixup is {mixup} and cutmix {cutmix}; both must be 0 (off) or above.")
    if mixup == 0 and cutmix == 0:
        return images, labels, torch.ones(len(ids), device=images.device)
    pairs = np.minimum(ids, ids[partner])
    draws = uniform(pairs, seed=seed, epoch=epoch, draws=3 + 6 * _BETA_ATTEMPTS + 2, stream=MIX)
    cut = draws[:, 0] < (0.5 if mixup > 0 else 1.0) if cutmix > 0 else np.zeros(len(ids), bool)
    lam = np.where(cut, _beta(draws[:, 3:], cutmix or 1.0), _beta(draws[:, 3:], mixup or 1.0))
    cut &= partner != np.arange(len(ids))
    lam[partner == np.arange(len(ids))] = 1.0

    height, width = images.shape[-2:]
    share = np.broadcast_to(lam[:, None, None], (len(ids), height, width) if cut.any() else (len(ids), 1, 1)).copy()
    for index in np.flatnonzero(cut):
        side = math.sqrt(1 - lam[index]) / 2
        top, bottom = (_clip(height * (draws[index, 1] + half), height) for half in (-side, side))
        left, right = (_clip(width * (draws[index, 2] + half), width) for half in (-side, side))
        share[index] = 1.0
        share[index, top:bottom, left:right] = 0.0
        lam[index] = 1 - (bottom - top) * (right - left) / (height * width)
    weight = torch.from_numpy(share).to(images.device, images.dtype)[:, None]
    order = torch.from_numpy(partner).to(images.device)
    own = torch.from_numpy(lam).to(images.device, torch.float32)
    return torch.lerp(images[order], images, weight), labels[order.to(labels.device)], own


def _scramble(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _clip(value: float, limit: int) -> int:
    return min(max(round(value), 0), limit)


def _resized_box(size: tuple[int, int], draws: Sequence[float], area: tuple[float, float]) -> tuple[int, int, int, int]:
    """torchvision's RandomResizedCrop.get_params on given draws: ten attempts, then the centre."""
    height, width = size
    low, high = (math.log(ratio) for ratio in _RESIZED_RATIO)
    for attempt in range(_RESIZED_ATTEMPTS):
        target = height * width * (area[0] + draws[2 * attempt] * (area[1] - area[0]))
        ratio = math.exp(low + draws[2 * attempt + 1] * (high - low))
        box_height, box_width = round(math.sqrt(target / ratio)), round(math.sqrt(target * ratio))
        if 0 < box_height <= height and 0 < box_width <= width:
            top, left = int(draws[-2] * (height - box_height + 1)), int(draws[-1] * (width - box_width + 1))
            return top, left, box_height, box_width
    box_height = min(height, max(round(width / _RESIZED_RATIO[0]), 1))
    box_width = min(width, max(round(height * _RESIZED_RATIO[1]), 1))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def _beta(draws: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Return (N,) draws of Beta(alpha, alpha) from (N, 6 * attempts + 2) uniform ones, as a ratio of gammas.

    Gammas after Marsaglia and Tsang (2000), for alpha + 1 so that attempts nearly always succeed, then scaled
    down; in logarithms, because a gamma of a small alpha underflows.
    """
    count = 3 * _BETA_ATTEMPTS
    logs = [_log_gamma(draws[:, :count], alpha), _log_gamma(draws[:, count : 2 * count], alpha)]
    logs = [log + np.log1p(-draws[:, 2 * count + side]) / alpha for side, log in enumerate(logs)]
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(logs[1] - logs[0])))


def _log_gamma(draws: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    shift = alpha + 2 / 3
    first, second, third = np.split(draws, 3, axis=1)
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    cube = (1 + normal / np.sqrt(9 * shift)) ** 3
    log_cube = np.log(np.maximum(cube, 1e-300))
    accepted = (cube > 0) & (np.log1p(-third) < normal**2 / 2 + shift * (1 - cube + log_cube))
    chosen = np.argmax(accepted, axis=1)
    return np.asarray(np.log(shift) + log_cube[np.arange(len(draws)), chosen])


def _take(images: Tensor, chosen: NDArray[np.int64]) -> Tensor:
    """Return images[chosen]: by numpy, for torch's own indexing of bytes is ten times as slow."""
    return torch.from_numpy(images.permute(0, 2, 3, 1).numpy()[chosen]).permute(0, 3, 1, 2)


def _put(images: Tensor, chosen: NDArray[np.int64], changed: Tensor) -> None:
    images.permute(0, 2, 3, 1).numpy()[chosen] = changed.permute(0, 2, 3, 1).numpy()


def _per_image(values: NDArray[np.float64]) -> Tensor:
    """Return (N,) as a float tensor (N, 1, 1, 1)."""
    return torch.from_numpy(values).float()[:, None, None, None]


def _jitter(images: Tensor, draws: NDArray[np.float64]) -> Tensor:
    """Scale brightness, contrast, saturation of each image, in this order, clipping once at the end.

    Exact sums, single multiplications and additions: whatever may be fused or reordered would give an image
    other pixels in a batch of another size, or with another number of threads.
    """
    brightness, contrast, saturation = (1 + _JITTER_STRENGTH * (2 * draws - 1)).T
    height, width = images.shape[-2:]
    own = _per_image(brightness * contrast * saturation)
    from_grey = _per_image(brightness * contrast * (1 - saturation))
    result = images.float()
    sums = result.sum(3).sum(2, dtype=torch.float64).numpy()  # of whole numbers, so exact
    mean = sums @ np.array(_GREY) / (height * width)
    offset = _per_image(brightness * (1 - contrast) * mean + 0.5)  # half, so that cutting off rounds
    grey = result[:, :1] * _GREY[0] + result[:, 1:2] * _GREY[1] + result[:, 2:] * _GREY[2]
    result.mul_(own).add_(grey.mul_(from_grey).add_(offset))
    return result.clamp_(0, 255).to(torch.uint8)


def _rotations(degrees: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, 2, 3) maps from output to input pixels that turn counter-clockwise about the centre."""
    radians = np.deg2rad(degrees)
    maps = np.zeros((len(degrees), 2, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = np.cos(radians)
    maps[:, 0, 1] = -np.sin(radians)
    maps[:, 1, 0] = np.sin(radians)
    return maps


def _affine(images: Tensor, maps: NDArray[np.float64], mode: str, padding: str) -> Tensor:
    """Return uint8 images resampled by `maps` (N, 2, 3): output to input pixels (x, y) from the centre."""
    if len(images) == 0:
        return images
    height, width = images.shape[-2:]
    x = torch.arange(width) + 0.5 - width / 2
    y = torch.arange(height)[:, None] + 0.5 - height / 2
    maps_in_units = maps / np.array([width / 2, height / 2])[:, None]
    # Not affine_grid, a matrix product: see _jitter.
    columns = [_per_image(column)[:, 0] for column in maps_in_units.reshape(len(maps), 6).T]
    grid = torch.stack([a * x + b * y + c for a, b, c in (columns[:3], columns[3:])], dim=-1)
    sampled = torch_functional.grid_sample(images.float(), grid, mode=mode, padding_mode=padding, align_corners=False)
    return sampled.add_(0.5).clamp_(0, 255).to(torch.uint8)


def _trivial_augment(images: Tensor, draws: NDArray[np.float64]) -> Tensor:
    """Do one random operation of random strength to each image: TrivialAugment Wide, arXiv 2103.10158.

    Operations and strengths are those of torchvision's TrivialAugmentWide, each done to its images at once.
    """
    operation = (draws[:, 0] * len(TRIVIAL_OPERATIONS)).astype(int)
    level = (draws[:, 1] * 31).astype(int)  # 0..30
    sign = np.where(draws[:, 2] < 0.5, -1.0, 1.0)
    for number, name in enumerate(TRIVIAL_OPERATIONS):
        chosen = np.flatnonzero(operation == number)
        if len(chosen) and name != "identity":
            taken = _take(images, chosen)
            done = trivial_operation(taken, name, level=level[chosen], sign=sign[chosen])
            _put(images, chosen, done)
    return images


def trivial_operation(images: Tensor, name: str, *, level: NDArray[np.int64], sign: NDArray[np.float64]) -> Tensor:
    """Return uint8 images (N, 3, H, W) after one of TrivialAugment's operations at `level` (N,), 0 to 30."""
    strength = sign * level / 30
    if name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
        return _affine(images, _trivial_maps(images, name, strength), "nearest", "zeros")
    if name == "posterize":
        kept = (0xFF << np.round(level / 5).astype(int)) & 0xFF
        return images & torch.from_numpy(kept.astype(np.uint8))[:, None, None, None]
    if name == "solarize":
        return torch.where(images >= _per_image(255 * (1 - level / 30)), 255 - images, images)
    if name == "autocontrast":
        return _tensor(functional.autocontrast(images))
    if name == "equalize":
        return _tensor(functional.equalize(images))
    # Each of torchvision's adjustments blends the image with what it gives for the factor 0.
    adjust = {
        "brightness": functional.adjust_brightness,
        "color": functional.adjust_saturation,
        "contrast": functional.adjust_contrast,
        "sharpness": functional.adjust_sharpness,
    }[name]
    base, factor = _tensor(adjust(images, 0.0)).float(), _per_image(1 + 0.99 * strength)
    return (images * factor + base * (1 - factor)).clamp_(0, 255).to(torch.uint8)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _trivial_maps(images: Tensor, name: str, strength: NDArray[np.float64]) -> NDArray[np.float64]:
    height, width = images.shape[-2:]
    maps = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(strength), 1, 1))
    if name == "rotate":
        return _rotations(135 * strength)
    if name == "translate_x":
        maps[:, 0, 2] = -np.trunc(32 * strength)
    elif name == "translate_y":
        maps[:, 1, 2] = -np.trunc(32 * strength)
    elif name == "shear_x":  # about the top left corner, as torchvision does it
        maps[:, 0, 1] = 0.99 * strength
        maps[:, 0, 2] = 0.99 * strength * height / 2
    elif name == "shear_y":
        maps[:, 1, 0] = 0.99 * strength
        maps[:, 1, 2] = 0.99 * strength * width / 2
    return maps


def _erase(images: Tensor, draws: NDArray[np.float64]) -> None:
    """Fill one box in one of four images with the image's mean colour, in place.

    Box sizes are torchvision's; the mean colour stands for its zero after normalisation. arXiv 1708.04896.
    """
    height, width = images.shape[-2:]
    low, high = (math.log(ratio) for ratio in _ERASE_RATIO)
    for index in np.flatnonzero(draws[:, 0] < _ERASE_SHARE):
        _, size, shape, down, right = draws[index].tolist()
        area = height * width * (_ERASE_AREA[0] + size * (_ERASE_AREA[1] - _ERASE_AREA[0]))
        ratio = math.exp(low + shape * (high - low))
        box_height = min(max(round(math.sqrt(area * ratio)), 1), height)
        box_width = min(max(round(math.sqrt(area / ratio)), 1), width)
        top, left = int(down * (height - box_height + 1)), int(right * (width - box_width + 1))
        mean = images[index].float().mean((1, 2)).round().to(torch.uint8)
        images[index, :, top : top + box_height, left : left + box_width] = mean[:, None, None]
