"""From a folder of images to lists of files with labels, and the index that keeps them with a run."""

import contextlib
import errno
import gzip
import hashlib
import itertools
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsimg.errors import DataError, near
from dsimg.run import replacing

VALIDATION_NAMES = ("val", "valid", "validation", "test")
# What lies in class folders beside the images. Any other file is listed, whatever its suffix: its bytes
# decide, and one that cannot be decoded is then reported with its reason.
# fmt: off
NOT_IMAGES = {
    "txt", "csv", "tsv", "json", "jsonl", "xml", "yaml", "yml", "toml", "ini", "cfg", "md", "rst", "htm",
    "html", "css", "js", "db", "log", "py", "ipynb", "mat", "npy", "npz", "pkl",
}
IMAGES = {
    "jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "dib", "gif", "tif", "tiff", "ppm", "pgm", "pbm",
    "avif", "jp2", "j2k", "ico", "qoi",
}
SYSTEM_FILES = {
    "thumbs.db", "desktop.ini", "__macosx", "@eadir", "icon\r", "lost+found", "$recycle.bin",
    "system volume information",
}
# fmt: on
INDEX_FORMAT = "dsimg image index 1"


@dataclass(frozen=True, eq=False)
class Split:
    """The images of one split, ordered by label, then by path."""

    folder: Path
    files: tuple[str, ...]  # relative to `folder`; a name that is not UTF-8 holds surrogates, as from os.fsdecode
    labels: NDArray[np.int64]  # (len(files),)

    def digest(self) -> str:
        """Return a hash of names, labels and sizes of the files, by which another process knows the same images."""
        names = "\0".join(self.files).encode("utf-8", "surrogateescape")
        sizes = ((self.folder / name).stat().st_size if (self.folder / name).exists() else 0 for name in self.files)
        total = hashlib.sha256(names + self.labels.tobytes())
        total.update(np.fromiter(sizes, np.int64, len(self.files)).tobytes())
        return total.hexdigest()


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A data set. Label `i` is `classes[i]`, in both splits."""

    root: Path
    classes: tuple[str, ...]  # as sorted() orders them
    train: Split
    val: Split
    notes: tuple[str, ...]  # what the user should hear of


def find_images(root: Path, *, seed: int, val_share: float = 0.2) -> ImageFolder:
    """List the images of `root` for training; the class is the first folder below the split.

    `root` holds train/ and a validation folder (val/, valid/, validation/ or test/). Where it holds train/
    alone, or the class folders themselves, `val_share` of each class is drawn for validation by `seed`. No
    image is opened.

    Raises DataError: no such folder, no images, a single class, a class folder without images, a class that
    only the validation folder has.
    """
    root = _existing(root)
    train_folder, val_folder = _split_folders(root)
    if train_folder is None and val_folder is not None:
        raise DataError(f"{shown(root)} has {val_folder.name}/ and no train/; put the training images in train/.")
    scan = _scan(train_folder or _unless_misnamed(root))
    classes = _training_classes(scan)
    notes = _scan_notes(scan)
    if val_folder is None:
        train, val = _stratified(scan, classes, seed=seed, val_share=val_share)
        notes.append(
            f"no validation folder in {shown(root)}: {len(val.files):,} of {_count(scan):,} images are held "
            f"out ({val_share:.0%} of each class, seed {seed})"
        )
    else:
        val_scan = _scan(val_folder)
        train, val = _split(scan, classes), _known_split(val_scan, classes, known_by=shown(scan.folder))
        if val_folder.name != "val":
            notes.append(f"{val_folder.name}/ is taken for validation")
        notes += _scan_notes(val_scan)
        lacking = [name for name in classes if not val_scan.files.get(name)]
        if lacking:
            notes.append(f"{_have(lacking)} no validation images")
    counts = np.bincount(train.labels, minlength=len(classes))
    single = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if single:
        notes.append(f"{_have(single)} 1 training image")
    return ImageFolder(root, classes, train, val, tuple(notes))


def is_folder(path: Path) -> bool:
    """Tell whether a folder is there. Raises DataError where a folder above it may not be read."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)  # is_dir takes some errors for a no, and which ones has changed
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise DataError(f"cannot read {shown(path)}: {error.strerror}. Change the permissions above it.") from None


def find_labelled(root: Path, classes: Sequence[str]) -> tuple[Split, tuple[str, ...]]:
    """List the images of `root` for the evaluation of a model with `classes`; return them and the notes.

    They are those of the validation folder in `root` where there is one, else of the class folders in `root`.
    Raises DataError: no such folder, no images, a class that the model does not know.
    """
    root = _existing(root)
    train_folder, val_folder = _split_folders(root)
    if train_folder is not None and val_folder is None:
        raise DataError(f"{shown(root)} has train/ and no val/; give the folder of class folders to measure on.")
    scan = _scan(val_folder or root)
    split = _known_split(scan, classes, known_by="the model")
    lacking = [name for name in classes if not scan.files.get(name)]
    return split, tuple(_scan_notes(scan) + ([f"{_have(lacking)} no images here"] if lacking else []))


def images_below(folder: Path) -> list[Path]:
    """Return the files below a folder that may be images, sorted, whatever lies between; none is opened.

    They are chosen as those of a class folder are. Raises DataError: no such folder, nothing there.
    """
    files: list[str] = []
    _walk(_Scan(_existing(folder)), files, str(folder), ".", ())
    if not files:
        raise DataError(f"there are no images in {shown(folder)}. Give image files, or a folder that holds some.")
    return [folder / name for name in sorted(files)]


def find_leaks(folder: ImageFolder) -> list[tuple[Path, Path]]:
    """Return (training file, validation file) for each validation file that is byte for byte a training file.

    Costs a stat a file and reads the files of equal size. A file that cannot be read is left to decoding to name.
    """
    val, train = list(_with_sizes(folder.val)), list(_with_sizes(folder.train))
    sizes = {size for _, size in val if size}  # empty files are bad, not equal
    originals: dict[bytes, Path] = {}
    for path, size in train:
        if size in sizes and (digest := _digest(path)):
            originals.setdefault(digest, path)
    sizes &= {size for _, size in train}
    digests = [(_digest(path), path) for path, size in val if size in sizes]
    return [(originals[digest], path) for digest, path in digests if digest in originals]


def write_index(folder: ImageFolder, path: Path) -> None:
    """Keep the lists in one file, atomically: gzipped JSON lines, a line a class and split."""
    with (
        replacing(path) as temporary,
        temporary.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as stream,
    ):
        for record in _records(folder):
            stream.write(json.dumps(record).encode("ascii") + b"\n")  # surrogates pass as \udcxx


def read_index(path: Path) -> ImageFolder:
    """Return what `write_index` kept. Raises DataError where the file is missing or damaged."""
    try:
        with gzip.open(path, "rb") as stream:
            head = json.loads(stream.readline())
            if head["format"] != INDEX_FORMAT:
                raise ValueError(f"its format is {head['format']!r}")
            train, val = (_read_split(stream, Path(folder), count) for folder, count in head["splits"])
            if stream.read(1):
                raise ValueError("more files than it announces")
        return ImageFolder(Path(head["root"]), tuple(head["classes"]), train, val, tuple(head["notes"]))
    except FileNotFoundError:
        raise DataError(f"there is no index of images at {shown(path)}.") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the index {shown(path)} is damaged ({error}).") from None


def difference(old: ImageFolder, new: ImageFolder) -> str | None:
    """Return how the images of `new` differ from those of `old`, for people; None where they are the same."""
    if all(
        (a.files == b.files and np.array_equal(a.labels, b.labels))
        for a, b in ((old.train, new.train), (old.val, new.val))
    ):
        return None
    parts: list[str] = []
    for word, lost, found in (("gone", old, new), ("new", new, old)):
        if names := sorted(set(lost.classes) - set(found.classes)):
            parts.append(f"{'class' if len(names) == 1 else 'classes'} {word}: {_some(names)}")
    before, now = (
        {path.relative_to(f.root).as_posix() for split in (f.train, f.val) for path in _paths(split)}
        for f in (old, new)
    )
    for word, files in (("gone", sorted(before - now)), ("added", sorted(now - before))):
        if files:
            more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
            parts.append(f"{_number(len(files), 'file')} {word} ({', '.join(map(shown, files[:3]))}{more})")
    return "; ".join(parts) or "the same files are split into training and validation in another way"


def shown(name: str | Path) -> str:
    """Return a path or a class name fit to print: what is not UTF-8, and control characters, escaped."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\x{ord(match[0]):02x}", text)


@dataclass(frozen=True)
class _Scan:
    """What lies in one folder of class folders."""

    folder: Path
    files: dict[str, list[str]] = field(default_factory=dict)  # class -> sorted paths relative to `folder`
    loose: list[str] = field(default_factory=list)  # images beside the class folders
    links: list[str] = field(default_factory=list)  # files of `files` that are links
    broken: list[str] = field(default_factory=list)  # links to nothing, or in a circle
    left_out: Counter[str] = field(default_factory=Counter)  # files of each suffix that are no images


def _existing(root: Path) -> Path:
    if is_folder(root):
        return root.absolute()
    if root.exists():
        raise DataError(f"{shown(root)} is a file; give the folder that holds the class folders.")
    siblings = [path.name for path in root.parent.iterdir()] if root.parent.is_dir() else []
    raise DataError(f"no such folder: {shown(root)}; check the path{shown(near(root.name, siblings))}")


def _split_folders(root: Path) -> tuple[Path | None, Path | None]:
    """Return the training and the validation folder in `root`, or None for what is not there."""
    folders = {entry.name: Path(entry.path) for entry in _entries(root) if _is_folder(entry)}
    alone = folders.keys() <= {"train", *VALIDATION_NAMES}
    # 'train' and 'test' can be classes too: folders of images without folders in them, beside other classes.
    splits = {
        name: folders[name]
        for name in ("train", *VALIDATION_NAMES)
        if name in folders and (alone or _has_folders(folders[name]))
    }
    return splits.pop("train", None), next(iter(splits.values()), None)


def _unless_misnamed(root: Path) -> Path:
    """Return `root`; raise DataError where it holds 'Train' and 'Test', which would become two classes."""
    for entry in _entries(root):
        if entry.name.casefold() in ("train", "training", *VALIDATION_NAMES) and _has_folders(Path(entry.path)):
            raise DataError(
                f"{shown(entry.path)} looks like a split; name the folders train and val, in small letters."
            )
    return root


def _has_folders(folder: Path) -> bool:
    return folder.is_dir() and any(_is_folder(entry) for entry in _entries(folder))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and Path(entry.path).is_dir())


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder without hidden and system files."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.name[0] != "." and entry.name.lower() not in SYSTEM_FILES]
    except OSError as error:
        raise DataError(f"cannot read {shown(folder)}: {error.strerror}; mend it and start again.") from None


def _scan(folder: Path) -> _Scan:
    """List the files in each class folder, without a stat a file: 1.3 million take seconds."""
    scan = _Scan(folder)
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        if _is_folder(entry):
            files = scan.files[entry.name] = []
            _walk(scan, files, entry.path, entry.name, (os.path.realpath(folder),))
            files.sort()
        elif entry.is_symlink() and not Path(entry.path).exists():
            scan.broken.append(f"{entry.name} -> {Path(entry.path).readlink()}")
        elif _suffix(entry.name) in IMAGES:
            scan.loose.append(entry.name)
    return scan


def _walk(scan: _Scan, files: list[str], folder: str, relative: str, above: tuple[str, ...]) -> None:
    """Add the files below `folder`, whose path in the split is `relative`, to `files`.

    `above` holds the real folders from which links led here, so that links in a circle end.
    """
    for entry in _entries(folder):
        name = f"{relative}/{entry.name}"
        if entry.is_symlink():
            path = Path(entry.path)
            if path.is_dir():
                target, here = os.path.realpath(path), (*above, os.path.realpath(folder))
                if any(f"{one}/".startswith(f"{target}/") for one in here):
                    scan.broken.append(f"{name} -> {path.readlink()}, a circle")
                else:
                    _walk(scan, files, entry.path, name, (*here, target))
                continue
            if not path.exists():
                scan.broken.append(f"{name} -> {path.readlink()}")
                continue
            scan.links.append(name)
        elif entry.is_dir():
            _walk(scan, files, entry.path, name, above)
            continue
        if (suffix := _suffix(entry.name)) in NOT_IMAGES:
            scan.left_out[suffix] += 1
        elif entry.is_file():
            files.append(name)


def _suffix(name: str) -> str:
    _, dot, suffix = name.rpartition(".")
    return suffix.lower() if dot else ""


def _training_classes(scan: _Scan) -> tuple[str, ...]:
    where = shown(scan.folder)
    if not any(scan.files.values()):
        if scan.loose:
            raise DataError(
                f"{_number(len(scan.loose), 'image')} directly in {where}, no class; make one folder a class."
            )
        raise DataError(f"no classes or images in {where}; put one folder of images a class there.")
    empty = [name for name, files in scan.files.items() if not files]
    if empty:
        raise DataError(f"{_have(empty)} no images in {where}; put images there or remove the folder.")
    if len(scan.files) == 1:
        only = shown(next(iter(scan.files)))
        raise DataError(f"only one class, '{only}', in {where}; a classifier needs a folder of images for each of two.")
    return tuple(scan.files)


def _known_split(scan: _Scan, classes: Sequence[str], *, known_by: str) -> Split:
    if not any(scan.files.values()):
        found = f" ({_number(len(scan.loose), 'image')} directly in it, no class)" if scan.loose else ""
        raise DataError(f"no classes or images in {shown(scan.folder)}{found}; put one folder of images a class there.")
    known = set(classes)
    unknown = [name for name, files in scan.files.items() if files and name not in known]
    if unknown:
        raise DataError(
            f"{shown(scan.folder)} holds {_some(unknown)}, unknown to {known_by}; "
            f"rename or remove it{shown(near(unknown[0], classes))}"
        )
    return _split(scan, classes)


def _split(scan: _Scan, classes: Sequence[str]) -> Split:
    return _join(scan.folder, [scan.files.get(name, []) for name in classes])


def _join(folder: Path, per_class: Sequence[Sequence[str]]) -> Split:
    labels = np.repeat(np.arange(len(per_class), dtype=np.int64), [len(files) for files in per_class])
    return Split(folder, tuple(itertools.chain.from_iterable(per_class)), labels)


def _stratified(scan: _Scan, classes: Sequence[str], *, seed: int, val_share: float) -> tuple[Split, Split]:
    """Draw `val_share` of each class for validation: at least one image, and never the last one."""
    train, val = [], []
    for name in classes:
        files = scan.files[name]
        wanted = min(max(1, round(len(files) * val_share)), len(files) - 1)
        # Seeded by the class's name too, so that a new class leaves the others as they were.
        order = np.random.default_rng([seed, zlib.crc32(os.fsencode(name))]).permutation(len(files))
        drawn = set(order[:wanted].tolist())
        train.append([file for index, file in enumerate(files) if index not in drawn])
        val.append([file for index, file in enumerate(files) if index in drawn])
    if not any(val):
        raise DataError(
            f"every class in {shown(scan.folder)} has one image, none to spare; add images, or a val/ folder."
        )
    return _join(scan.folder, train), _join(scan.folder, val)


def _scan_notes(scan: _Scan) -> list[str]:
    where = shown(scan.folder.name)
    notes = []
    if scan.loose:
        notes.append(
            f"{_number(len(scan.loose), 'image')} directly in {where}, no class: left out ({_some(scan.loose)})"
        )
    if scan.broken:
        notes.append(f"broken link in {where}: left out ({_some(scan.broken)})")
    if scan.left_out:
        suffixes = ", ".join(f".{shown(suffix)}" for suffix in sorted(scan.left_out))
        notes.append(
            f"{_number(scan.left_out.total(), 'file')} in {where} not an image by suffix: left out ({suffixes})"
        )
    crossing = list(_crossing_links(scan))
    if crossing:
        notes.append(f"link in {where} to an image of another class: kept where it lies ({_some(crossing)})")
    return notes


def _crossing_links(scan: _Scan) -> Iterator[str]:
    root = os.path.realpath(scan.folder) + "/"
    for name in scan.links[:10_000]:  # a few are worth a word; a store of a million links is not worth a minute
        target = os.path.realpath(scan.folder / name)
        if target.startswith(root) and target[len(root) :].split("/")[0] != name.split("/")[0]:
            yield f"{name} -> {target[len(root) :]}"


def _count(scan: _Scan) -> int:
    return sum(len(files) for files in scan.files.values())


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _have(names: Sequence[str]) -> str:
    return f"class {_some(names)} has" if len(names) == 1 else f"{len(names):,} classes ({_some(names)}) have"


def _some(names: Sequence[str]) -> str:
    """Return the first ten names, quoted, and how many more there are."""
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(f"'{shown(name)}'" for name in names[:10]) + more


def _paths(split: Split) -> Iterator[Path]:
    return (split.folder / name for name in split.files)


def _with_sizes(split: Split) -> Iterator[tuple[Path, int]]:
    for path in _paths(split):
        with contextlib.suppress(OSError):
            yield path, path.stat().st_size


def _digest(path: Path) -> bytes:
    """Return a hash of a file's bytes, or nothing when they cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""


def _records(folder: ImageFolder) -> Iterator[Any]:
    splits = (folder.train, folder.val)
    yield {
        "format": INDEX_FORMAT,
        "root": str(folder.root),
        "classes": folder.classes,
        "notes": folder.notes,
        "splits": [(str(split.folder), len(split.files)) for split in splits],
    }
    for split in splits:
        for label, group in itertools.groupby(
            zip(split.labels.tolist(), split.files, strict=True), key=lambda pair: pair[0]
        ):
            yield label, [name for _, name in group]


def _read_split(lines: Iterable[bytes], folder: Path, count: int) -> Split:
    files: list[str] = []
    labels: list[int] = []
    lines = iter(lines)
    while len(files) < count:
        label, names = json.loads(next(lines, b""))
        files += names
        labels += [label] * len(names)
    if len(files) != count:
        raise ValueError(f"{len(files)} files where it announces {count}")
    return Split(folder, tuple(files), np.array(labels, np.int64))
