"""A connection: uvicorn's HTTP protocol, with bounds on what a client may make it hold and on the time it may take."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dsimg_export.server.app import unrouted
from dsimg_export.server.errors import HttpError
from dsimg_export.server.state import Server

HEAD_BYTES = 2**16  # of the request's line and its headers together
PIPELINED = 16  # requests that may wait for the answer to the one before
REST_SECONDS = 2.0  # for the rest of a body whose request was answered before it was there
CLOSE_SECONDS = 2.0  # for a client's own end of TLS: the event loop waits 30 s for it, and an idle client never reads
WRITE_SECONDS = 10.0  # without a client taking anything of its answer


def bounded_protocol(server: Server, *, head_seconds: float, connections: int) -> type[HttpToolsProtocol]:
    """Return the class of a server's connections, of which there may be so many at a time.

    uvicorn itself bounds neither a head's size nor its time, nor how many requests wait, nor how long an answer may be
    left unread.
    """

    class Bounded(HttpToolsProtocol):
        _head: asyncio.TimerHandle | None = None  # runs until the next request's head is there
        _rest: asyncio.TimerHandle | None = None
        _write: asyncio.TimerHandle | None = None
        _closing: asyncio.TimerHandle | None = None
        _running: Any = None  # the cycle whose answer is due next
        _reason: HttpError | None = None  # why parsing was broken off
        _parsed = False  # whether the parser has found something in what came last
        _unparsed = 0  # bytes in which it has found nothing yet
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=1, low=0)  # writing is paused as long as anything is unsent
            self._wait()
            if len(self.connections) > connections:
                self._refuse(HttpError(503, "too many connections now", kind="connections", retry_after=1.0))

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._rest, self._write, self._closing):
                if timer is not None:
                    timer.cancel()
            if self._running is not None and not self._running.response_complete:
                self._running.disconnected = True
                self._running.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            self._parsed = False
            super().data_received(data)
            if self.transport.is_closing():
                return
            self._unparsed = 0 if self._parsed else self._unparsed + len(data)
            if self._unparsed > HEAD_BYTES:
                self._refuse(_too_large())
            idle = self.cycle is None or self.cycle.response_complete
            if idle and not (self._head or self._rest or self.timeout_keep_alive_task):
                self._wait()  # an empty line: uvicorn has stopped its clock

        # What the parser finds

        def on_message_begin(self) -> None:
            self._parsed, self._head_bytes = True, 0
            if self._head is None:
                self._wait()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None
            super().on_headers_complete()
            if len(self.pipeline) > PIPELINED:
                self._break_off(HttpError(429, "too many requests without waiting for an answer", kind="limit"))

        def on_body(self, body: bytes) -> None:
            self._parsed = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._parsed = True
            if self._rest is not None:
                self._rest.cancel()
                self._rest = None
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            super().on_message_complete()

        # The answers

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def on_response_complete(self) -> None:
            answered = self._running
            super().on_response_complete()
            if self.transport.is_closing():
                self._close()
            elif answered.more_body:
                self._rest = self.loop.call_later(REST_SECONDS, self._close)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_writing()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write is not None:
                self._write.cancel()
                self._write = None

        def send_400_response(self, msg: str) -> None:
            self._refuse(self._reason or HttpError(400, "this is not HTTP, or is damaged", kind="request"))

        # Ends

        def shutdown(self) -> None:
            super().shutdown()
            if self.transport.is_closing():
                self._close()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            if self.transport.is_closing():
                self._close()

        def _close(self) -> None:
            """Close, and cut off who does not take leave once everything is sent."""
            self.transport.close()
            if self._closing is None:
                self._closing = self.loop.call_later(CLOSE_SECONDS, self._cut_off)

        def _cut_off(self) -> None:
            if self.transport.get_write_buffer_size():  # an answer is still being taken
                self._closing = self.loop.call_later(CLOSE_SECONDS, self._cut_off)
            else:
                self.transport.abort()

        def _wait(self) -> None:
            self._head = self.loop.call_later(head_seconds, self._give_up)

        def _give_up(self) -> None:
            self._head = None
            if not self.transport.is_closing():
                self._close()

        def _watch_writing(self) -> None:
            left = self.transport.get_write_buffer_size()
            self._write = self.loop.call_later(WRITE_SECONDS, self._end_unless_less_than, left)

        def _end_unless_less_than(self, left: int) -> None:
            if self.transport.get_write_buffer_size() < left:
                self._watch_writing()
            else:
                self.transport.abort()

        def _count(self, size: int) -> None:
            self._parsed = True
            self._head_bytes += size
            if self._head_bytes > HEAD_BYTES:
                self._break_off(_too_large())

        def _break_off(self, reason: HttpError) -> None:
            """End the parser's run, from one of its callbacks; `send_400_response` is called then."""
            self._reason = reason
            raise reason

        def _refuse(self, error: HttpError) -> None:
            """Answer what is no request for the application, unless an answer to another one is due; and close."""
            if self._running is None or self._running.response_complete:
                response = unrouted(server, error, client=self.client)
                head = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
                self.transport.write(b"".join((STATUS_LINE[error.status], *head, b"\r\n", bytes(response.body))))
            self._close()

    return Bounded


def _too_large() -> HttpError:
    return HttpError(431, f"the head is larger than {HEAD_BYTES} bytes", kind="limit")
