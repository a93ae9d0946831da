"""What a topic is called at the destination. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from nsqtools.errors import ConfigurationError
from nsqtools.protocol.names import check_topic

Rule = tuple[re.Pattern[str], str]


def parse_rule(text: str) -> Rule:
    r"""Read ``REGEX=NAME``, where NAME may refer to groups: ``eu\.(.*)=\1``.

    Raises `ConfigurationError`.
    """
    pattern, equals, name = text.rpartition("=")
    if not (pattern and equals and name):
        raise ConfigurationError(f"--map {text!r} is not REGEX=NAME, such as 'eu\\.(.*)=\\1'")
    try:
        compiled = re.compile(pattern)
        re.compile(f"(?:{pattern})|").sub(name, "")
    except re.error as exc:
        raise ConfigurationError(f"--map {text!r} cannot rename: {exc}") from None
    return compiled, name


def renamer(destination: str | None, texts: Sequence[str]) -> Callable[[str], str]:
    """Return the function that gives a topic's name: ``destination`` for all of them, or that of
    the first rule that matches the whole name, or its own.

    It raises `ConfigurationError` when that is not a topic's name. So does this for both at once,
    and for a rule that is not ``REGEX=NAME``.
    """
    rules = list(map(parse_rule, texts))
    if destination is not None and rules:
        raise ConfigurationError("give either --destination-topic or --map")
    if destination is not None:
        name = check_topic(destination)
        return lambda topic: name
    names: dict[str, str] = {}

    def rename(topic: str) -> str:
        if topic not in names:
            names[topic] = check_topic(_renamed(topic, rules))
        return names[topic]

    return rename


def _renamed(topic: str, rules: Sequence[Rule]) -> str:
    for pattern, name in rules:
        if match := pattern.fullmatch(topic):
            return match.expand(name)
    return topic
