"""Ranks that die or hang: each rank's thread says where it is and looks after the others.

A dead or stopped rank leaves the others in a collective, gloo's or NCCL's, that ends in half an hour or never. So each
rank has two threads beside the main one. One talks: every second it writes the rank's beat into the store the ranks met
in, over a connection of its own, and reads the others'. The other judges what was read, and goes on when the store
itself (in rank 0's process, unless torchrun has it) no longer answers. Rank 0 reads every beat and publishes what it
finds; the others read rank 0's beat and its finding, so that the load grows with the number of ranks, not its square.
Silence is measured on the reader's own monotonic clock: clocks of two machines are never compared.
"""

import atexit
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

PERIOD = 1.0  # seconds between two beats

# What the main thread does, in words for `RankWatch.at`. Standing still is a hang only in the first two: how long a
# start, a save or an end takes depends on disks and sizes.
TRAINING = "training"
EVALUATING = "evaluating"
STARTING = "starting"

# In beats. A collective that failed is evidence by itself, so a shorter silence is enough then.
SILENCE_AFTER_FAILURE = 4
EXPLAIN = 8
PUBLISH = 3  # one until it is written, two until the others have read it
ASLEEP = 3  # a thread that slept longer was stopped itself

REMEDY = "The checkpoints are untouched: the same command goes on from the last one."

_opened = itertools.count()


def open_store() -> Store:
    """Return a connection of one's own to the store of the default process group, empty of earlier watches' keys.

    The group's own connection is locked as long as the main thread waits in it. All ranks open equally often.
    """
    store = _get_default_store().clone()
    return PrefixStore(f"dsimg_watch/{next(_opened)}", store)


@dataclass
class _Peer:
    """What a rank last said, and when (seconds, this process's monotonic clock) it last beat and last moved."""

    said: dict[str, Any]
    raw: bytes
    beat_at: float
    moved_at: float

    @property
    def place(self) -> tuple[int, int]:
        return self.said["step"], self.said["turn"]


class RankWatch:
    """Find the ranks of this run that have died or hang, and say so once.

    `on_loss(sentence)` is called from a thread, while the main thread may be in a collective that never ends: it is to
    print the sentence and end the process. `timeout` (seconds) is how long a rank may be silent, or stand still in a
    step or an evaluation; a process that has ended on this machine is found within a beat or two.
    """

    def __init__(self, *, rank: int, size: int, store: Store, timeout: float, on_loss: Callable[[str], None]) -> None:
        self._rank = rank
        self._store = store
        self._timeout = timeout
        self._on_loss = on_loss
        self._now = (0, 0, STARTING)  # step, calls of `at` in this step, what is done
        self._identity = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _process_start(os.getpid()),
            "machine": _machine(),
        }
        self._replied = begun = time.monotonic()
        unknown = {"step": 0, "turn": 0, "doing": STARTING, "left": False, "failed": False, "machine": ""}
        self._peers = {peer: _Peer(unknown, b"", begun, begun) for peer in (range(size) if rank == 0 else [0])}
        self._verdict = ""
        self._severed_at: float | None = None  # when the store was found to be gone
        self._lock = threading.Lock()
        self._explaining = False
        self._leaving = False
        self._ending = threading.Event()
        self._found = threading.Event()
        self._published = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._judge)]
        for thread in self._threads:
            thread.start()
        # A daemon thread that wakes inside torch while the interpreter shuts down aborts the process.
        atexit.register(self._halt)

    def at(self, step: int, doing: str) -> None:
        """Note where the main thread is. Called at each micro-batch and each batch of an evaluation: no I/O."""
        last = self._now
        self._now = (step, last[1] + 1 if last[0] == step else 1, doing)

    def explain(self) -> str | None:
        """Return the sentence that says which rank a collective failed for, or None when none is lost.

        Waits up to about eight seconds for it. From the call on, `on_loss` is left to the caller.
        """
        with self._lock:
            self._explaining = True
        if not self._found.wait(EXPLAIN * PERIOD):
            return None
        self._published.wait()
        return self._verdict

    def close(self) -> None:
        """Say that this rank leaves on purpose, and end the threads. Nobody misses it from here on."""
        self._leaving = True
        self._halt()
        atexit.unregister(self._halt)

    def _halt(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * PUBLISH * PERIOD)  # the store may be stuck

    def _talk(self) -> None:
        try:
            for beat in itertools.count():
                self._say(beat)
                self._listen()
                if self._ending.wait(PERIOD):
                    break
            if self._leaving:
                self._say(-1)
                # The store may go with rank 0: not before the others have read that it left, or have left too.
                until = time.monotonic() + PUBLISH * PERIOD
                while not all(peer.said["left"] for peer in self._peers.values()) and time.monotonic() < until:
                    if self._rank != 0:
                        break
                    time.sleep(PERIOD / 50)
                    self._listen()
        except RuntimeError:  # c10d's errors: the connection is closed or refused
            self._severed_at = time.monotonic()

    def _say(self, beat: int) -> None:
        """Write this rank's beat, and rank 0's finding."""
        step, turn, doing = self._now
        frame = sys._current_frames()[threading.main_thread().ident or 0].f_code
        code = f"{frame.co_name} ({Path(frame.co_filename).name})"
        where = {"step": step, "turn": turn, "doing": doing, "code": code, "beat": beat}
        said = {**self._identity, **where, "left": self._leaving, "failed": self._explaining}
        self._store.set(str(self._rank), json.dumps(said))
        if self._rank == 0 and self._verdict:
            self._store.set("verdict", self._verdict)

    def _listen(self) -> None:
        """Read the beats this rank judges, and what rank 0 has found. Only keys that exist: others would block."""
        known = [rank for rank, peer in self._peers.items() if peer.raw or self._store.check([str(rank)])]
        beats = self._store.multi_get([str(rank) for rank in known]) if known else []
        now = time.monotonic()
        for rank, raw in zip(known, beats, strict=True):
            peer = self._peers[rank]
            if raw != peer.raw:
                new = _Peer(json.loads(raw), raw, now, now)
                if new.place == peer.place and new.said["doing"] == peer.said["doing"]:
                    new.moved_at = peer.moved_at
                self._peers[rank] = new
        self._replied = now
        if self._rank != 0 and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(PERIOD):
            now = time.monotonic()
            if now - last > ASLEEP * PERIOD:
                # This process was stopped, not the others: what it knows of them is from before.
                for peer in self._peers.values():
                    peer.beat_at = peer.moved_at = now
                self._replied = now
            last = now
            finding = self._verdict or self._finding(now)
            if finding:
                self._report(finding)
                return

    def _report(self, finding: str) -> None:
        self._verdict = finding
        self._found.set()
        if self._rank == 0:
            self._ending.wait(PUBLISH * PERIOD)  # its exit takes the store away
        self._published.set()
        with self._lock:
            told = self._explaining or self._ending.is_set()
        if not told:
            self._on_loss(finding)

    def _finding(self, now: float) -> str | None:
        peers = dict(self._peers)
        hurried = self._explaining or any(peer.said["failed"] for peer in peers.values())
        limit = min(self._timeout, SILENCE_AFTER_FAILURE * PERIOD) if hurried else self._timeout
        others = {rank: peer for rank, peer in peers.items() if rank != self._rank and not peer.said["left"]}
        ended = {rank: peer for rank, peer in others.items() if self._has_ended(peer)}
        if ended:
            step = self._last_step(ended)
            it_was = "it was" if len(ended) == 1 else "they were"
            return f"{_names(ended)} ended; {it_was} last heard of at step {step}. {REMEDY}"
        if self._severed_at is not None and (others or self._rank == 0):
            if now - self._severed_at < 2 * PERIOD:  # a process that is killed closes its sockets before it is gone
                return None
            step = self._last_step({0: peers[0]})
            return f"the store of the ranks is gone: rank 0 or the launcher has ended, after step {step}. {REMEDY}"
        # A store that answers late makes rank 0 read late; to the others, rank 0 is what does not answer.
        seen = self._replied if self._rank == 0 else now
        silent = {rank: peer for rank, peer in others.items() if seen - peer.beat_at > limit}
        if silent:
            step = self._last_step(silent)
            seconds = seen - max(peer.beat_at for peer in silent.values())
            return (
                f"{_names(silent)} not been heard of for {seconds:.0f} s (stopped, or its machine is gone); "
                f"last at step {step}. {REMEDY}"
            )
        return self._hang(peers) if self._rank == 0 else None

    def _last_step(self, peers: dict[int, _Peer]) -> int:
        """Return the last step that lost ranks took part in. Ranks step together, and a beat may be a second old."""
        step: int = max(self._now[0] - 1, *(peer.said["step"] for peer in peers.values()))
        return step

    def _has_ended(self, peer: _Peer) -> bool:
        said = peer.said
        if said["machine"] == "" or said["machine"] != self._identity["machine"]:
            return False
        started: str | None = said["started"]
        return _process_start(said["pid"]) != started

    def _hang(self, peers: dict[int, _Peer]) -> str | None:
        """Name the ranks that are furthest behind, when all have stood still for `timeout`: others wait for them."""
        left = {rank: peer for rank, peer in peers.items() if peer.said["left"]}
        present = {rank: peer for rank, peer in peers.items() if rank not in left}
        place = min((peer.place for peer in present.values()), default=(0, 0))
        behind = {rank: peer for rank, peer in present.items() if peer.place == place}
        # Of all, not of those behind only: a rank that a long save kept waiting has stood still for a good reason.
        still = self._replied - max((peer.moved_at for peer in present.values()), default=self._replied)
        working = all(peer.said["doing"] in (TRAINING, EVALUATING) for peer in present.values())
        # One that is silent as well may be stopped rather than hang: that is judged by its silence.
        heard = all(self._replied - peer.beat_at <= ASLEEP * PERIOD for peer in present.values())
        if still <= self._timeout or not working or not heard:
            return None
        step, doing = place[0], min(peer.said["doing"] for peer in behind.values())
        them = "it" if len(left or behind) == 1 else "them"
        if left:
            return f"{_names(left)} left, and the other ranks wait for {them} at step {step} ({doing}). {REMEDY}"
        if len(behind) == len(peers):
            return f"all ranks stand still at step {step} ({doing}), for {still:.0f} s now: {_codes(behind)}. {REMEDY}"
        stands = f"not moved for {still:.0f} s in step {step} ({doing})"
        return f"{_names(behind)} {stands}; the other ranks wait for {them}. {REMEDY}"


def _names(peers: dict[int, _Peer]) -> str:
    """Return "rank 1 (host, pid 5) has" or "rank 1 (…), rank 2 (…) have"."""
    ranks: Iterable[str] = (
        f"rank {rank} ({peer.said['host']}, pid {peer.said['pid']})" if peer.raw else f"rank {rank}"
        for rank, peer in peers.items()
    )
    return f"{', '.join(ranks)} {'have' if len(peers) > 1 else 'has'}"


def _codes(peers: dict[int, _Peer]) -> str:
    """Return which Python function the ranks' main threads are in: where most wait is not where one hangs."""
    ranks: dict[str, list[str]] = {}
    for rank, peer in peers.items():
        ranks.setdefault(peer.said["code"], []).append(str(rank))
    return "; ".join(
        f"{len(where)} of them in {code}" if len(where) > 4 else f"rank {', '.join(where)} in {code}"
        for code, where in ranks.items()
    )


def _process_start(pid: int) -> str | None:
    """Return when a process of this machine started (clock ticks since boot), or None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # after the name, which may hold anything
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _machine() -> str:
    """Return what two processes share when one sees the other in /proc, "" where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
