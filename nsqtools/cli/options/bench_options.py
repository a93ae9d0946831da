"""The options of ``nsq bench``: what is published, how, for how long, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from nsqtools.cli.options.connection import (
    ClientFlags,
    MaxInFlight,
    client_opt,
    flag_statements,
    opt_statements,
)
from nsqtools.cli.options.origins import (
    NoProfile,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    Profile,
    given_addresses,
    origin_of,
)
from nsqtools.cli.options.params import count_option, duration_option, topic_option
from nsqtools.cli.parsing.binding import From
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    GivenOption,
    check_tls,
    resolve_options,
)
from nsqtools.protocol.names import check_topic
from nsqtools.records.units import parse_size

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchMode, BenchPlan

LOAD = "Load"

FOR_S = 5.0
WINDOW = 16
FILL_BATCH = 100

CONSUMING = {
    "max_in_flight": 2500,  # as much as an nsqd allows
    "output_buffer_timeout_s": 0.025,
    "output_buffer_size": 65536,
    "max_attempts": 0,
}


@dataclass(frozen=True)
class Sizes:
    """From ``low`` to ``high`` bytes. (No tuple: typer would ask for two words.)"""

    low: int
    high: int


def parse_sizes(text: str) -> Sizes:
    """Read ``200``, ``1KiB`` or ``100-2000``. Raises ``ValueError``."""
    low, dash, high = text.partition("-")
    sizes = Sizes(parse_size(low), parse_size(high if dash else low))
    if sizes.low > sizes.high:
        raise ValueError(f"{text!r} is not a range: its end is below its beginning")
    return sizes


Size = Annotated[
    Sizes,
    Option(
        "--size",
        parser=parse_sizes,
        metavar="BYTES",
        help="Size of a message, or a range to draw it from (100-2KiB).",
        rich_help_panel=LOAD,
    ),
]
Batch = Annotated[
    int,
    Option(
        "--batch",
        metavar="N",
        min=1,
        help="Messages in one publish command.",
        rich_help_panel=LOAD,
    ),
]
Window = Annotated[
    int,
    Option(
        "--window",
        metavar="N",
        min=1,
        help="Publish commands of a connection that may be unanswered at a time.",
        rich_help_panel=LOAD,
    ),
]
Connections = Annotated[
    int | None,
    Option(
        "--connections",
        metavar="N",
        min=1,
        show_default="1 for each nsqd",
        help="Connections each way, each in a process of its own.",
        rich_help_panel=LOAD,
    ),
]
Rate = Annotated[
    float,
    Option(
        "--rate",
        metavar="N",
        min=0,
        help="Publish N messages a second in total; 0 for full speed.",
        rich_help_panel=LOAD,
    ),
]
BenchTopic = Annotated[
    str | None,
    topic_option("Publish into this topic; by default into one of its own, deleted afterwards."),
]
Embedded = Annotated[
    bool, Option("--embedded", help="Start and measure the embedded nsqd, which is in Python.")
]
Messages = Annotated[int | None, count_option("Measure N messages.")]
Duration = Annotated[
    float | None, duration_option("--for", "Measure for DURATION; 5s without --count and --for.")
]
WarmUp = Annotated[
    float, duration_option("--warm-up", "Run for DURATION before the measurement begins.")
]


@dataclass(frozen=True)
class Load:
    """What the three measurements have in common: where, what, and with how many connections.

    ``producer`` and ``consumer`` are client options as text, under go-nsq's names.
    """

    nsqd_tcp_addresses: tuple[str, ...]
    nsqd_http_addresses: tuple[str, ...]
    producer: dict[str, str]
    consumer: dict[str, str]
    topic: str | None
    sizes: Sizes
    connections: int | None
    embedded: bool

    def plan(
        self,
        mode: BenchMode,
        *,
        batch: int = FILL_BATCH,
        window: int = WINDOW,
        rate: float = 0.0,
        count: int | None,
        for_s: float | None,
        warm_up_s: float = 0.0,
    ) -> BenchPlan:
        """The `BenchPlan`. Raises `ConfigurationError` for what cannot be measured."""
        from nsqtools.bench.bench_plan import BenchPlan
        from nsqtools.client.options import ClientOptions

        options = ClientOptions(**CONSUMING)  # type: ignore[arg-type]
        return BenchPlan(
            mode=mode,
            nsqd_tcp_addresses=self.nsqd_tcp_addresses,
            nsqd_http_addresses=self.nsqd_http_addresses,
            producer_options=ClientOptions(max_outstanding=window).with_options(self.producer),
            consumer_options=options.with_options(self.consumer),
            topic=self.topic,
            size=(self.sizes.low, self.sizes.high),
            batch=batch,
            connections=self.connections or len(self.nsqd_tcp_addresses),
            rate=rate,
            count=count,
            for_s=for_s,
            warm_up_s=warm_up_s,
        )


def bench_load(
    context: Context,
    topic: BenchTopic = None,
    size: Size = "200",  # type: ignore[assignment]
    connections: Connections = None,
    embedded: Embedded = False,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    nsqd_http_address: NsqdHttpAddresses = None,
    profile: Profile = None,
    no_profile: NoProfile = False,
    max_in_flight: MaxInFlight = None,
    consumer_opt: Annotated[list[str] | None, client_opt("--consumer-opt", "consumer")] = None,
    producer_opt: Annotated[list[str] | None, client_opt("--producer-opt", "producer")] = None,
    *,
    flags: Annotated[ClientFlags, From(ClientFlags)],
) -> Load:
    """The load; nsqd are given by their TCP addresses, for nsqlookupd has no part in it."""
    tcp, _, http = given_addresses(context)
    said = list(flag_statements(context, flags._asdict()))
    publishing = resolve_options(
        [*said, *opt_statements(context, "producer_opt", producer_opt or ())]
    )
    own = [*said, *opt_statements(context, "consumer_opt", consumer_opt or ())]
    if max_in_flight is not None:
        origin = origin_of(context, "max_in_flight")
        own.append(GivenOption("max_in_flight", str(max_in_flight), origin, "--max-in-flight"))
    consuming = resolve_options(own)
    check_tls(consuming, http, cure="Add --tls (or --no-tls).")
    return Load(
        tcp or (DEFAULT_NSQD_TCP_ADDRESS,),
        http,
        {option: statement.text for option, statement in publishing.items()},
        {option: statement.text for option, statement in consuming.items()},
        None if topic is None else check_topic(topic),
        size,
        connections,
        embedded,
    )


BenchLoad = Annotated[Load, From(bench_load)]
