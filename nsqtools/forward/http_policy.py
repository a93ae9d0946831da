"""What an answer means for the messages of a request: by status, and as the user says."""

from __future__ import annotations

import email.utils
import enum
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from nsqtools.errors import ConfigurationError


class Action(enum.Enum):
    """What follows from a status."""

    OK = "ok"
    RETRY = "retry"
    DROP = "drop"
    DEAD_LETTER = "dead-letter"


DEFAULTS = {
    "2xx": Action.OK,
    "3xx": Action.DEAD_LETTER,
    "4xx": Action.DEAD_LETTER,
    "5xx": Action.RETRY,
    # the request was fine, the moment was not; and what an operator mends without touching messages
    "401": Action.RETRY,
    "403": Action.RETRY,
    "404": Action.RETRY,
    "408": Action.RETRY,
    "425": Action.RETRY,
    "429": Action.RETRY,
}
SPLITTABLE = (400, 413, 422)  # one message of a batch may be to blame
REDIRECTS = (301, 302, 303, 307, 308)


def parse_policy(rules: Iterable[str]) -> dict[str, Action]:
    """Read ``4xx=drop`` and ``404=retry``, on top of what is usual. Raises `ConfigurationError`."""
    policy = dict(DEFAULTS)
    for rule in rules:
        status, _, action = rule.partition("=")
        status = status.strip().lower()
        is_class = len(status) == 3 and status[0] in "2345" and status[1:] == "xx"
        if not is_class and not (status.isdigit() and 200 <= int(status) <= 599):
            raise _wrong(rule)
        try:
            policy[status] = Action(action.strip())
        except ValueError:
            raise _wrong(rule) from None
        if is_class:  # more special ones that were not given go with their class
            for special in [each for each in policy if each[0] == status[0] and each != status]:
                if policy[special] is DEFAULTS.get(special):
                    policy[special] = policy[status]
    return policy


def _wrong(rule: str) -> ConfigurationError:
    return ConfigurationError(
        f"--on-status {rule!r} is not STATUS=ACTION",
        hint="For example 4xx=drop or 404=retry; actions are ok, retry, drop, dead-letter.",
    )


def action_for(policy: Mapping[str, Action], status: int) -> Action:
    """Return what follows from a status: the rule for it, or for its class."""
    return policy.get(str(status)) or policy.get(f"{status // 100}xx", Action.RETRY)


def describe(status: int) -> str:
    """``HTTP 404 Not Found``."""
    try:
        return f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def retry_after_s(text: str, now_s: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, at most an hour; None without one."""
    text = text.strip()
    if text.isdecimal():
        return float(min(int(text[:9]), 3600))
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return min(max(0.0, moment.timestamp() - now_s), 3600.0)
