"""Measure dsimg's training data path beside torchvision's ImageFolder with PIL, one thread each.

    python benchmarks/data_path.py --imagenet DIR --cifar DIR

Each DIR is a folder of class folders. Both sides get the same files and crops of the same distribution, in
turn within one process; the ratio is the median of the rounds' ratios, for absolute figures drift by a third
on a shared machine. Once to uint8 (ImageFolder with PILToTensor), once to normalised float32 (ToTensor and
Normalize, against `to_input`). Last, the pixels: both decoders and resizers on the same boxes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision import datasets, transforms

from dsimg.augment import Augmentation
from dsimg.data import TrainImages, to_input
from dsimg.folder import Split
from dsimg.pixels import decode_rgb, resize
from dsimg.preprocess import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, Preprocess, decode

BATCH = 64
MOST_IMAGES = 2048


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imagenet", type=Path, help="a folder of class folders of photographs, at 224 px")
    parser.add_argument("--cifar", type=Path, help="a folder of class folders of 32x32 images, from RAM")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.imagenet:
        photographs(options.imagenet, options.rounds)
    if options.cifar:
        small_images(options.cifar, options.rounds)


def photographs(root: Path, rounds: int) -> None:
    """Compare files at 224 px: decode, random resized crop, flip."""
    augmentation = Augmentation(name="light", size=(224, 224))
    crop = transforms.RandomResizedCrop(224, scale=augmentation.area)
    folder = datasets.ImageFolder(str(root))
    split = _split(root, folder)
    print(f"{len(split.files)} photographs of {root}, 224 px, one thread")
    _compare(folder, crop, TrainImages(split, _preprocess(224), augmentation, seed=0), rounds)
    pixel_differences(split, _preprocess(224), augmentation)


def small_images(root: Path, rounds: int) -> None:
    """Compare 32x32 images: ImageFolder from files, dsimg from RAM, padded crop and flip."""
    augmentation = Augmentation(name="light", size=(32, 32), geometry="padded_crop")
    folder = datasets.ImageFolder(str(root))
    split = _split(root, folder)
    start = time.perf_counter()
    images = TrainImages(split, _preprocess(32), augmentation, seed=0, ram=True)
    seconds = time.perf_counter() - start
    print(f"{len(split.files)} images of {root}, 32 px, one thread")
    print(f"decoded into RAM once, at {len(split.files) / seconds:.0f} images/s")
    _compare(folder, transforms.RandomCrop(32, padding=4), images, rounds)


def pixel_differences(split: Split, preprocess: Preprocess, augmentation: Augmentation) -> None:
    """Print how far pixels are from Pillow's, for three crop boxes of every image."""
    _, height, width = preprocess.input_size
    differences = []
    for epoch in range(3):
        draws = augmentation.box_draws(np.arange(len(split.files)), seed=0, epoch=epoch)
        for row, file in enumerate(split.files):
            path = split.folder / file
            ours = decode_rgb(path)
            top, left, box_height, box_width = augmentation.box(ours.shape[0], ours.shape[1], draws[row])
            cropped = resize(ours[top : top + box_height, left : left + box_width], preprocess)
            theirs = decode(path.read_bytes()).crop((left, top, left + box_width, top + box_height))
            theirs = theirs.resize((width, height), INTERPOLATIONS[preprocess.interpolation])
            difference = np.abs(cropped.astype(int) - np.asarray(theirs).astype(int))
            differences.append((difference.max(), difference.mean(), (difference > 1).sum()))
    largest, mean, beyond = (list(column) for column in zip(*differences, strict=True))
    print(
        f"pixels against Pillow's, {len(differences)} crops: at most {max(largest)} of 255 apart, "
        f"{np.mean(mean):.4f} on average, {sum(beyond)} of {len(differences) * 3 * height * width:,} values over 1\n"
    )


def _compare(
    folder: datasets.ImageFolder, crop: Callable[[Image.Image], Image.Image], images: TrainImages, rounds: int
) -> None:
    order = np.random.default_rng(0).permutation(len(images))[:MOST_IMAGES]
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    normalise = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    print(f"{'':22}{'ImageFolder + PIL':>20}{'dsimg':>10}  images/s")
    for name, ending in (("to uint8", [transforms.PILToTensor()]), ("to float32", normalise)):
        folder.transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *ending])

        def theirs() -> None:
            for ids in batches:
                torch.stack([folder[index][0] for index in ids.tolist()])

        def ours(to_float: bool = name == "to float32") -> None:
            for ids in batches:
                batch, _ = images.batch(ids, epoch=0)
                if to_float:
                    to_input(batch, images.preprocess, "cpu")

        _seconds(theirs), _seconds(ours)  # from here on the files are in the page cache
        speeds = []
        for turn in range(rounds):
            pair = (theirs, ours) if turn % 2 == 0 else (ours, theirs)
            seconds = {run: _seconds(run) for run in pair}
            speeds.append((len(order) / seconds[theirs], len(order) / seconds[ours]))
        medians = [statistics.median(column) for column in zip(*speeds, strict=True)]
        ratios = sorted(mine / other for other, mine in speeds)
        print(
            f"{name:22}{medians[0]:20.0f}{medians[1]:10.0f}  ratio {statistics.median(ratios):.2f}, "
            f"from {ratios[0]:.2f} to {ratios[-1]:.2f}"
        )
    print()


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _split(root: Path, folder: datasets.ImageFolder) -> Split:
    files = tuple(str(Path(path).relative_to(root)) for path, _ in folder.samples)
    return Split(root, files, np.array(folder.targets, np.int64))


def _preprocess(size: int) -> Preprocess:
    return Preprocess(input_size=(3, size, size), mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_pct=1.0)


if __name__ == "__main__":
    main()
