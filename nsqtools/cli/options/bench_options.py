"""The options of ``nsq bench``: what is published, how, for how long, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
from nsqtools.cli.options.params import LIMITS
from nsqtools.cli.parsing.binding import From, opt
from nsqtools.client.connection_settings import (
    DEFAULT_NSQD_TCP_ADDRESS,
    GivenOption,
    check_tls,
    resolve_options,
)
from nsqtools.protocol.names import check_topic
from nsqtools.records.units import parse_size

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchPlan

LOAD = "Load"

FOR_S = 5.0
WINDOW = 16

CONSUMING = {
    "max_in_flight": 2500,  # as much as an nsqd allows
    "output_buffer_timeout_s": 0.025,
    "output_buffer_size": 65536,
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


def load_option(name: str, help: str, **settings: Any) -> Any:
    return Option(name, help=help, rich_help_panel=LOAD, **settings)


Size = Annotated[
    Sizes,
    opt(
        "--size BYTES",
        "Size of a message, or a range to draw it from (100-2KiB).",
        LOAD,
        parser=parse_sizes,
    ),
]
Batch = Annotated[int, opt("--batch N", "Messages in one publish command.", LOAD, min=1)]
Window = Annotated[
    int,
    opt(
        "--window N",
        "Publish commands of a connection that may be unanswered at a time.",
        LOAD,
        min=1,
    ),
]
Connections = Annotated[
    int | None,
    opt(
        "--connections N",
        "Connections each way, each in a process of its own.",
        LOAD,
        min=1,
        show_default="1 for each nsqd",
    ),
]
Rate = Annotated[
    float, opt("--rate N", "Publish N messages a second in total; 0 for full speed.", LOAD, min=0)
]


Messages = Annotated[int | None, opt("--count -n N", "Measure N messages.", LIMITS, min=1)]
Duration = Annotated[
    float | None,
    opt("--for DURATION", "Measure for DURATION; 5s without --count and --for.", LIMITS),
]
WarmUp = Annotated[
    float, opt("--warm-up DURATION", "Run for DURATION before the measurement begins.", LIMITS)
]


class Load(NamedTuple):
    """What the three measurements have in common: fields of the plan, the client options of the
    publishers as text, and whether the embedded nsqd is what is measured."""

    common: dict[str, Any]
    publishing: dict[str, str]
    embedded: bool

    def plan(
        self, mode: str, count: int | None, for_s: float | None, window: int = WINDOW, **own: Any
    ) -> BenchPlan:
        """The `BenchPlan`. Raises `ConfigurationError` for what cannot be measured."""
        from nsqtools.bench.bench_plan import BenchMode, BenchPlan
        from nsqtools.client.options import ClientOptions

        return BenchPlan(
            mode=BenchMode(mode),
            producer_options=ClientOptions(max_outstanding=window).with_options(self.publishing),
            count=count,
            for_s=for_s or (None if count else FOR_S),
            **self.common,
            **own,
        )


def bench_load(
    context: Context,
    topic: str | None = opt(
        "-t TOPIC", "Publish into this topic; by default into one of its own, deleted afterwards."
    ),
    size: Size = "200",  # type: ignore[assignment]
    connections: Connections = None,
    embedded: bool = opt("", "Start and measure the embedded nsqd, which is in Python."),
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
    from nsqtools.client.options import ClientOptions

    tcp, _, http = given_addresses(context)
    tcp = tcp or (DEFAULT_NSQD_TCP_ADDRESS,)
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
    common = {
        "nsqd_tcp_addresses": tcp,
        "nsqd_http_addresses": http,
        "consumer_options": ClientOptions(**CONSUMING).with_options(_texts(consuming)),  # type: ignore[arg-type]
        "topic": None if topic is None else check_topic(topic),
        "size": (size.low, size.high),
        "connections": connections or len(tcp),
    }
    return Load(common, _texts(publishing), embedded)


def _texts(statements: Mapping[str, GivenOption]) -> dict[str, str]:
    """Client options under go-nsq's names."""
    return {option: statement.text for option, statement in statements.items()}


BenchLoad = Annotated[Load, From(bench_load)]
