"""What a request is refused with: a status and a sentence, or a time to come again."""


class HttpError(Exception):
    """A request that cannot be answered: `status` is HTTP's, the message goes into {"error": ...}.

    kind: what the metrics count it as. close: whether the connection is of no further use, its body being unread.
    """

    def __init__(
        self, status: int, message: str, *, kind: str, retry_after: float | None = None, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.close = status, kind, retry_after, close


class RefusedError(HttpError):
    """There is no room or not time enough now. `retry_after`: the seconds after which there may be."""

    def __init__(self, message: str, *, kind: str, retry_after: float) -> None:
        super().__init__(503, message, kind=kind, retry_after=retry_after)
