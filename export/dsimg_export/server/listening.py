"""From a socket that listens to the last answer: uvicorn, which says when it is ready, drains, and counts what it cut
off."""

import asyncio
import errno
import gc
import math
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from dsimg import cli
from dsimg.errors import ConfigError
from dsimg_export.server.state import Server

BACKLOG = 2048  # connections that wait to be accepted


class Answering(uvicorn.Server):
    """uvicorn, which at a signal first says that it is not ready, then takes nothing more, then ends.

    cut_off: requests that were accepted and not answered, after the end.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    cut_off = 0

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        server: Server,
        drain: float,
        url: str,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        super().__init__(config)
        self._server, self._drain, self._url, self._beside = server, drain, url, beside
        self._end_asked = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at the first signal; at a second one of Ctrl-C, end at once."""
        loop = self._loop
        if loop is None:  # nobody has been let in yet
            self.should_exit = True
        elif self._server.draining:
            self.force_exit = self.force_exit or sig == signal.SIGINT
            loop.call_soon_threadsafe(self._end)
        else:
            self._server.draining = True
            # In the main thread, between two of the loop's steps.
            loop.call_soon_threadsafe(lambda: loop.call_later(self._drain, self._end))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._over = asyncio.Event()
        if self.should_exit:
            return
        self._loop = asyncio.get_running_loop()
        # What is there now stays: without this each full collection looks at all of it, and a request waits meanwhile.
        gc.collect()
        gc.freeze()
        self._server.loaded = True
        self._background = [asyncio.create_task(work()) for work in self._beside]
        cli.context().terminal.say(f"ready: {self._url}")

    async def main_loop(self) -> None:
        """Wait for the end, where uvicorn looks for it ten times a second."""
        await self._over.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, and count what was cut off: requests in hand, those that wait behind them, and answers unsent."""
        await super().shutdown(sockets)
        connections: list[Any] = list(self.server_state.connections)
        unsent = [one for one in connections if one.cycle is None or one.cycle.response_complete]
        unsent = [one for one in unsent if one.transport.get_write_buffer_size()]
        self.cut_off = len(self.server_state.tasks) + sum(len(one.pipeline) for one in connections) + len(unsent)

    @property
    def grace_left(self) -> float:
        """Seconds, from now on; below 0 where it is over."""
        grace = self.config.timeout_graceful_shutdown or 0
        return -1.0 if self.force_exit else grace + self._end_asked - time.monotonic()

    def _end(self) -> None:
        self._end_asked = min(self._end_asked, time.monotonic())
        self.should_exit = True
        self._over.set()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens: an address that is taken is known before a model is loaded. Raises ConfigError.

    Who connects before the server is ready waits.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # What is accepted inherits it. Head and body of an answer are two writes, and the second would wait 40 ms for the
    # client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        remedy = "Give another --port, or 0 for a free one."
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = "Give an address of this machine as --host."
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}. {remedy}") from error
    return listener


def check_certificate(certificate: Path | None, key: Path | None) -> None:
    """Raise ConfigError where HTTPS cannot be served with this certificate: before anything is loaded."""
    if certificate is None or key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cannot serve HTTPS with --ssl_certfile {certificate} and --ssl_keyfile {key}: {error.strerror or error}. "
            "Give a certificate and its key, in PEM, without a passphrase."
        ) from error
