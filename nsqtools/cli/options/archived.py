"""Which of the messages in archives: by the topic that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from nsqtools.cli.options.params import GLOBS, SELECTION
from nsqtools.cli.parsing.binding import opt
from nsqtools.errors import NotFoundError
from nsqtools.records.envelope import MessageLike

HELP = f"Only messages of these topics. {GLOBS}"

ArchivedTopics = Annotated[list[str] | None, opt("--topic -t GLOB", HELP, SELECTION)]
FromTopics = Annotated[list[str] | None, opt("--from-topic GLOB", HELP, SELECTION)]


class TopicFilter:
    """Keeps the messages of some topics, and remembers which there were."""

    def __init__(self, patterns: Sequence[str]) -> None:
        from nsqtools.cluster.topics import matches

        self._patterns = patterns
        self._matches = matches
        self._wanted: dict[str, bool] = {}

    def __call__(self, message: MessageLike) -> bool:
        """Tell whether the message is of one of the topics."""
        if not self._patterns:
            return True
        topic: str = getattr(message, "topic", "")
        wanted = self._wanted.get(topic)
        if wanted is None:
            wanted = self._wanted[topic] = self._matches(topic, self._patterns)
        return wanted

    def check(self) -> None:
        """Raise `NotFoundError` for a pattern that no message has matched."""
        for pattern in self._patterns:
            if not any(self._matches(topic, [pattern]) for topic in self._wanted):
                topics = ", ".join(sorted(filter(None, self._wanted))) or "none that has a name"
                raise NotFoundError(
                    f"no message of topic {pattern} is there",
                    hint=f"The topics in these archives: {topics}.",
                )
