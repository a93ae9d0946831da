"""Classify the end of a publish: may nsqd have stored it, and may it be retried? Pure.

All publishing code uses these rules. nsqd reads and checks a whole publish before it stores the
first message, so an error about form, size or permission means that nothing is stored. It stores
the messages of an MPUB one by one, and if its disk fails, it answers E_MPUB_FAILED with the first
of them stored (`PutMessages` in nsqd/topic.go). The outcome of the batch is then unknown, and each
retry of the whole batch would store the first messages again while the disk has room for a few. A
single message that nsqd failed to store is not stored, so such a batch is retried message by
message. A code that is not listed here proves nothing.

Trap: an attempt that may have stored messages cannot be undone by a later one. A later attempt that
certainly stored nothing proves nothing about the earlier one, so its error must pass `as_unknown`.
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

# A message or the whole command is too large for this nsqd; it may accept the other messages.
_TOO_LARGE = frozenset({"E_BAD_MESSAGE", "E_BAD_BODY"})
_CHECKED_FIRST = _TOO_LARGE | REFUSING_CODES | {"E_INVALID", "E_BAD_TOPIC", "E_AUTH_DISABLED"}
_STORING_FAILED = frozenset({"E_PUB_FAILED", "E_DPUB_FAILED", "E_MPUB_FAILED"})
# Either the secret is wrong, or nsqd does not reach its auth server: the code does not distinguish.
_AUTH_FAILED = "E_AUTH_FAILED"


def stored_nothing(error: ServerError, count: int) -> bool:
    """Return whether nsqd certainly stored none of the ``count`` messages of a refused publish."""
    if error.code in _STORING_FAILED:
        # "exiting" is checked before the first message is stored: while nsqd stops, or the topic is
        # being deleted.
        return count == 1 or "exiting" in error.text
    return error.code in _CHECKED_FIRST


def may_split(error: PublishError | None) -> bool:
    """Return whether nsqd may accept the batch without some of its messages."""
    return isinstance(error, PublishRejected) and error.cause.code in _TOO_LARGE


def is_stored_in_part(error: PublishError) -> bool:
    """Return whether nsqd stored a part of a batch, which must be retried message by message."""
    cause = error.__cause__ if isinstance(error, PublishUnknown) else None
    return isinstance(cause, ServerError) and cause.code in _STORING_FAILED


def is_server_unavailable(error: ServerError) -> bool:
    """Return whether nsqd refuses everything for now.

    It is stopping, its disk is full, or it does not reach its auth server.
    """
    return error.code in _STORING_FAILED or error.code == _AUTH_FAILED


def may_try_again(error: PublishError, *, retry_unknown: bool) -> bool:
    """Return whether a retry of the same publish may succeed, and is safe."""
    if isinstance(error, PublishUnknown):
        return retry_unknown
    if isinstance(error, PublishRejected):
        return is_server_unavailable(error.cause)
    return isinstance(error, PublishNotSent)


def is_transient(cause: NsqError | None, *, was_accepted: bool) -> bool:
    """Return whether an nsqd may become available after this failure to connect.

    If an nsqd accepted the secret before, its auth server may be unreachable now.
    """
    is_auth = isinstance(cause, ServerError) and cause.code == _AUTH_FAILED
    return not isinstance(cause, RefusedError) or (is_auth and was_accepted)


# -- errors ---------------------------------------------------------------------------------------


def not_sent(cause: NsqError | None) -> PublishError:
    """Return the error of a publish that never reached nsqd."""
    kind = PublishRefused if isinstance(cause, RefusedError) else PublishNotSent
    error = kind(f"not published: {cause}", hint=cause.hint if cause else "")
    if cause is not None:
        error.category = cause.category
        error.__cause__ = cause
    return error


def rejected(cause: ServerError, count: int) -> PublishError:
    """Return the error of a publish of ``count`` messages that nsqd answered with an error."""
    if not stored_nothing(cause, count):
        return unknown(cause)
    return PublishRejected(f"not published: {cause}", cause=cause, hint=cause.hint)


def unknown(cause: NsqError, prefix: str = "") -> PublishUnknown:
    """Return the error of a publish that nsqd may have stored."""
    error = PublishUnknown(f"not confirmed: {prefix}{cause}", hint=_UNKNOWN_HINT)
    error.__cause__ = cause
    return error


def as_unknown(error: PublishError) -> PublishUnknown:
    """Convert the error of the last attempt when an earlier one may have been stored."""
    if isinstance(error, PublishUnknown):
        return error
    return unknown(error, "an earlier attempt may have been stored; the last: ")


def combined_error(
    counts: Sequence[int], errors: Sequence[PublishError | None]
) -> PublishError | None:
    """Return one error for messages that were published in parts, or None if all succeeded.

    Its ``outcomes`` has an entry for each message. If the parts failed differently, its class is
    `PublishNotSent` if nothing is stored, else `PublishUnknown`.
    """
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return None
    outcomes = [error for count, error in zip(counts, errors, strict=True) for _ in range(count)]
    kinds = set(map(type, outcomes))
    error = first
    if len(kinds) > 1:
        may_be_stored = not kinds.isdisjoint({type(None), PublishUnknown})
        counts_by_word = Counter(
            _OUTCOME_WORDS.get(type(outcome), "not sent") for outcome in outcomes
        )
        words = [word for word in (*_OUTCOME_WORDS.values(), "not sent") if counts_by_word[word]]
        summary = ", ".join(f"{counts_by_word[word]} {word}" for word in words)
        kind = PublishUnknown if may_be_stored else PublishNotSent
        error = kind(f"of {counted(len(outcomes), 'message')} {summary}: {first}", hint=_PARTS_HINT)
        error.__cause__ = first
    error.outcomes = outcomes
    return error


_OUTCOME_WORDS = {type(None): "confirmed", PublishRejected: "rejected", PublishUnknown: "unknown"}
_UNKNOWN_HINT = "nsqd may have the messages; publishing them again may double them."
_PARTS_HINT = "This error's outcomes has the result of each message."
