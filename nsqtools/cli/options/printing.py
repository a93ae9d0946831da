"""Options that filter and print messages, built into one function each.

A command declares ``keep: MessageFilter`` and ``printer: MessagePrinter``. JSON for people is split
into tokens, which are printed unchanged. Decoding and encoding the JSON would round numbers and
lose repeated keys.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from json import loads
from typing import Annotated

from nsqtools.cli.options.params import GLOBS, OUTPUT, SELECTION, MessageJson
from nsqtools.cli.parsing.binding import Provided, in_panel, opt
from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError, NotFoundError
from nsqtools.protocol.text import escape_json, escape_json_lines, indented, json_tokens
from nsqtools.records import filters
from nsqtools.records.envelope import Envelope, MessageLike, encode_lines, encode_many
from nsqtools.records.filters import compile_pick
from nsqtools.records.template import compile_template
from nsqtools.records.units import unescape

# Converts topic, nsqd and messages to the bytes to write.
Encode = Callable[[str, str, Iterable[MessageLike]], bytes]

FILTERS = "Filters"


@in_panel(FILTERS)
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
    """Return the filter of the options, None without one.

    Raises `ConfigurationError` for an option without effect.
    """
    parts = []
    if grep is None and (invert or ignore_case):
        raise ConfigurationError(f"{'--invert' if invert else '--ignore-case'} is for --grep")
    if grep is not None:
        parts.append(filters.grep(grep, ignore_case=ignore_case, invert=invert))
    if where is not None:
        parts.append(where)
    if sample is not None:
        parts.append(filters.sample(sample, random.random))
    return filters.every(parts) if parts else None


MessageFilter = Annotated[filters.Filter | None, Provided(message_filter)]

PickOption = Annotated[
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

# Returns the encoder of a run. It depends on whether stdout is a terminal, and on the handling of
# messages to which --pick cannot be applied.
Printer = Callable[[Runtime, filters.OnUnjudged[MessageLike]], Encode]


def message_printer(
    json: MessageJson = False,
    format: Template = None,
    pick: PickOption = None,
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
    """Return the printer of the options.

    Raises `ConfigurationError` for an option without effect.
    """
    ending = b"\n" if delimiter is None else delimiter
    if json or format is not None:
        without_effect = {"--format": json and format is not None, "--pretty": pretty and not json}
        without_effect |= {"--delimiter": delimiter is not None, "--print-topic": print_topic}
        if name := next(filter(without_effect.get, without_effect), None):
            raise ConfigurationError(
                f"{name} has no effect with {'--json' if json else '--format'}"
            )

    def printer(runtime: Runtime, on_unjudged: filters.OnUnjudged[MessageLike]) -> Encode:
        if json:
            encode = json_printer(runtime, pretty=pretty)
        elif format is not None:
            encode = partial(format, escape=True) if runtime.stdout_is_tty else format
        else:
            # On a terminal, control characters are shown as \xNN.
            lines = partial(
                encode_lines,
                delimiter=ending,
                print_topic=print_topic,
                escape=runtime.stdout_is_tty,
            )
            encode = readable(runtime, lines, pretty=pretty)
        return encode if pick is None else picking(runtime, encode, pick, on_unjudged)

    return printer


MessagePrinter = Annotated[Printer, Provided(message_printer)]


def picking(
    runtime: Runtime,
    encode: Encode,
    pick: Callable[[bytes], bytes | None],
    on_unjudged: filters.OnUnjudged[MessageLike],
) -> Encode:
    """Print the result of ``--pick`` instead of the body; exclude messages without a result."""
    is_reported = False

    def encode_picked(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        nonlocal is_reported
        picked = []
        for message in messages:
            try:
                body = pick(message.body)
            except ValueError as error:
                on_unjudged(message, error)
                continue
            if body is not None:
                picked.append(with_body(topic, nsqd, message, body))
            elif not is_reported:
                is_reported = True
                runtime.info("nsq: messages in which --pick finds nothing are not printed")
        return encode(topic, nsqd, picked) if picked else b""

    return encode_picked


def readable(runtime: Runtime, encode: Encode, *, pretty: bool) -> Encode:
    """Indent and color JSON bodies, as the options and the terminal require."""
    color = runtime.has_color
    if not (pretty or color):
        return encode

    def encode_readable(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        parts = []
        for message in messages:
            body = lay_out(message.body, indent=pretty, color=color)
            if body is None:
                parts.append(encode(topic, nsqd, [message]))
            else:
                # The body is escaped already. Escaping it again would escape our colors.
                line = encode(topic, nsqd, [with_body(topic, nsqd, message, MARK)])
                parts.append(line.replace(MARK, body, 1))
        return b"".join(parts)

    return encode_readable


# Stands for a body until its line is encoded. No topic contains @.
MARK = b"@@BODY@@"


def with_body(topic: str, nsqd: str, message: MessageLike, body: bytes) -> Envelope:
    """Return the message with another body."""
    return Envelope(topic, nsqd, message.id, message.timestamp_ns, message.attempts, body)


def json_printer(runtime: Runtime, *, pretty: bool = False) -> Encode:
    """Return an encoder of messages as JSON lines, or indented.

    Control characters are escaped even in a pipe, because the pipe may lead to a terminal.
    """
    color = runtime.has_color

    def encode(topic: str, nsqd: str, messages: Iterable[MessageLike]) -> bytes:
        lines = encode_many(topic, nsqd, messages)
        if not (pretty or color):
            return escape_json_lines(lines)
        documents = lines.splitlines()
        return b"".join((lay_out(d, indent=pretty, color=color) or d) + b"\n" for d in documents)

    return encode


KEEP_TOPICS = f"Keep messages of these topics. {GLOBS}"
ArchivedTopics = Annotated[list[str] | None, opt("--topic -t GLOB", KEEP_TOPICS, SELECTION)]


class TopicFilter:
    """Keep the messages of matching topics, and record the topics of all messages."""

    def __init__(self, patterns: Sequence[str]) -> None:
        from nsqtools.cluster.topics import matches

        self._patterns = patterns
        self._matches = matches
        self._is_match: dict[str, bool] = {}

    def __call__(self, message: MessageLike) -> bool:
        """Return whether the topic of the message matches."""
        topic: str = getattr(message, "topic", "")
        if topic not in self._is_match:
            self._is_match[topic] = self._matches(topic, self._patterns)
        return self._is_match[topic]

    def check(self) -> None:
        """Raise `NotFoundError` for a pattern that no message has matched."""
        for pattern in self._patterns:
            if not any(self._matches(topic, [pattern]) for topic in self._is_match):
                topics = ", ".join(sorted(filter(None, self._is_match))) or "none with a name"
                raise NotFoundError(
                    f"no message of topic {pattern} found",
                    hint=f"The topics in these archives: {topics}.",
                )


KEY, STRING, NUMBER, WORD, RESET = "\x1b[34m", "\x1b[32m", "\x1b[36m", "\x1b[35m", "\x1b[0m"


def lay_out(body: bytes, *, indent: bool, color: bool) -> bytes | None:
    """Return the escaped body with layout and colors, None if it is not an object or array."""
    try:
        text = body.decode().strip()
        if text[:1] not in ("{", "["):
            return None
        loads(text)
    except (ValueError, RecursionError):
        return None
    tokens = json_tokens(text)
    escaped = list(map(escape_json, tokens))
    if color:
        escaped = list(map(_color_token, escaped, tokens, [*tokens[1:], ""]))
    return (indented if indent else _join)(tokens, escaped).encode()


def _color_token(escaped: str, token: str, next_token: str) -> str:
    if token in "{}[],:":
        return escaped
    if token.startswith('"'):
        style = KEY if next_token == ":" else STRING
    else:
        style = WORD if token in ("true", "false", "null") else NUMBER
    return f"{style}{escaped}{RESET}"


def _join(tokens: list[str], escaped: list[str]) -> str:
    return "".join(
        text + (" " if token in (",", ":") else "")
        for token, text in zip(tokens, escaped, strict=True)
    )
