"""What a client may ask of a server: how large its body may be, how long it may take, and with which key."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterator, Sequence

from starlette.requests import ClientDisconnect, Request

from dsimg.console import bytes_text
from dsimg_export.server.errors import HttpError


class Room:
    """The bytes that the bodies of all requests in hand may take together."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Give a request a function that takes so many bytes, or raises HttpError; at its end all come back."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.used + size > self.size:
                raise HttpError(503, "no room for the body now", kind="memory", retry_after=1.0, close=True)
            self.used += size
            mine += size

        try:
            yield take
        finally:
            self.used -= mine


async def read_body(
    request: Request, *, limit: int, seconds: float, take: Callable[[int], None] = lambda size: None
) -> bytes:
    """Return the body, whose bytes `take` is told as they come.

    Raises HttpError: 413 above `limit` bytes, 408 after so many seconds, 400 where it ends, and what `take` raises.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                take(len(part))
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {seconds:g} s.", kind="slow", close=True) from None
    except ClientDisconnect:
        raise HttpError(400, "the client is gone.", kind="gone", close=True) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def check_key(request: Request, keys: Sequence[bytes]) -> None:
    """Raise HttpError unless the request carries one of `keys`, as a bearer token or in X-API-Key. No keys: all may."""
    if not keys:
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = (token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).encode("latin-1")
    # All are compared, in a time that does not tell which came near.
    if not sum([hmac.compare_digest(given, key) for key in keys]):
        raise HttpError(
            401, "this server wants a key: Authorization: Bearer KEY, or X-API-Key: KEY.", kind="key", close=True
        )


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {bytes_text(limit)}.", kind="limit", close=True)
