"""Exported runs with golden images, made without torch, and ways to tamper with them."""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import ExifTags, Image

from dsimg.preprocess import Preprocess
from dsimg.run import Run, sha256
from dsimg_export.golden import Golden, read_golden, record
from dsimg_export.onnx_file import describe
from tests.export.files import write_network
from tests.export.runs import CLASSES, MODEL, PREPROCESS


def picture(seed: int, *, width: int = 40, height: int = 24) -> Image.Image:
    """Return a smooth picture that is alike under no turn: darker to the left, redder at the top."""
    rng = np.random.default_rng(seed)
    across, down = np.linspace(40, 200, width), np.linspace(200, 60, height)
    pixels = np.stack(np.broadcast_arrays(down[:, None], across[None, :], (across[None, :] + down[:, None]) / 2), 2)
    return Image.fromarray((pixels + rng.uniform(-30, 30, 3)).clip(0, 255).astype(np.uint8))


def encoded_pictures() -> list[bytes]:
    """Return a PNG, a JPEG, and a JPEG that its EXIF orientation sets upright."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    kinds: list[tuple[str, dict[str, Any]]] = [("PNG", {}), ("JPEG", {"quality": 90}), ("JPEG", {"exif": exif})]
    found = []
    for seed, (kind, options) in enumerate(kinds):
        stream = io.BytesIO()
        picture(seed).save(stream, kind, **options)
        found.append(stream.getvalue())
    return found


def write_golden_run(
    path: Path,
    *,
    networks: Mapping[str, Callable[[Path], object]] | None = None,
    parents: tuple[Run, ...] = (),
    described: bool = True,
) -> Run:
    """Write a finished run as `dsimg export` does; networks: what writes the file of each role. Return it."""
    run, _ = Run.begin(path, stage="export", config={}, parents=parents)
    names = {"model": "model.onnx", "reduced": "model_reduced.onnx"}
    files = {}
    for role, write in (networks or {"model": write_network}).items():
        files[role] = path / names[role]
        write(files[role])
        proto = onnx.load(files[role])
        if described:
            describe(proto, {"dsimg.classes": CLASSES, "dsimg.preprocess": PREPROCESS})
        onnx.save(proto, files[role])
    (path / "labels.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    preprocess = Preprocess.from_dict(PREPROCESS)
    record(encoded_pictures(), files, preprocess=preprocess, classes=CLASSES).save(path / "golden.safetensors")
    run.finish(seed=None, model=MODEL, metrics={})
    return Run.open(path)


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change run.json as a person with an editor would."""
    content = json.loads((path / "run.json").read_bytes())
    change(content)
    (path / "run.json").write_text(json.dumps(content))


def hash_again(path: Path) -> None:
    """Write the hashes of the files as they are now into run.json."""

    def change(content: dict[str, Any]) -> None:
        for entry in content["files"].values():
            file = path / entry["path"]
            entry.update(sha256=sha256(file), bytes=file.stat().st_size)

    edit_manifest(path, change)


def edit_golden(path: Path, **changes: Any) -> None:
    """Replace fields of a run's golden images, and hash the file again."""
    old = read_golden(path / "golden.safetensors")
    Golden(**{**vars(old), **changes}).save(path / "golden.safetensors")
    hash_again(path)
