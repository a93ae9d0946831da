"""The errors of this package.

    NsqError                     category "failed"
    ├── ConfigurationError       "usage"      a bad option, name or address (also ValueError)
    ├── NotFoundError            "not_found"  the topic, channel or node does not exist
    ├── ConnectionFailed         "connect"    no connection, or it broke
    │   ├── ConnectionLost                    an established connection ended
    │   └── DeadlineExceeded                  no answer in time (also TimeoutError)
    ├── RefusedError             "refused"    the peer denies access
    │   └── TLSError                          TLS was requested and failed
    ├── ProtocolError                         the peer does not speak NSQ as specified
    ├── ServerError                           nsqd answered with an E_* error frame
    │   └── ServerRefused        "refused"    E_AUTH_*, E_UNAUTHORIZED, or TLS is required
    ├── HTTPError                             an HTTP API answered with an error status
    ├── PublishError                          a publish did not end as published
    │   ├── PublishInvalid       "usage"      nsqd would refuse it (also ConfigurationError)
    │   ├── PublishRejected                   nsqd refused it; a retry would be refused again
    │   ├── PublishRefused       "refused"    nsqd does not accept this client; nothing was sent
    │   ├── PublishNotSent       "connect"    nsqd certainly does not have it; safe to retry
    │   └── PublishUnknown       "connect"    nsqd may have it, or some of it; a retry may double it
    └── OutputError                           a file or stream could not be written

Each class has a *category*, which determines the exit status of the command line. The message of an
error contains the address or path. An error may have a *hint*, one sentence about a remedy.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would double the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "ConfigurationError",
    "ConnectionFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "HTTPError",
    "NotFoundError",
    "NsqError",
    "OutputError",
    "ProtocolError",
    "PublishError",
    "PublishInvalid",
    "PublishNotSent",
    "PublishRefused",
    "PublishRejected",
    "PublishUnknown",
    "RefusedError",
    "ServerError",
    "ServerRefused",
    "TLSError",
]


class NsqError(Exception):
    """Base of all errors of this package.

    ``hint`` is one sentence for the user, or ``""``.
    """

    category = "failed"

    def __init__(self, message: str, *, hint: str = "") -> None:
        # The name of a file may not be UTF-8, and Spark would never end after such a message.
        message, hint = (s.encode("utf-8", "backslashreplace").decode() for s in (message, hint))
        super().__init__(message)
        self.hint = hint
        if hint:
            # Tracebacks show notes, including those of Spark workers.
            self.add_note(f"hint: {hint}")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling in another process would call `__init__` with `args`, which are not
        # its parameters.
        return type(self).__new__, (type(self),), {**vars(self), "args": self.args}


class ConfigurationError(NsqError, ValueError):
    """An option, name or address is not acceptable; nothing has been sent."""

    category = "usage"


class NotFoundError(NsqError):
    """The topic, channel or node does not exist."""

    category = "not_found"


class ConnectionFailed(NsqError):
    """A connection could not be made, or was lost."""

    category = "connect"


class ConnectionLost(ConnectionFailed):
    """An established connection ended: closed by the peer, reset, or without a heartbeat."""


class DeadlineExceeded(ConnectionFailed, TimeoutError):
    """The peer did not answer in time."""


class RefusedError(NsqError):
    """The peer or the security settings of this client do not allow the connection."""

    category = "refused"


class TLSError(RefusedError):
    """TLS was requested but is not offered, or the handshake or verification failed."""


class ProtocolError(NsqError):
    """The peer sent bytes that the NSQ protocol does not allow."""


class ServerError(NsqError):
    """An ``E_*`` error frame from nsqd.

    ``code`` is the first word (``"E_BAD_TOPIC"``), and ``text`` the remaining text. ``fatal`` is
    True if nsqd closes the connection after it.
    """

    def __init__(
        self, code: str, text: str, *, fatal: bool, where: str = "", hint: str = ""
    ) -> None:
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{code} {text}".rstrip(), hint=hint)
        self.code = code
        self.text = text
        self.fatal = fatal


class ServerRefused(ServerError, RefusedError):
    """nsqd refused the secret, a command that the secret does not allow, or missing TLS."""


class HTTPError(NsqError):
    """An HTTP API answered with an error.

    ``status`` is the HTTP status, and ``code`` NSQ's name of the error (``"TOPIC_NOT_FOUND"``).
    """

    def __init__(self, message: str, *, status: int, code: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        if status in (401, 403):
            self.category = "refused"
        elif status == 404:
            self.category = "not_found"


class PublishError(NsqError):
    """A publish was not confirmed. The subclass shows the state of its messages.

    ``outcomes`` of an error from `Producer.publish_many` has an entry for each message, in their
    order: None if nsqd has confirmed it, else its error.
    """

    outcomes: Sequence[PublishError | None] = ()


class PublishInvalid(PublishError, ConfigurationError):
    """nsqd would refuse the topic, the delay or a body; nothing was sent."""


class PublishRejected(PublishError):
    """nsqd answered the publish with an error; ``cause`` is the `ServerError`."""

    def __init__(self, message: str, *, cause: ServerError, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.cause = cause
        self.category = cause.category


class PublishRefused(PublishError):
    """nsqd does not accept this client (TLS, secret, permission), so nothing was sent.

    It is refused again until the options or nsqd's settings change.
    """

    category = "refused"


class PublishNotSent(PublishError):
    """nsqd certainly does not have the messages. Publishing them again causes no duplicates."""

    category = "connect"


class PublishUnknown(PublishError):
    """nsqd may have all, some or none of the messages. Publishing them again may duplicate them.

    The connection ended before the answer, nsqd's disk failed while it stored them, or they were
    published in parts of which only some are confirmed (see `outcomes`).
    """

    category = "connect"


class OutputError(NsqError):
    """Writing to a file or stream failed; the message names the path."""


def is_limit(error: BaseException) -> bool:
    """Return whether memory or threads ran out, for which Python has no common type."""
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)
