"""The options about how messages are chosen and printed, made into one value each.

A command declares ``keep: MessageFilter`` and ``printer: MessagePrinter``; what they build is plain
functions over messages. JSON for people is cut into tokens, which stay as they are: no number is
rounded, no key is lost that comes twice, as both would be if it were read and written again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from json import loads
from typing import Annotated

from nsqtools.cli.options.params import GLOBS, OUTPUT, SELECTION, Json
from nsqtools.cli.parsing.binding import From, heading, opt
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.text import escape_json, escape_json_lines, indented, json_tokens
from nsqtools.records import filters
from nsqtools.records.envelope import Envelope, MessageLike, encode_lines, encode_many
from nsqtools.records.filters import compile_pick
from nsqtools.records.template import compile_template
from nsqtools.records.units import unescape

Encode = Callable[[str, str, Iterable[MessageLike]], bytes]
"""From topic, nsqd and messages to the bytes to write."""

FILTERS = "Filters"


@heading(FILTERS)
def message_filter(
    grep: str | None = opt("-g REGEX", "Keep messages whose body matches this regular expression."),
    ignore_case: bool = opt("-i", "Ignore case in --grep."),
    invert: bool = opt("", "Keep messages whose body does not match --grep."),
    where: filters.Filter | None = opt(
        "JQ",
        "Keep JSON bodies that satisfy this jq expression ('.status >= 500').",
        parser=filters.where,
    ),
    sample: float | None = opt(
        "SHARE",
        "Keep this share of the messages, drawn at random (10%, 0.1).",
        parser=filters.parse_share,
    ),
) -> filters.Filter | None:
    """The filter that the options make; None when all messages are kept.

    Raises `ConfigurationError` for an option that does nothing.
    """
    wanted = []
    if grep is None and (invert or ignore_case):
        raise ConfigurationError(f"{'--invert' if invert else '--ignore-case'} is for --grep")
    if grep is not None:
        wanted.append(filters.grep(grep, ignore_case=ignore_case, invert=invert))
    if where is not None:
        wanted.append(where)
    if sample is not None:
        wanted.append(filters.sample(sample, random.random))
    return filters.every(wanted) if wanted else None


MessageFilter = Annotated[filters.Filter | None, From(message_filter)]

Pick = Annotated[
    Callable[[bytes], bytes | None] | None,
    opt(
        "--pick JQ",
        "Use the result of this jq expression instead of the body ('.user.id').",
        FILTERS,
        parser=compile_pick,
    ),
]

Template = Annotated[
    Callable[..., bytes] | None,
    opt(
        "--format -f TEMPLATE",
        "Print with this template: {topic} {nsqd} {id} {timestamp} {attempts} {size} {body}; "
        "{timestamp:%H:%M:%S}, {body:hex|base64|url|json}, {.user.id} of JSON; \\n \\t \\0 "
        "\\xNN; {{ and }} for braces.",
        OUTPUT,
        parser=compile_template,
    ),
]
Pretty = Annotated[
    bool, opt("--pretty", "Indent JSON bodies; on a terminal they are always colored.", OUTPUT)
]

Printer = Callable[[Runtime, filters.OnUnjudged[MessageLike]], Encode]
"""Made for a run, because it matters whether stdout is a terminal, and what follows where --pick
cannot be applied."""


def message_printer(
    json: Json = False,
    format: Template = None,
    pick: Pick = None,
    pretty: Pretty = False,
    delimiter: bytes | None = opt(
        "-d TEXT",
        "What ends each message; \\0 for NUL, '' for nothing.",
        OUTPUT,
        parser=unescape,
        show_default="\\n",
    ),
    print_topic: bool = opt("", "Print 'TOPIC | ' before a message.", OUTPUT),
) -> Printer:
    """How the options want messages printed.

    Raises `ConfigurationError` for an option that does nothing.
    """
    ending = b"\n" if delimiter is None else delimiter
    if json or format is not None:
        others = {"--format": json and format is not None, "--pretty": pretty and not json}
        others |= {"--delimiter": delimiter is not None, "--print-topic": print_topic}
        if name := next(filter(others.get, others), None):
            raise ConfigurationError(
                f"{name} has no effect with {'--json' if json else '--format'}"
            )

    def printer(runtime: Runtime, on_unjudged: filters.OnUnjudged[MessageLike]) -> Encode:
        if json:
            encode = json_printer(runtime, pretty=pretty)
        elif format is not None:
            encode = partial(format, escape=True) if runtime.stdout_is_tty else format
        else:
            # on a terminal, bytes that would steer it are shown as \xNN
            lines = partial(
                encode_lines,
                delimiter=ending,
                print_topic=print_topic,
                escape=runtime.stdout_is_tty,
            )
            encode = readable(runtime, lines, pretty=pretty)
        return encode if pick is None else picking(runtime, encode, pick, on_unjudged)

    return printer


MessagePrinter = Annotated[Printer, From(message_printer)]


def picking(
    runtime: Runtime,
    encode: Encode,
    pick: Callable[[bytes], bytes | None],
    on_unjudged: filters.OnUnjudged[MessageLike],
) -> Encode:
    """Print what ``--pick`` finds in place of the body; a message without it is left out."""
    is_told = False

    def encode_picked(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        nonlocal is_told
        found = []
        for message in messages:
            try:
                body = pick(message.body)
            except ValueError as error:
                on_unjudged(message, error)
                continue
            if body is not None:
                found.append(with_body(topic, nsqd, message, body))
            elif not is_told:
                is_told = True
                runtime.info("nsq: messages in which --pick finds nothing are not printed")
        return encode(topic, nsqd, found) if found else b""

    return encode_picked


def readable(runtime: Runtime, encode: Encode, *, pretty: bool) -> Encode:
    """Print bodies that are JSON as people read them, where that is wanted."""
    color = runtime.has_color
    if not (pretty or color):
        return encode

    def encode_readable(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        parts = []
        for message in messages:
            body = lay_out(message.body, indent=pretty, color=color)
            if body is None:
                parts.append(encode(topic, nsqd, [message]))
            else:  # what is laid out is harmless already, but for our own colors
                parts.append(encode(topic, nsqd, [with_body(topic, nsqd, message, MARK)]))
                parts[-1] = parts[-1].replace(MARK, body, 1)
        return b"".join(parts)

    return encode_readable


MARK = b"@@BODY@@"  # takes the place of a body until its line is ready; no topic contains @


def with_body(topic: str, nsqd: str, message: MessageLike, body: bytes) -> Envelope:
    """The message with another body."""
    return Envelope(topic, nsqd, message.id, message.timestamp_ns, message.attempts, body)


def json_printer(runtime: Runtime, *, pretty: bool = False) -> Encode:
    """Messages as lines of JSON, or indented; nothing in them steers a terminal, to which a pipe
    may lead as well."""
    color = runtime.has_color

    def encode(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        lines = encode_many(topic, nsqd, messages)
        if not (pretty or color):
            return escape_json_lines(lines)
        shown = [lay_out(line, indent=pretty, color=color) or line for line in lines.splitlines()]
        return b"".join(line + b"\n" for line in shown)

    return encode


KEEP_TOPICS = f"Keep messages of these topics. {GLOBS}"
ArchivedTopics = Annotated[list[str] | None, opt("--topic -t GLOB", KEEP_TOPICS, SELECTION)]


class TopicFilter:
    """Keeps the messages of some topics, and remembers which there were."""

    def __init__(self, patterns: Sequence[str]) -> None:
        from nsqtools.cluster.topics import matches

        self._patterns = patterns
        self._matches = matches
        self._wanted: dict[str, bool] = {}

    def __call__(self, message: MessageLike) -> bool:
        """Tell whether the message is of one of the topics."""
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


KEY, STRING, NUMBER, WORD, RESET = "\x1b[34m", "\x1b[32m", "\x1b[36m", "\x1b[35m", "\x1b[0m"


def lay_out(body: bytes, *, indent: bool, color: bool) -> bytes | None:
    """Return the body laid out, harmless for a terminal; None if it is not an object or array."""
    try:
        text = body.decode().strip()
        if text[:1] not in ("{", "["):
            return None
        loads(text)
    except (ValueError, RecursionError):
        return None
    tokens = json_tokens(text)
    painted = list(map(escape_json, tokens))
    if color:
        painted = list(map(_paint, painted, tokens, [*tokens[1:], ""]))
    return (indented if indent else _joined)(tokens, painted).encode()


def _paint(shown: str, token: str, then: str) -> str:
    if token in "{}[],:":
        return shown
    if token.startswith('"'):
        style = KEY if then == ":" else STRING
    else:
        style = WORD if token in ("true", "false", "null") else NUMBER
    return f"{style}{shown}{RESET}"


def _joined(tokens: list[str], painted: list[str]) -> str:
    return "".join(
        shown + (" " if token in (",", ":") else "")
        for token, shown in zip(tokens, painted, strict=True)
    )
