"""Where a request's time went: seconds by stage, and when each stage was."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Interval(NamedTuple):
    """A stage, and when it began and ended, of `time.monotonic`."""

    stage: str
    began: float
    ended: float


@dataclass(kw_only=True)
class Stages:
    """The stages of one request: it is read, and its images queue, are decoded, queue again and run."""

    seconds: dict[str, float] = field(default_factory=dict)  # by stage; of several images the longest
    batch: int = 0  # images in the largest batch
    _read: list[Interval] = field(default_factory=list)
    _image: list[Interval] = field(default_factory=list)

    @property
    def intervals(self) -> list[Interval]:
        """When they were; of the images, those of the one that was answered last."""
        return self._read + self._image

    def read(self, began: float, ended: float) -> None:
        """Note the reading of the body."""
        self._read = [Interval("read", began, ended)]
        self.seconds["read"] = ended - began

    def image(self, intervals: Iterable[Interval]) -> None:
        """Note what became of an image. It may have queued twice."""
        self._image = list(intervals)
        taken: dict[str, float] = {}
        for stage, began, ended in self._image:
            taken[stage] = taken.get(stage, 0.0) + ended - began
        for stage, seconds in taken.items():
            self.seconds[stage] = max(self.seconds.get(stage, 0.0), seconds)
