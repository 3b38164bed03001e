"""Train on a folder of images from Python, and read the result out of the run folder.

python examples/train_your_folder.py          draws a small folder of discs and squares, and trains on that
python examples/train_your_folder.py DIR      trains on yours: DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg

It does what `dsimg train --data DIR --epochs 12 --batch_size 32` does, in one process. For several, use the command.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from dsimg.train import TrainConfig, train


def main() -> None:
    """Train, then print what the run says about itself."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else draw_shapes(Path("runs/data/shapes"))
    run = train(TrainConfig(data=str(folder), epochs=12, batch_size=32))
    assert run.manifest is not None  # a run that train returns is finished
    validation = run.manifest["metrics"]["validation"]
    print(f"{validation['correct']} of {validation['images']} images right")
    print(f"classes: {', '.join(run.model['classes'])}")
    print(f"weights: {run.file('weights')}")


def draw_shapes(root: Path) -> Path:
    """Write grey 32 x 32 discs and squares of random size and place: 60 a class in train/, 20 in val/."""
    rng = np.random.default_rng(0)
    for name in ("disc", "square"):
        for number in range(80):
            image = Image.new("L", (32, 32), int(rng.integers(0, 100)))
            left, top, side = (int(rng.integers(low, high)) for low, high in ((1, 12), (1, 12), (12, 19)))
            box, grey = (left, top, left + side, top + side), int(rng.integers(150, 255))
            draw = ImageDraw.Draw(image)
            (draw.ellipse if name == "disc" else draw.rectangle)(box, fill=grey)
            path = root / ("train" if number < 60 else "val") / name / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    return root


if __name__ == "__main__":
    main()
