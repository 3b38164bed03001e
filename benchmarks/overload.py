"""What dsimg serve does when more is asked than it can answer, and what it holds after very many requests.

    python benchmarks/overload.py [overload|soak] --source RUN --images DIR [--seconds 60] [--times 5]
        [--deadline_ms 500] [--bytes 100000] [--requests 1000000]

overload: 8 clients, each asking again once it is answered, show the capacity. Then --times as many requests are sent at
the instants of a plan, whatever becomes of those before, over connections that are opened as they are needed. At the
end one client asks every 20 ms until it is answered as it was before.

soak: 8 clients ask about very small images; every tenth request is for health, or a broken image.

Both exit with 1 and say why where a promise is broken: an accepted answer later than the deadline (p99), a request
without an answer, an error that is none of the client's and no 503, or memory that grows by more than 10 MB in the
second half. dsimg counts the deadline from when the body is there; a client, from when it begins to send. Both are
shown, and the second is asked for.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import uvloop
from serve import Process, jpegs

from dsimg.machine import free_port
from dsimg.preprocess import decode

CLIENTS = 8
CAPACITY_SECONDS = 5.0
CONNECTIONS = 990  # of the 1000 that a server takes
PATIENCE = 5.0  # seconds after the deadline without an answer: it hangs
PERIOD = 0.02  # seconds between the requests of the client that looks whether the server is back
BACK = 5  # of its answers, one after the other, that are as fast as before
BACK_SECONDS = 30.0
MEMORY_SECONDS = 10.0
GROWTH = 10e6  # bytes
BROKEN, HUNG = 0, -1  # statuses of what got no answer: the connection ended, or nothing came
DURATION = re.compile(rb"(decode|queue|infer);dur=([\d.]+)")


@dataclass(frozen=True)
class Answer:
    """What came back; seconds from when the request began to be sent."""

    status: int
    seconds: float
    head: bytes = b""  # in small letters

    @property
    def server_seconds(self) -> float:
        """The seconds that the server counts towards the deadline: from when the body was there."""
        return sum(float(ms) for _, ms in DURATION.findall(self.head)) / 1000


class Connection(asyncio.Protocol):
    """A connection that stays open, with one request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self.since = 0.0
        self._data = bytearray()
        self._asked: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be of use."""
        self.transport = cast(asyncio.Transport, transport)
        self.usable = True

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        """Send a request."""
        self._asked = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()
        self.transport.write(request)
        return self._asked

    def data_received(self, data: bytes) -> None:
        """Take a part of an answer."""
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._data[:end]).lower()
        length = int(head.partition(b"\r\ncontent-length:")[2].split(b"\r\n", 1)[0])
        if len(self._data) < end + 4 + length:
            return
        self._data.clear()
        if b"\r\nconnection: close" in head:
            self.usable = False
            self.transport.abort()
        self._answer(int(head[9:12]), head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Be of no use any more; what is asked gets no answer."""
        self.usable = False
        self._answer(BROKEN)

    def _answer(self, status: int, head: bytes = b"") -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(Answer(status, time.monotonic() - self.since, head))


async def connect(port: int) -> Connection:
    """Return a connection."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


async def within(seconds: float, answers: Sequence["asyncio.Future[Answer]"]) -> bool:
    """Return whether all answers come in time."""
    if answers and (await asyncio.wait(answers, timeout=seconds))[1]:
        await asyncio.sleep(PERIOD)  # it may be this program that stood still: they are read now
    return all(answer.done() for answer in answers)


async def closed_loop(port: int, requests: Iterator[bytes], *, clients: int, patience: float) -> list[Answer]:
    """Send requests from so many clients, each with one at a time; return the answers."""
    answers: list[Answer] = []

    async def client() -> None:
        connection = await connect(port)
        for request in requests:
            if not connection.usable:
                connection = await connect(port)
            answer = connection.ask(request)
            if await within(patience, [answer]):
                answers.append(answer.result())
            else:
                connection.transport.abort()
                answers.append(Answer(HUNG, patience))
        connection.transport.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(
    port: int, requests: Sequence[bytes], *, rate: float, seconds: float, patience: float, ended: asyncio.Event
) -> tuple[list[Answer], list[float], int]:
    """Send so many requests a second, irrespective of the answers; set `ended` once the last is sent.

    Return the answers, how many seconds after its planned instant each request was sent, and how many were not, for all
    connections were taken. Connections take turns, so that none is idle until the server closes it.
    """
    answers: list[Answer] = []
    lags: list[float] = []
    idle: deque[Connection] = deque()
    waiting: dict[asyncio.Future[Answer], Connection] = {}

    def answered(future: asyncio.Future[Answer]) -> None:
        idle.append(waiting.pop(future))
        answers.append(future.result())

    begun, unsent = time.monotonic(), 0
    for number in range(round(rate * seconds)):
        due = begun + number / rate
        if (left := due - time.monotonic()) > 0 or number % 16 == 0:  # late: answers are read all the same
            await asyncio.sleep(max(0.0, left))
        while idle and not idle[0].usable:
            idle.popleft()
        if not idle and len(waiting) == CONNECTIONS:
            unsent += 1
            continue
        connection = idle.popleft() if idle else await connect(port)
        future = connection.ask(requests[number % len(requests)])
        waiting[future] = connection
        lags.append(connection.since - due)
        future.add_done_callback(answered)
    ended.set()
    await within(patience, list(waiting))
    return answers + [Answer(HUNG, patience)] * len(waiting), lags, unsent


async def seconds_until_back(port: int, request: bytes, *, at_rest: float, patience: float) -> float | None:
    """Return the seconds until answers take less than twice what they did; None: not within BACK_SECONDS."""
    begun, fast, since = time.monotonic(), 0, 0.0
    while (start := time.monotonic()) < begun + BACK_SECONDS:
        (answer,) = await closed_loop(port, iter([request]), clients=1, patience=patience)
        since = since if fast else start
        fast = fast + 1 if answer.status == 200 and answer.seconds < 2 * at_rest else 0
        if fast == BACK:
            return since - begun
        await asyncio.sleep(max(0.0, start + PERIOD - time.monotonic()))
    return None


def resident(server: Process) -> float:
    """Return a server's resident memory in bytes. Not PSS, which changes as other processes come and go."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in server.members()]
    return float(sum(pages) * os.sysconf("SC_PAGE_SIZE"))


def post(image: bytes) -> bytes:
    """Return the request for an image."""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n"
    return head.encode() + image


def cells(seconds: Sequence[float]) -> str:
    """Return p50, p99 and the longest, in ms, as cells of a table."""
    if not seconds:
        return " | | "
    return " | ".join(f"{1000 * value:.1f}" for value in (*np.percentile(seconds, (50, 99)), max(seconds)))


def unlike(statuses: Counter[int], *, expected: Sequence[int]) -> list[str]:
    """Return a sentence for each kind of answer that there should not be."""
    said = {HUNG: "requests without an answer", BROKEN: "connections that ended before the answer"}
    found = sorted(status for status in statuses if status not in expected)
    return [f"{said.get(status, f'answers with {status}')}: {statuses[status]}." for status in found]


async def overload(server: Process, images: Sequence[bytes], options: argparse.Namespace) -> list[str]:
    """Measure and print; return what was broken."""
    port, requests = server.port, [post(image) for image in images]
    deadline = options.deadline_ms / 1000
    patience = deadline + PATIENCE
    alone: list[Answer] = []
    for place in range(50):  # as `seconds_until_back` asks
        alone += await closed_loop(port, iter([requests[place % len(requests)]]), clients=1, patience=patience)
        await asyncio.sleep(PERIOD)
    at_rest = statistics.median(answer.seconds for answer in alone)
    end = time.monotonic() + CAPACITY_SECONDS
    until = itertools.takewhile(lambda _: time.monotonic() < end, itertools.cycle(requests))
    closed = await closed_loop(port, until, clients=CLIENTS, patience=patience)
    at_capacity = [answer.seconds for answer in closed if answer.status == 200]
    capacity = len(at_capacity) / CAPACITY_SECONDS
    if not capacity:
        return [f"none of {CLIENTS} clients was answered."]

    memory, begun, ended = [(0.0, resident(server))], time.monotonic(), asyncio.Event()

    async def watch_memory() -> None:
        step = min(MEMORY_SECONDS, options.seconds / 4)
        for number in range(1, round(options.seconds / step) + 1):
            await asyncio.sleep(begun + number * step - time.monotonic())
            memory.append((number * step, resident(server)))

    async def watch_end() -> float | None:
        await ended.wait()
        return await seconds_until_back(port, requests[0], at_rest=at_rest, patience=patience)

    rate = options.times * capacity
    (answers, lags, unsent), back, _ = await asyncio.gather(
        open_loop(port, requests, rate=rate, seconds=options.seconds, patience=patience, ended=ended),
        watch_end(),
        watch_memory(),
    )
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 503]
    waits, refusals = [answer.seconds for answer in accepted], [answer.seconds for answer in refused]

    def row(name: str, rate: float, seconds: Sequence[float] = ()) -> None:
        print(f"| {name} | {rate:.1f} | {rate / capacity:.2f} | {cells(seconds)} |")

    print(f"\nat rest an answer takes {1000 * at_rest:.1f} ms; the deadline is {options.deadline_ms:g} ms\n")
    print("| | requests/s | of the capacity | p50, ms | p99, ms | longest, ms |\n" + "|---" * 6 + "|")
    row(f"capacity: {CLIENTS} clients", capacity, at_capacity)
    row("planned", rate)
    row("sent; how late", len(lags) / options.seconds, lags)
    row("200, from when it was sent", len(accepted) / options.seconds, waits)
    row("200, by the server's clock", len(accepted) / options.seconds, [answer.server_seconds for answer in accepted])
    row("503, from when it was sent", len(refused) / options.seconds, refusals)
    slow = [seconds for seconds in refusals if seconds > deadline / 2]
    row("of them after half the deadline", len(slow) / options.seconds, slow)
    print(f"\n{unsent} requests were not sent, for all {CONNECTIONS} connections were taken.")
    print(f"After the load it is back in {back:.2f} s." if back is not None else "After the load it is not back.")
    print("\n| seconds | memory, MB |\n|---|---|")
    for seconds, size in memory:
        print(f"| {seconds:g} | {size / 1e6:.1f} |")
    print(f"| after | {resident(server) / 1e6:.1f} |")

    broken = unlike(Counter(answer.status for answer in (*alone, *closed, *answers)), expected=(200, 503))
    if without := sum(b"\r\nretry-after: " not in answer.head for answer in refused):
        broken.append(f"503 without Retry-After: {without}.")
    if late := sum(answer.seconds > patience for answer in answers):
        broken.append(f"answers later than {patience:g} s: {late}.")
    if not accepted:
        broken.append("nothing was accepted.")
    elif (p99 := float(np.percentile(waits, 99))) > deadline:
        broken.append(f"p99 of the accepted is {1000 * p99:.0f} ms, above the deadline.")
    if back is None:
        broken.append(f"{BACK_SECONDS:g} s after the load, answers took more than twice what they took before.")
    return broken + grown([size for _, size in memory])


async def soak(server: Process, images: Sequence[bytes], options: argparse.Namespace) -> list[str]:
    """Measure and print; return what was broken."""
    stream = io.BytesIO()
    decode(images[0]).resize((32, 32)).save(stream, "JPEG")
    tiny, bad = post(stream.getvalue()), post(stream.getvalue()[:100])
    health = b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"
    patience = options.deadline_ms / 1000 + PATIENCE
    statuses: Counter[int] = Counter()
    memory = [resident(server)]
    print("\n| requests | requests/s | memory, MB |\n|---|---|---|")
    print(f"| 0 | | {memory[0] / 1e6:.1f} |", flush=True)
    kinds = itertools.cycle([health, *[tiny] * 9, bad, *[tiny] * 9])
    asked: Counter[bytes] = Counter()
    size = -(-options.requests // 20)
    for _ in range(20):
        requests = list(itertools.islice(kinds, size))
        asked.update(requests)
        begun = time.monotonic()
        answers = await closed_loop(server.port, iter(requests), clients=CLIENTS, patience=patience)
        rate = size / (time.monotonic() - begun)
        statuses.update(answer.status for answer in answers)
        memory.append(resident(server))
        print(f"| {asked.total()} | {rate:.0f} | {memory[-1] / 1e6:.1f} |", flush=True)
    print("\nanswers: " + ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items())))
    broken = unlike(statuses, expected=(200, 400, 503))
    if statuses[400] > asked[bad] or statuses[200] > asked.total() - asked[bad]:
        broken.append(f"200 and 400 are not as {asked[bad]} broken images of {asked.total()} requests would have it.")
    if statuses[503] > asked.total() / 1000:
        broken.append(f"{statuses[503]} of {asked.total()} were refused, with {CLIENTS} clients.")
    return broken + grown(memory)


def grown(memory: Sequence[float]) -> list[str]:
    """Say how much memory grew in the second half; return a sentence if that is too much."""
    growth = memory[-1] - memory[(len(memory) - 1) // 2]
    print(f"\nmemory grew by {growth / 1e6:.1f} MB in the second half")
    return [f"memory grew by {growth / 1e6:.1f} MB in the second half."] if growth > GROWTH else []


def reduced(data: bytes, *, size: int) -> bytes:
    """Return a JPEG of a smaller picture, of about `size` bytes, where this one is much larger."""
    while len(data) > 1.3 * size:
        image = decode(data)
        share = max(0.5, (size / len(data)) ** 0.5)
        stream = io.BytesIO()
        image.resize((int(image.width * share), int(image.height * share))).save(stream, "JPEG")
        data = stream.getvalue()
    return data


@contextlib.contextmanager
def served(source: Path, *, deadline_ms: float, image: bytes) -> Iterator[Process]:
    """Start a server, and wait until it answers."""
    with tempfile.TemporaryDirectory() as place:
        port = free_port()
        command = [sys.executable, "-m", "dsimg", "serve", "--source", str(source.resolve()), "--port", str(port)]
        server = Process("dsimg", [*command, "--deadline_ms", str(deadline_ms)], port, cwd=Path(place))
        try:
            server.wait(image)
            yield server
        finally:
            with contextlib.suppress(OSError):
                server.send(signal.SIGKILL)
            server.process.wait()


def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("overload", "soak", "both"), default="both")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="a folder of photographs")
    parser.add_argument("--bytes", type=int, default=100_000, help="of each JPEG of overload")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--times", type=float, default=5.0, help="the capacity that are sent")
    parser.add_argument("--deadline_ms", type=float, default=500.0)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of soak")
    options = parser.parse_args()
    if options.bytes < 2000:  # much of it is a JPEG's head
        parser.error(f"--bytes is {options.bytes}; give at least 2000")
    images = [reduced(data, size=options.bytes) for data in jpegs(options.images, count=64, size=options.bytes)]
    broken: list[str] = []
    for name in ("overload", "soak") if options.what == "both" else [options.what]:
        measure = overload if name == "overload" else soak
        print(f"\n## {name}: {len(images)} JPEGs of {statistics.median(map(len, images)) / 1000:.0f} kB", flush=True)
        with served(options.source, deadline_ms=options.deadline_ms, image=images[0]) as server:
            try:
                broken += [f"{name}: {sentence}" for sentence in uvloop.run(measure(server, images, options))]
            except OSError as error:
                broken.append(f"{name}: a client cannot connect: {error}.")
    if broken:
        raise SystemExit("\n".join(["", *broken]))


if __name__ == "__main__":
    main()
