"""What the end of a publish means: what nsqd may have stored, and what may be tried again. Pure.

The one home of these rules, for all that publish. nsqd reads and checks a publish whole before it
stores the first message, so an error about its form, its size or a permission means that nothing is
stored. It stores the messages of an MPUB one after the other, and when its disk fails it answers
E_MPUB_FAILED with the first of them stored (`PutMessages` in nsqd/topic.go): what is there is
unknown, and sending the batch once more stores these once more, again and again while the disk has
room for a few. A single message that it could not store is not there, so they go one by one. A code
that is not listed here promises nothing.

Trap: what an attempt may have stored stays so. A later attempt that certainly stored nothing says
nothing about the earlier one, so its error must pass through `as_unknown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nsqtools.errors import (
    NsqError,
    PublishError,
    PublishNotSent,
    PublishRefused,
    PublishRejected,
    PublishUnknown,
    RefusedError,
    ServerError,
)
from nsqtools.protocol.frames import REFUSING_CODES
from nsqtools.protocol.text import counted

# One message, or the whole, is too large for this nsqd: the other messages may be taken.
_TOO_LARGE = frozenset({"E_BAD_MESSAGE", "E_BAD_BODY"})
_CHECKED_FIRST = _TOO_LARGE | REFUSING_CODES | {"E_INVALID", "E_BAD_TOPIC", "E_AUTH_DISABLED"}
_STORING_FAILED = frozenset({"E_PUB_FAILED", "E_DPUB_FAILED", "E_MPUB_FAILED"})
_AUTH_FAILED = "E_AUTH_FAILED"  # a bad secret, or nsqd does not reach its auth server


def stored_nothing(error: ServerError, count: int) -> bool:
    """Tell whether nsqd certainly stored none of ``count`` messages of a publish it refused so.

    It says "exiting" before it stores the first: while it stops, and while the topic is deleted.
    """
    if error.code in _STORING_FAILED:
        return count == 1 or "exiting" in error.text
    return error.code in _CHECKED_FIRST


def may_split(error: PublishError | None) -> bool:
    """Tell whether some of the messages may be to blame, and the others be taken without them."""
    return isinstance(error, PublishRejected) and error.cause.code in _TOO_LARGE


def is_stored_in_part(error: PublishError) -> bool:
    """Tell whether nsqd stored some of a batch: what is sent once more goes one by one."""
    cause = error.__cause__ if isinstance(error, PublishUnknown) else None
    return isinstance(cause, ServerError) and cause.code in _STORING_FAILED


def is_server_unavailable(error: ServerError) -> bool:
    """Tell whether nsqd takes nothing now, whatever it is sent, and may later.

    It stops, or its disk is full, or it does not reach its auth server.
    """
    return error.code in _STORING_FAILED or error.code == _AUTH_FAILED


def may_try_again(error: PublishError, *, retry_unknown: bool) -> bool:
    """Tell whether the same publish may be taken later, and may be sent once more."""
    if isinstance(error, PublishUnknown):
        return retry_unknown
    if isinstance(error, PublishRejected):
        return is_server_unavailable(error.cause)
    return isinstance(error, PublishNotSent)


def is_transient(cause: NsqError | None, *, was_accepted: bool) -> bool:
    """Tell whether it is worth to wait for an nsqd, after this failure to connect.

    One that has accepted the secret before, and does not any more, may lack its auth server.
    """
    is_auth = isinstance(cause, ServerError) and cause.code == _AUTH_FAILED
    return not isinstance(cause, RefusedError) or (is_auth and was_accepted)


# -- errors ---------------------------------------------------------------------------------------


def not_sent(cause: NsqError | None) -> PublishError:
    """The error of a publish that never reached nsqd."""
    kind = PublishRefused if isinstance(cause, RefusedError) else PublishNotSent
    error = kind(f"not published: {cause}", hint=cause.hint if cause else "")
    if cause is not None:
        error.category = cause.category
        error.__cause__ = cause
    return error


def rejected(cause: ServerError, count: int) -> PublishError:
    """The error of a publish of ``count`` messages that nsqd answered with an error."""
    if not stored_nothing(cause, count):
        return unknown(cause)
    return PublishRejected(f"not published: {cause}", cause=cause, hint=cause.hint)


def unknown(cause: NsqError, before: str = "") -> PublishUnknown:
    """The error of a publish that nsqd may have stored."""
    error = PublishUnknown(f"not confirmed: {before}{cause}", hint=_UNKNOWN_HINT)
    error.__cause__ = cause
    return error


def as_unknown(error: PublishError) -> PublishUnknown:
    """The error of a publish that an earlier attempt may have stored, from that of the last."""
    if isinstance(error, PublishUnknown):
        return error
    return unknown(error, "an earlier attempt may have been stored; the last: ")


def combined_error(
    counts: Sequence[int], errors: Sequence[PublishError | None]
) -> PublishError | None:
    """The error of messages that were published in parts: with the outcome of each message.

    Its class is that of all parts, or the one that is true of all: `PublishNotSent` where nothing
    is stored, else `PublishUnknown`.
    """
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return None
    outcomes = [error for count, error in zip(counts, errors, strict=True) for _ in range(count)]
    kinds = set(map(type, outcomes))
    error = first
    if len(kinds) > 1:
        may_be_stored = not kinds.isdisjoint({type(None), PublishUnknown})
        number = Counter(_WORDS.get(type(outcome), "not sent") for outcome in outcomes)
        words = (*_WORDS.values(), "not sent")
        numbers = ", ".join(f"{number[each]} {each}" for each in words if number[each])
        kind = PublishUnknown if may_be_stored else PublishNotSent
        error = kind(f"of {counted(len(outcomes), 'message')} {numbers}: {first}", hint=_PARTS_HINT)
        error.__cause__ = first
    error.outcomes = outcomes
    return error


_WORDS = {type(None): "confirmed", PublishRejected: "rejected", PublishUnknown: "unknown"}
_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
_PARTS_HINT = "The outcomes of this error say what became of each message."
