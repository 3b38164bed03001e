"""Finding batch, delay and threads by measuring: decoding and the network under load, without HTTP."""

import asyncio
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsimg.errors import ConfigError
from dsimg_export.golden import read_golden
from dsimg_export.server.model import Model, Plan, open_pool
from dsimg_export.server.pool import Pool

GOAL = re.compile(r"p99=([0-9.]+)\s*ms")
BATCHES = (1, 2, 4, 8, 16)
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
SECONDS = 1.0  # of each measurement
MIN_ANSWERS = 50
MAX_SECONDS = 5.0
MOST_SECONDS = 120.0  # after which no further setting is begun


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What may be chosen: `Plan`'s, and the threads that decode."""

    workers: int
    threads: int
    decode_threads: int
    max_batch: int
    delay: float  # seconds


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a setting bore: so many clients, each with one image at a time."""

    setting: Setting
    clients: int
    images_per_second: float
    p99: float  # seconds


def parse_goal(text: str) -> float:
    """Return the seconds in "p99=50ms". Raises ConfigError."""
    match = GOAL.fullmatch(text.strip())
    try:
        seconds = float(match[1]) / 1000 if match else 0.0
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"--tune is '{text}'; write what the slowest of a hundred may take: --tune p99=50ms.")
    return seconds


def settings(cores: int, goal: float) -> Iterator[Setting]:
    """Yield what is tried: all cores in calls of one thread or in one call, decoding on all or half of them.

    Those without a delay come first.
    """
    for delay, threads, decode_threads, max_batch in itertools.product(
        (0.0, goal / 10), sorted({1, cores}), sorted({cores, max(1, cores // 2)}), BATCHES
    ):
        if max_batch > 1 or not delay:
            yield Setting(
                workers=cores // threads,
                threads=threads,
                decode_threads=decode_threads,
                max_batch=max_batch,
                delay=delay,
            )


def tune(
    goal: float,
    tried: Sequence[Setting],
    *,
    load: Callable[[Plan, Pool], Model],
    pin: bool = True,
    say: Callable[[Load], None],
    seconds: float | None = None,
) -> Load:
    """Return the setting that answers most images a second with a p99 of at most `goal` seconds, and what it bore.

    load: opens the model with a plan. pin: as of `open_pool`. What has not begun after MOST_SECONDS is not tried.
    Raises ConfigError where no setting keeps the goal with one client.
    """
    best: Load | None = None
    slowest = math.inf
    end = time.monotonic() + MOST_SECONDS
    for setting in tried:
        if time.monotonic() > end:
            break
        plan = Plan(
            workers=setting.workers,
            threads=setting.threads,
            max_batch=setting.max_batch,
            max_delay=setting.delay,
            max_queue=max(CLIENTS) * 2,
        )
        pool = open_pool(plan, setting.decode_threads, pin=pin)
        try:
            found = asyncio.run(_bear(load(plan, pool), setting, goal, SECONDS if seconds is None else seconds))
        finally:
            pool.close()
        slowest = min(slowest, found[0].p99)
        kept = [one for one in found if one.p99 <= goal]
        if not kept:
            continue
        most = max(kept, key=lambda one: one.images_per_second)
        if best is None or most.images_per_second > best.images_per_second:
            best = most
            say(best)
    if best is None:
        raise ConfigError(
            f"--tune: one client alone waits {1000 * slowest:.0f} ms at p99 with the best setting, and "
            f"{1000 * goal:g} ms are asked for. Ask for more, or serve a faster run (dsimg compress)."
        )
    return best


async def _bear(model: Model, setting: Setting, goal: float, seconds: float) -> list[Load]:
    """Return what a setting bears with more and more clients, up to the first that is too slow."""
    images = read_golden(model.served.run.file("golden")).encoded
    found: list[Load] = []
    try:
        for clients in CLIENTS:
            waits: list[float] = []
            start = time.monotonic()

            async def client(number: int, waits: list[float] = waits, start: float = start) -> None:
                for data in itertools.islice(itertools.cycle(images), number, None):
                    begun = time.monotonic()
                    if begun - start > seconds and (len(waits) >= MIN_ANSWERS or begun - start > MAX_SECONDS):
                        return
                    (answer,) = await model.batcher.submit([data])
                    assert not isinstance(answer, Exception)
                    waits.append(time.monotonic() - begun)

            await asyncio.gather(*(client(number) for number in range(clients)))
            spent = time.monotonic() - start
            found.append(
                Load(
                    setting=setting,
                    clients=clients,
                    images_per_second=len(waits) / spent,
                    p99=float(np.percentile(waits, 99)),
                )
            )
            # More clients wait longer; and where twice as many get no more done, more of them will not either.
            slower = len(found) > 1 and found[-1].images_per_second < 1.02 * found[-2].images_per_second
            if found[-1].p99 > goal or slower:
                break
    finally:
        await model.batcher.close()
    return found
