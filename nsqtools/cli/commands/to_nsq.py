"""``nsq to-nsq``: topics to another cluster, confirmed there before they are finished here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from nsqtools.cli.options.connection import ConsumerConnection
from nsqtools.cli.options.destination import PANEL, Destination
from nsqtools.cli.options.forwarding import Forwarding
from nsqtools.cli.options.opt import opt
from nsqtools.cli.options.params import SAFETY, SELECTION, ChannelName
from nsqtools.cli.running.forwarding import run_forwarder
from nsqtools.cli.running.runtime import Session
from nsqtools.forward import ForwardMode
from nsqtools.records.template import compile_template

if TYPE_CHECKING:
    pass

DestinationTopic = Annotated[
    str | None,
    opt(
        "--destination-topic TOPIC",
        "Publish everything to this topic; default: each topic under its own name.",
        PANEL,
    ),
]
Map = Annotated[
    list[str] | None,
    opt(
        "--map REGEX=NAME",
        r"Rename a topic that matches ('eu\.(.*)=\1'); the first rule that matches counts.",
        PANEL,
    ),
]
Mode = Annotated[
    ForwardMode,
    opt(
        "--mode",
        "With several destinations: each in turn, the same for the same --key, or the first "
        "that works.",
        PANEL,
    ),
]
Key = Annotated[
    Callable[..., bytes] | None,
    opt(
        "--key TEMPLATE", "What --mode hash goes by ('{.user.id}').", PANEL, parser=compile_template
    ),
]
LoopGuard = Annotated[
    bool,
    opt(
        "--loop-guard/--no-loop-guard",
        "Refuse topics whose messages would come back to where they were.",
        SAFETY,
    ),
]
RequireField = Annotated[
    str | None,
    opt(
        "--require-json-field FIELD",
        "Only messages that are JSON objects with this field.",
        SELECTION,
    ),
]
RequireValue = Annotated[
    str | None,
    opt(
        "--require-json-value VALUE",
        "Only messages whose --require-json-field is this text or number.",
        SELECTION,
    ),
]
Whitelist = Annotated[
    list[str] | None,
    opt(
        "--whitelist-json-field FIELD",
        "Publish only these fields of JSON objects, their values unchanged.",
        SELECTION,
    ),
]


def to_nsq(
    channel: ChannelName = "nsq_to_nsq",
    destination_topic: DestinationTopic = None,
    map: Map = None,
    mode: Mode = ForwardMode.ROUND_ROBIN,
    key: Key = None,
    require_json_field: RequireField = None,
    require_json_value: RequireValue = None,
    whitelist_json_field: Whitelist = None,
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
    from nsqtools.forward.forwarder import THROUGHPUT, ForwardSettings
    from nsqtools.forward.loop_guard import LoopGuard as Guard
    from nsqtools.forward.nsq_sink import Destinations, NsqSink, renamer
    from nsqtools.forward.topic_sources import SourceSettings
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
    options = connection.client_options(**THROUGHPUT)
    source = SourceSettings(
        forwarding.topics,
        channel,
        connection,
        options,
        forwarding.pattern,
        forwarding.refresh_s,
        check=guard.check if loop_guard else lambda topic: None,
        user_agent=guard.user_agent,
    )
    sink = NsqSink(destinations, mode=mode, key=key)
    settings = ForwardSettings(
        keep, pick, rename, forwarding.rate, forwarding.max_attempts, options.drain_timeout_s
    )
    return run_forwarder(source, sink, settings, forwarding, runtime)
