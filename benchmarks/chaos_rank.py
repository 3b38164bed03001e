"""One rank of benchmarks/chaos.py: `dsimg train`, which sends itself a signal at a point that its environment names.

CHAOS_POINT   save:S:K   before the K-th file event of the S-th save of this process, or of the first later one that has
                         as many; save:0:K counts from the start, with what an earlier save left to clear
              torn:S:K   the same for the K-th that writes or syncs a file, which is cut to half its size
              run:K      before the K-th file event in the run folder outside checkpoints/ and logs/
              train:K    in the K-th forward pass of training; eval:K in the K-th one of evaluation
CHAOS_RANKS   the ranks that do so: "0", "1" or "0 1". CHAOS_SIGNAL: KILL, TERM, STOP.
CHAOS_RUN     the run folder. CHAOS_LOG: a file that gets a JSON line an event, with `fired` on the one of the signal.

A file event is what changes a folder: a file opened for writing, made, synced, renamed or removed, seen by an audit
hook and by wrappers around what raises no audit event. The idea is that of the ckpt-chaos package.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

# Audit event -> where its arguments have the path, and the descriptor of the folder that a relative path is in.
PATHS = {
    "os.mkdir": (0, 2),
    "os.rename": (0, 2),
    "os.remove": (0, 1),
    "os.rmdir": (0, 1),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "shutil.rmtree": (0, 1),
}
CREATING = ("open", "os.mkdir", "save_file")


def fire(event: dict[str, Any]) -> None:
    """Log that the signal is sent now, and send it to this process."""
    log({**event, "fired": True})
    os.kill(os.getpid(), getattr(signal, f"SIG{os.environ['CHAOS_SIGNAL']}"))


def log(event: dict[str, Any]) -> None:
    """Append a line that survives this process."""
    descriptor = os.open(os.environ["CHAOS_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    line = {"rank": int(os.environ["RANK"]), "time": time.time(), **event}
    os.write(descriptor, (json.dumps(line) + "\n").encode())
    os.close(descriptor)


def point() -> tuple[str, list[int]]:
    """Return this rank's point: its kind and its numbers; no kind for a rank that is only watched."""
    kind, *numbers = os.environ.get("CHAOS_POINT", "").split(":")
    mine = os.environ["RANK"] in os.environ.get("CHAOS_RANKS", "").split()
    return (kind, [int(number) for number in numbers]) if mine else ("", [])


class ChaosNet(nn.Sequential):
    """A network that has what a resumed run can get wrong: BatchNorm statistics, and dropout's random numbers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(32 * 16, num_classes),
        )
        self.passes = {"train": 0, "eval": 0}

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, H, W) -> logits (N, num_classes)."""
        if images.device.type != "meta":
            kind = "train" if self.training else "eval"
            self.passes[kind] += 1
            if point() == (kind, [self.passes[kind]]):
                fire({"name": f"{kind} pass {self.passes[kind]}", "path": ""})
        logits: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
        return logits


class Watcher:
    """Counts this process's file events below a run folder."""

    def __init__(self, run: Path) -> None:
        self._run = str(run)
        self._kind, self._numbers = point()
        self._lock = threading.Lock()
        self._folders: set[str] = set()
        self._saves = self._events = self._tears = self._run_events = 0
        self._fired = False
        self._torn: dict[str, Any] = {}

    def audit(self, name: str, args: tuple[Any, ...]) -> None:
        """Note an audit event, if it is one that changes a folder."""
        if name == "open":
            path, mode, flags = args
            if any(letter in mode for letter in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.note(name, path)
        elif name in PATHS:
            at, folder = PATHS[name]
            self.note(name, args[at], folder=args[folder] if len(args) > folder else None)

    def note(self, name: str, path: Any, *, folder: int | None = None, tears: bool = False) -> bool:
        """Count an event, and send the signal if it is the one; return whether the caller is to cut the file first."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        whole = Path(os.fsdecode(path))
        if folder is not None and folder >= 0:
            whole = Path(f"/proc/self/fd/{folder}").readlink() / whole
        inside = os.path.relpath(whole, self._run)
        top, _, rest = inside.partition("/")
        if top in ("..", "logs", ".lock", "metrics.jsonl"):
            return False
        with self._lock:
            event: dict[str, Any] = {"name": name, "path": inside, "tears": tears}
            if top != "checkpoints":
                self._run_events += 1
                hit = self._kind == "run" and self._numbers == [self._run_events]
                event["number"] = self._run_events
            else:
                place = rest.partition("/")[0]
                if name in CREATING and place.startswith(".step_") and place not in self._folders:
                    self._folders.add(place)
                    self._saves += 1
                    self._events = self._tears = 0
                self._events += 1
                self._tears += tears
                counted = {"save": self._events, "torn": self._tears if tears else 0}.get(self._kind)
                hit = counted is not None and self._saves >= self._numbers[0] and counted == self._numbers[1]
                event |= {"save": self._saves, "number": self._events, "tear": self._tears if tears else 0}
            hit = hit and not self._fired
            self._fired = self._fired or hit
            if not hit:
                log(event)
        if hit and self._kind == "torn":
            self._torn = event
            return True
        if hit:
            fire(event)
        return False

    def tear(self, path: Path) -> None:
        """Cut a file to half its size and send the signal."""
        os.truncate(path, path.stat().st_size // 2)
        fire({**self._torn, "name": f"{self._torn['name']}, torn"})

    def wrap_sync(self, sync: Callable[[Any], None]) -> Any:
        """Return `os.fsync` with an event before it."""

        def fsync(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            path = Path(f"/proc/self/fd/{number}").readlink()
            if self.note("fsync", path, tears=path.is_file()):
                self.tear(path)
            sync(descriptor)

        return fsync

    def wrap_save(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return safetensors' `save_file`, which writes from native code, with an event before it."""

        def save_file(tensors: Any, filename: Any, *rest: Any, **named: Any) -> None:
            cut = self.note("save_file", filename, tears=True)
            save(tensors, filename, *rest, **named)
            if cut:
                self.tear(Path(filename))

        return save_file


def main() -> None:
    """Watch the run folder's files, then do what `dsimg train` does."""
    import safetensors.torch

    watcher = Watcher(Path(os.environ["CHAOS_RUN"]))
    safetensors.torch.save_file = watcher.wrap_save(safetensors.torch.save_file)
    os.fsync = watcher.wrap_sync(os.fsync)
    sys.addaudithook(watcher.audit)
    from dsimg import cli  # now that what it imports is wrapped
    from dsimg.train import train

    cli.run(train)


if __name__ == "__main__":
    main()
