"""``nsq to-nsq``: topics to another cluster, confirmed there before they are finished here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from nsqtools.cli.options.connection import DESTINATION, ConsumerConnection, Destination
from nsqtools.cli.options.params import SAFETY, SELECTION, ChannelName
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.forwarding import Forwarding, run_forwarder
from nsqtools.cli.running.runtime import Session
from nsqtools.forward import ForwardMode
from nsqtools.records.template import compile_template

LoopGuard = Annotated[
    bool,
    opt(
        "--loop-guard/--no-loop-guard",
        "Refuse topics whose messages would return to where they were.",
        SAFETY,
    ),
]


def to_nsq(
    channel: ChannelName = "nsq_to_nsq",
    destination_topic: str | None = opt(
        "TOPIC",
        "Publish everything to this topic, instead of each topic under its own name.",
        DESTINATION,
    ),
    map: list[str] | None = opt(
        "REGEX=NAME",
        r"Rename topics that match ('eu\.(.*)=\1'); the first match counts.",
        DESTINATION,
    ),
    mode: ForwardMode = opt(
        "",
        "With several destinations: each in turn, by --key, or the first that works.",
        DESTINATION,
        ForwardMode.ROUND_ROBIN,
    ),
    key: Callable[..., bytes] | None = opt(
        "TEMPLATE",
        "Template of the key for --mode hash ('{.user.id}').",
        DESTINATION,
        parser=compile_template,
    ),
    require_json_field: str | None = opt(
        "FIELD", "Keep messages that are JSON objects with this field.", SELECTION
    ),
    require_json_value: str | None = opt(
        "VALUE", "Keep messages whose --require-json-field is this text or number.", SELECTION
    ),
    whitelist_json_field: list[str] | None = opt(
        "FIELD", "Publish only these fields of JSON objects, their values unchanged.", SELECTION
    ),
    loop_guard: LoopGuard = True,
    *,
    forwarding: Forwarding,
    destination: Destination,
    connection: ConsumerConnection,
    runtime: Session,
) -> int:
    """Forward topics to another nsqd or cluster, each message finished once it is there.

    Runs until it is stopped or a limit is reached. A message is finished when the destination has
    confirmed it; while no destination works messages are held, and their queue grows. Bodies are
    forwarded byte for byte unless --pick or --whitelist-json-field changes them. When a connection
    breaks before the answer, messages are sent again and may be there twice; how many is counted.

    The exit status is 6 when there are dead letters.

    Examples:
        nsq to-nsq -t clicks --destination-nsqd-tcp-address mirror:4150
        nsq to-nsq --topic-pattern '^eu[.]' --map 'eu[.](.*)=\\1' \\
            --destination-nsqd-tcp-address b:4150
        nsq to-nsq -t log --where '.status >= 500' --destination-topic errors \\
            --destination-nsqd-tcp-address b:4150 --dead-letter-file dead.jsonl --max-attempts 10
        nsq to-nsq -t clicks --until-empty --destination-lookupd-http-address lookup:4161
    """
    from nsqtools.forward.loop_guard import LoopGuard as Guard
    from nsqtools.forward.nsq_sink import Destinations, NsqSink, renamer
    from nsqtools.records.filters import json_filters

    rename = renamer(destination_topic, map or ())
    for topic in forwarding.topics:
        rename(topic)  # a name that is not one is refused before any daemon is asked
    destinations = Destinations(destination, runtime.monotonic())
    keep, pick = json_filters(
        forwarding.keep,
        forwarding.pick,
        required=require_json_field,
        value=require_json_value,
        whitelist=whitelist_json_field or (),
    )
    guard = Guard(connection, destinations.settings, rename)
    check = guard.check if loop_guard else lambda topic: None
    source = forwarding.source(channel, connection, check=check, user_agent=guard.user_agent)
    sink = NsqSink(destinations, mode=mode, key=key)
    settings = forwarding.settings(source, keep=keep, pick=pick, rename=rename)
    return run_forwarder(source, sink, settings, forwarding, runtime)
