"""A server under test: uvicorn in a thread of this process, and one connection's worth of client."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from dsimg_export.serve import ServeConfig, http_options, open_server
from dsimg_export.server.app import build_app
from dsimg_export.server.state import Server


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Answer:
    """What a server said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
    """Ask over a connection of its own; underscores in the names of headers are hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, given)
        found = connection.getresponse()
        return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
    finally:
        connection.close()


@dataclass
class Live:
    """A running server."""

    server: Server
    port: int
    connections: set[Any]

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Ask as `ask` does."""
        return ask(self.port, method, path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: bytes, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)


@contextlib.contextmanager
def serving(*runs: Path, keys: tuple[bytes, ...] = (), **flags: Any) -> Iterator[Live]:
    """Serve runs with these flags of `dsimg serve`."""
    config = ServeConfig(source=runs, port=0, **flags)
    server = open_server(config, keys=keys)
    server.loaded = True
    answering = uvicorn.Server(uvicorn.Config(build_app(server), port=0, **http_options(config, server)))
    thread = threading.Thread(target=answering.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not answering.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        port = answering.servers[0].sockets[0].getsockname()[1]
        yield Live(server, port, answering.server_state.connections)
    finally:
        answering.should_exit = True
        thread.join(10)
        server.pool.close()
