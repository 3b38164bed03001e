import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsimg.errors import DataError, ImageError
from dsimg.folder import ImageFolder, Split, find_images, find_labelled, find_leaks, read_index, shown, write_index
from dsimg.preprocess import decode
from tests.dsimg.zoo import make_zoo


def fill(root: Path, *names: str) -> Path:
    """Make files with their own name as contents (listing opens none)."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    return root


def numbered(folder: str, count: int) -> list[str]:
    return [f"{folder}/{index}.jpg" for index in range(count)]


def refused(root: Path) -> str:
    with pytest.raises(DataError) as caught:
        find_images(root, seed=0)
    return str(caught.value).replace(str(root), "ROOT")


def test_every_tree_of_the_zoo_gets_its_expected_answer(tmp_path: Path) -> None:
    trees = make_zoo(tmp_path / "zoo")["trees"]
    assert len(trees) == 14
    for tree in trees:
        root = tmp_path / "zoo" / tree["path"]
        if tree["id"] in NOT_TAKEN:
            assert refused(root) == NOT_TAKEN[tree["id"]]
            assert tree["action"] in ("refuse", "report_or_refuse")
            continue
        folder = find_images(root, seed=0)
        assert folder.notes == NOTES.get(tree["id"], ()), tree["id"]
        bad = [f"{split.folder.name}/{name}" for split in (folder.train, folder.val) for name in undecodable(split)]
        said = [*folder.notes, *bad, *find_leaks(folder)]
        assert bool(said) == (tree["action"] == "report"), tree["id"]
        if tree["id"] == "some_bad":
            assert sorted(bad) == tree["say"]
        if tree["classes"]:
            assert list(folder.classes) == tree["classes"]
        if "class_set" in tree:
            assert set(folder.classes) == set(tree["class_set"])
        for split in (folder.train, folder.val):
            assert len(split.files) - len(undecodable(split)) == tree["usable"][split.folder.name], tree["id"]
            assert [name.split("/")[0] for name in split.files] == [folder.classes[i] for i in split.labels]


NOT_TAKEN = {
    "empty_class": "class 'bee' has no images in ROOT/train; put images there or remove the folder.",
    "empty_root": "no classes or images in ROOT/train; put one folder of images a class there.",
}
NOTES = {
    "one_image_class": ("class 'wasp' has 1 training image",),
    "val_lacks_class": ("class 'bee' has no validation images",),
    "links": (
        "broken link in train: left out ('ant/link_broken.jpg -> ../../nowhere/gone.jpg')",
        "link in train to an image of another class: kept where it lies ('ant/link_ok.jpg -> bee/img_000.jpg')",
    ),
    "loose": ("3 images directly in train, no class: left out ('stray_0.jpg', 'stray_1.jpg', 'stray_2.jpg')",),
}


def undecodable(split: Split) -> list[str]:
    bad = []
    for name in split.files:
        try:
            decode((split.folder / name).read_bytes())
        except ImageError:
            bad.append(name)
    return bad


def test_files_are_ordered_by_class_then_path_and_labelled_by_name(tmp_path: Path) -> None:
    root = fill(
        tmp_path,
        "train/b/2.jpg", "train/b/10.jpg", "train/a/deep/er/x.jpg", "train/a/x.jpg", "train/a b/x.jpg", "train/c/x.png",
        "val/c/v.jpg", "val/a/v.jpg",
    )  # fmt: skip
    folder = find_images(root, seed=0)
    assert folder.root == root
    assert folder.classes == ("a", "a b", "b", "c")
    assert folder.train.folder == root / "train"
    assert folder.train.files == ("a/deep/er/x.jpg", "a/x.jpg", "a b/x.jpg", "b/10.jpg", "b/2.jpg", "c/x.png")
    assert folder.train.labels.tolist() == [0, 0, 1, 2, 2, 3]
    assert folder.train.labels.dtype == np.int64
    assert folder.val.files == ("a/v.jpg", "c/v.jpg")
    assert folder.val.labels.tolist() == [0, 3]
    assert folder.notes == (
        "2 classes ('a b', 'b') have no validation images",
        "2 classes ('a b', 'c') have 1 training image",
    )


def test_what_is_listed_and_what_is_left_out(tmp_path: Path) -> None:
    root = fill(
        tmp_path,
        *numbered("train/a", 2), *numbered("train/b", 2), "val/a/0.jpg", "val/b/0.jpg",
        "train/a/no_suffix", "train/a/UPPER.JPEG", "train/a/phone.heic", "train/a/odd.xyz",
        "train/a/.DS_Store", "train/a/._0.jpg", "train/a/Thumbs.db", "train/a/desktop.ini", "train/a/.git/x.jpg",
        "train/__MACOSX/a/x.jpg", "train/lost+found/x", "train/README", "train/classes.csv",
        "train/b/0.xml", "train/b/1.xml", "train/b/caption.TXT", ".hidden/x.jpg", "notes.txt",
    )  # fmt: skip
    folder = find_images(root, seed=0)
    assert folder.classes == ("a", "b")
    assert folder.train.files == (
        "a/0.jpg", "a/1.jpg", "a/UPPER.JPEG", "a/no_suffix", "a/odd.xyz", "a/phone.heic", "b/0.jpg", "b/1.jpg",
    )  # fmt: skip
    assert folder.notes == ("3 files in train not an image by suffix: left out (.txt, .xml)",)


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_other_names_of_the_validation_folder_are_taken_and_said(tmp_path: Path, name: str) -> None:
    root = fill(tmp_path, *numbered("train/a", 2), *numbered("train/b", 2), f"{name}/a/v.jpg", f"{name}/b/v.jpg")
    folder = find_images(root, seed=0)
    assert folder.val.folder == root / name
    assert folder.val.files == ("a/v.jpg", "b/v.jpg")
    assert folder.notes == (f"{name}/ is taken for validation",)


def test_val_comes_before_test(tmp_path: Path) -> None:
    root = fill(
        tmp_path, *numbered("train/a", 2), *numbered("train/b", 2), "test/a/t.jpg", "val/a/v.jpg", "val/b/v.jpg"
    )
    folder = find_images(root, seed=0)
    assert (folder.val.folder, folder.notes) == (root / "val", ())


def test_one_folder_of_class_folders_is_split_by_class_and_seed(tmp_path: Path) -> None:
    root = fill(tmp_path, *numbered("a", 50), *numbered("b", 11), *numbered("c", 2), "d/only.jpg")
    folder = find_images(root, seed=0)
    assert folder.train.folder == folder.val.folder == root
    assert np.bincount(folder.val.labels).tolist() == [10, 2, 1]
    assert np.bincount(folder.train.labels).tolist() == [40, 9, 1, 1]
    assert sorted(folder.train.files + folder.val.files) == sorted(
        [*numbered("a", 50), *numbered("b", 11), *numbered("c", 2), "d/only.jpg"]
    )
    assert folder.notes == (
        f"no validation folder in {root}: 13 of 64 images are held out (20% of each class, seed 0)",
        "2 classes ('c', 'd') have 1 training image",
    )
    assert find_images(root, seed=0).val.files == folder.val.files
    assert find_images(root, seed=1).val.files != folder.val.files
    assert np.bincount(find_images(root, seed=0, val_share=0.5).val.labels).tolist() == [25, 6, 1]
    fill(root, *numbered("aa", 5))  # a new class leaves the split of the others alone
    assert [name for name in find_images(root, seed=0).val.files if name[:2] != "aa"] == list(folder.val.files)


def test_train_alone_is_split_too(tmp_path: Path) -> None:
    folder = find_images(fill(tmp_path, *numbered("train/a", 10), *numbered("train/b", 10)), seed=0)
    assert folder.train.folder == folder.val.folder == tmp_path / "train"
    assert (len(folder.train.files), len(folder.val.files)) == (16, 4)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    root = fill(tmp_path, *numbered("bus", 5), *numbered("train", 5), *numbered("test", 5))
    assert find_images(root, seed=0).classes == ("bus", "test", "train")


def test_names_survive_listing_and_index(tmp_path: Path) -> None:
    odd = [
        "two  spaces ",
        "пчела",
        "cat \U0001f408‍⬛",
        "100%25 #1?&",
        'it\'s "quoted"',
        "new\nline",
        os.fsdecode(b"\xff\xfe"),
    ]
    root = fill(tmp_path / "data", *(f"{name}/{name}.jpg" for name in odd), *(f"{name}/2.jpg" for name in odd))
    folder = find_images(root, seed=0)
    assert folder.classes == tuple(sorted(odd))
    write_index(folder, tmp_path / "index")
    again = read_index(tmp_path / "index")
    assert_equal(again, folder)
    for name in (*again.train.files, *again.val.files):
        assert (root / name).exists()
    for note in folder.notes:
        note.encode()  # fit for any terminal
    assert any(r"'\xff\xfe'" in note and r"'new\x0aline'" in note for note in folder.notes)


def assert_equal(one: ImageFolder, two: ImageFolder) -> None:
    assert (one.root, one.classes, one.notes) == (two.root, two.classes, two.notes)
    for split, other in ((one.train, two.train), (one.val, two.val)):
        assert (split.folder, split.files) == (other.folder, other.files)
        assert split.labels.dtype == other.labels.dtype == np.int64
        assert split.labels.tolist() == other.labels.tolist()


def test_what_cannot_be_printed_is_escaped() -> None:
    assert shown(os.fsdecode(b"a\xff\x1b[2J\n")) == r"a\xff\x1b[2J\x0a"
    assert shown(Path("пчела/x")) == "пчела/x"


def test_an_index_is_one_file_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    folder = find_images(fill(tmp_path / "data", *numbered("a", 5), *numbered("b", 5)), seed=0)
    (tmp_path / "out").mkdir()
    write_index(folder, tmp_path / "out/index")
    first = (tmp_path / "out/index").read_bytes()
    write_index(folder, tmp_path / "out/index")
    assert (tmp_path / "out/index").read_bytes() == first
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index"]


def test_an_index_keeps_any_order_of_labels_and_empty_splits(tmp_path: Path) -> None:
    folder = ImageFolder(
        tmp_path,
        ("a", "b"),
        Split(tmp_path / "t", ("b/1", "a/1", "b/2"), np.array([1, 0, 1], np.int64)),
        Split(tmp_path / "v", (), np.array([], np.int64)),
        ("note",),
    )
    write_index(folder, tmp_path / "index")
    assert_equal(read_index(tmp_path / "index"), folder)


def test_a_missing_or_damaged_index_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with pytest.raises(DataError, match=r"^there is no index of images at .*index\S*\.$"):
        read_index(path)
    write_index(find_images(fill(tmp_path / "data", *numbered("a", 50), *numbered("b", 50)), seed=0), path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for damaged in (whole[:-20], whole[: len(whole) // 2], bytes(flipped), b"", b"{}", b"\x1f\x8bnonsense"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"is damaged \(.*\)\.$"):
            read_index(path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no classes or images in ROOT; put one folder of images a class there."),
        (["1.jpg", "2.png", "x.txt"], "2 images directly in ROOT, no class; make one folder a class."),
        (
            numbered("ant", 3),
            "only one class, 'ant', in ROOT; a classifier needs a folder of images for each of two.",
        ),
        (
            [*numbered("a", 2), *numbered("b", 2), "c/list.txt", "d/.hidden"],
            "2 classes ('c', 'd') have no images in ROOT; put images there or remove the folder.",
        ),
        (
            ["a/1.jpg", "b/1.jpg"],
            "every class in ROOT has one image, none to spare; add images, or a val/ folder.",
        ),
        (
            [*numbered("train/ant", 2), *numbered("train/wasp", 2), "val/ant/1.jpg", "val/wisp/1.jpg"],
            "ROOT/val holds 'wisp', unknown to ROOT/train; rename or remove it, did you mean 'wasp'?",
        ),
        (
            [*numbered("train/a", 2), *numbered("train/b", 2), "val/1.jpg"],
            "no classes or images in ROOT/val (1 image directly in it, no class); "
            "put one folder of images a class there.",
        ),
        (
            [*numbered("val/a", 2), *numbered("val/b", 2)],
            "ROOT has val/ and no train/; put the training images in train/.",
        ),
        (
            [*numbered("Train/a", 2), *numbered("Train/b", 2), *numbered("extra", 2)],
            "ROOT/Train looks like a split; name the folders train and val, in small letters.",
        ),
    ],
)
def test_bad_folders_are_refused_with_the_remedy(tmp_path: Path, names: list[str], message: str) -> None:
    assert refused(fill(tmp_path, *names)) == message


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "flowers/a/1.jpg", "file")
    assert refused(tmp_path / "flower") == "no such folder: ROOT; check the path, did you mean 'flowers'?"
    assert refused(tmp_path / "no/where") == "no such folder: ROOT; check the path."
    assert refused(tmp_path / "file") == "ROOT is a file; give the folder that holds the class folders."


def test_links_to_folders_are_followed_and_circles_end(tmp_path: Path) -> None:
    fill(tmp_path, "store/1.jpg", "store/2.jpg", *numbered("data/b", 2), "data/a/x/0.jpg", "data/a/y/0.jpg")
    (tmp_path / "data/c").symlink_to("../store")
    (tmp_path / "data/b/more").symlink_to("../../store")
    (tmp_path / "data/b/up").symlink_to("..")
    (tmp_path / "data/a/x/y").symlink_to("../y")
    (tmp_path / "data/a/y/x").symlink_to("../x")
    (tmp_path / "data/b/self.jpg").symlink_to("self.jpg")
    (tmp_path / "data/d").symlink_to("gone")
    folder = find_images(tmp_path / "data", seed=0)
    assert folder.classes == ("a", "b", "c")
    assert sorted(folder.train.files + folder.val.files) == [
        "a/x/0.jpg", "a/x/y/0.jpg", "a/y/0.jpg", "a/y/x/0.jpg",
        "b/0.jpg", "b/1.jpg", "b/more/1.jpg", "b/more/2.jpg", "c/1.jpg", "c/2.jpg",
    ]  # fmt: skip
    (broken,) = (note for note in folder.notes if note.startswith("broken link in data: left out"))
    assert sorted(re.findall("'(.*?)'", broken)) == [
        "a/x/y/x -> ../x, a circle",
        "a/y/x/y -> ../y, a circle",
        "b/self.jpg -> self.jpg",
        "b/up -> .., a circle",
        "d -> gone",
    ]


def test_a_folder_to_measure_is_labelled_by_the_models_classes(tmp_path: Path) -> None:
    classes = ("1", "2", "10")  # a model's own order
    root = fill(tmp_path / "split", "train/1/a.jpg", "train/2/a.jpg", "val/10/v.jpg", "val/2/v.jpg")
    split, notes = find_labelled(root, classes)
    assert split.folder == root / "val"
    assert split.files == ("2/v.jpg", "10/v.jpg")
    assert split.labels.tolist() == [1, 2]
    assert notes == ("class '1' has no images here",)
    plain, notes = find_labelled(fill(tmp_path / "plain", "1/x.jpg", "2/x.jpg", "10/x.jpg", "empty/x.txt"), classes)
    assert (plain.folder, plain.files) == (tmp_path / "plain", ("1/x.jpg", "2/x.jpg", "10/x.jpg"))
    assert notes == ("1 file in plain not an image by suffix: left out (.txt)",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["ant/1.jpg", "wisp/1.jpg"],
            "ROOT holds 'wisp', unknown to the model; rename or remove it, did you mean 'wasp'?",
        ),
        (
            ["1.jpg"],
            "no classes or images in ROOT (1 image directly in it, no class); put one folder of images a class there.",
        ),
        (["train/ant/1.jpg"], "ROOT has train/ and no val/; give the folder of class folders to measure on."),
    ],
)
def test_a_folder_to_measure_that_does_not_fit_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        find_labelled(fill(tmp_path, *names), ("ant", "wasp"))
    assert str(caught.value).replace(str(tmp_path), "ROOT") == message


def test_leaks_are_pairs_of_equal_files(tmp_path: Path) -> None:
    def write(name: str, data: bytes) -> Path:
        fill(tmp_path, name)
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    write("train/a/1.jpg", b"one")
    original = write("train/a/2.jpg", b"two")
    write("train/b/3.jpg", b"two")
    write("train/b/empty.jpg", b"")
    write("val/a/same_size.jpg", b"ten")
    write("val/b/empty.jpg", b"")
    write("val/a/long.jpg", b"another length")
    copy = write("val/b/copy.jpg", b"two")
    folder = find_images(tmp_path, seed=0)
    assert find_leaks(folder) == [(original, copy)]
    copy.unlink()
    assert find_leaks(folder) == []  # decoding will name what cannot be read


def test_no_file_is_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.3 million files are listed in seconds because their folders are read and they are not."""
    root = fill(tmp_path, *numbered("a", 300), *numbered("b", 300))
    calls: list[Any] = []
    real = os.stat

    def counting(*args: Any, **kwargs: Any) -> os.stat_result:
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "stat", counting)
    find_images(root, seed=0)
    assert len(calls) < 20


def test_these_files_never_load_torch() -> None:
    code = "import sys, dsimg.folder, dsimg.preprocess, dsimg.digits; print(sys.modules.keys() & {'torch', 'sklearn'})"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout == "set()\n"
