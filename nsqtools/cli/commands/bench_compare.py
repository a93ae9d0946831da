"""``nsq bench compare``: two settings, two nsqd or two programs, side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Context, Option

from nsqtools.cli.commands.bench import ready
from nsqtools.cli.options.bench_measurements import (
    BenchOutput,
    Measurement,
    e2e_measurement,
    pub_measurement,
    sub_measurement,
)
from nsqtools.cli.options.html_page import check_page, made_at, save_page
from nsqtools.cli.options.origins import (
    NoProfile,
    NsqdHttpAddresses,
    NsqdTcpAddresses,
    Profile,
    given_addresses,
)
from nsqtools.cli.options.params import count_option, duration_option
from nsqtools.cli.parsing.binding import From
from nsqtools.cli.render.progress import Progress
from nsqtools.cli.running.ends import stopping
from nsqtools.cli.running.runtime import Runtime, Session
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.bench.bench_plan import BenchMode
    from nsqtools.bench.compare import Plan

MEASUREMENTS: dict[str, Callable[..., Measurement]] = {
    "pub": pub_measurement,
    "sub": sub_measurement,
    "e2e": e2e_measurement,
}

COUNT = "100000"
FOR = "2s"

SideArgument = Annotated[
    str,
    Argument(
        metavar="SIDE",
        help="pub, sub or e2e, and its options; or pub or sub, and the command line of a program.",
    ),
]
Rounds = Annotated[
    int, Option("--rounds", metavar="N", min=1, help="Rounds of each side; 4 or more can tell.")
]
Messages = Annotated[
    int | None, count_option("Measure N messages in a round; 100000 for sub and programs.")
]
Duration = Annotated[
    float | None,
    duration_option("--for", "Measure for DURATION in a round; 2s without --count and --for."),
]


class Common(NamedTuple):
    """Words that both sides begin with: settings, addresses, and what is the end of a round."""

    settings: list[str]
    addresses: list[str]
    limits: list[str]


def common_words(
    context: Context,
    count: Messages = None,
    for_: Duration = None,
    nsqd_tcp_address: NsqdTcpAddresses = None,
    nsqd_http_address: NsqdHttpAddresses = None,
    profile: Profile = None,
    no_profile: NoProfile = False,
) -> Common:
    """The options that are given for both sides."""
    addresses = []
    if nsqd_tcp_address or nsqd_http_address:
        tcp, _, http = given_addresses(context)
        addresses += [word for each in tcp for word in ("--nsqd-tcp-address", each)]
        addresses += [word for each in http for word in ("--nsqd-http-address", each)]
    limits = ["--count", str(count)] if count is not None else []
    limits += ["--for", f"{for_}s"] if for_ is not None else []
    settings = ["--profile", profile] if profile else ["--no-profile"] if no_profile else []
    return Common(settings, addresses, limits)


def compare(
    a: SideArgument,
    b: SideArgument,
    rounds: Rounds = 5,
    *,
    common: Annotated[Common, From(common_words)],
    output: BenchOutput,
    runtime: Session,
) -> int:
    """Measure two settings, nsqd or programs in turns, and say whether they differ.

    Each SIDE is one word of the shell: quote it. Its own options are stronger than those of
    compare. A program is measured from outside, by nsqd's counts and the processor time that the
    system reports, its start included. In its command line {topic}, {channel}, {nsqd}, {nsqd_http}
    and {count} stand for what it is to use; with pub it publishes the lines of its standard input,
    with sub it consumes the channel.

    The median of all rounds stands for a side. A difference is within the noise when rounds of
    equal sides would be as far apart in more than one of twenty comparisons.

    Examples:
        nsq bench compare 'pub --batch 10' 'pub --batch 100'
        nsq bench compare 'e2e --rate 500' 'e2e --rate 500 --snappy' --html report.html
        nsq bench compare 'sub --nsqd-tcp-address a:4150' \\
            'sub --nsqd-tcp-address b:4150'
        nsq bench compare 'pub nsq pub -t {topic} --nsqd-tcp-address {nsqd}' \\
            'pub to_nsq -topic {topic} -nsqd-tcp-address {nsqd}'
    """
    from nsqtools.bench.compare import Compare
    from nsqtools.cli.render.bench_output import how_far
    from nsqtools.cli.render.compare_output import comparison_page, write_comparison

    if output.html is not None:
        check_page(output.html)
    with ExitStack() as stack:
        sides = [_side(text, common, runtime, stack) for text in (a, b)]
        (mode, plan_a), (other, plan_b) = sides
        if mode is not other:
            raise ConfigurationError(
                f"{mode.value} and {other.value} cannot be compared",
                hint="Both sides begin with the same word: pub, sub or e2e.",
            )
        progress = stack.enter_context(Progress(runtime))
        began = runtime.monotonic()

        def show(round_: int, side: str, phase: str, messages: int) -> None:
            line = how_far(phase, messages, runtime.monotonic() - began)
            progress.show(lambda: f"round {round_} of {rounds}, {side}: {line}")

        comparing = Compare(mode, (a, plan_a), (b, plan_b), rounds, show)
        with stopping(comparing.stop) as signals:
            made = comparing.run()
    if made is None:
        runtime.tell("nsq: stopped before each side had a round")
        return signals.status()
    write_comparison(runtime, made, output.form)
    if output.html is not None:
        save_page(output.html, comparison_page(made, made_at()))
    for side in (made.a, made.b):
        for line in side.limits:
            runtime.tell(f"nsq: {side.name}: {line}")
    return signals.status()


def _side(text: str, common: Common, runtime: Runtime, stack: ExitStack) -> tuple[BenchMode, Plan]:
    """What a side is to do. Its own addresses and limits take the place of the common ones."""
    from nsqtools.cli.parsing.app import call_with

    name, *own = _words(text)
    is_program = bool(own) and not own[0].startswith("-")
    if is_program and "--for" in common.limits:
        raise ConfigurationError("a program is measured by --count, not by --for")
    options = [] if is_program else own
    addresses, limits = common.addresses, common.limits
    if not limits:
        limits = ["--count", COUNT] if is_program or name == "sub" else ["--for", FOR]
    if any(word.startswith("--nsqd-") for word in options):
        addresses = []
    if any(word.startswith(("--count", "--for", "-n")) for word in options):
        limits = []
    measurement = call_with(
        f"nsq bench {name}",
        MEASUREMENTS[name],
        [*common.settings, *addresses, *limits, *options],
        runtime,
    )
    if is_program:
        return measurement.plan.mode, _program(measurement, own)
    return measurement.plan.mode, ready(measurement, runtime, stack)


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r} cannot be split into words ({error})") from error
    if not words or words[0] not in MEASUREMENTS:
        raise ConfigurationError(
            f"{text!r} is not a side to compare",
            hint="It begins with pub, sub or e2e: 'pub --batch 10', or 'pub PROGRAM ...'.",
        )
    return words


def _program(measurement: Measurement, command: list[str]) -> Plan:
    from nsqtools.bench.program import ProgramPlan

    plan = measurement.plan
    if len(plan.nsqd_tcp_addresses) > 1:
        raise ConfigurationError("a program is measured with one nsqd")
    assert plan.count is not None
    return ProgramPlan(
        mode=plan.mode,
        command=tuple(command),
        nsqd_tcp_address=plan.nsqd_tcp_addresses[0],
        nsqd_http_addresses=plan.nsqd_http_addresses,
        options=plan.producer_options,
        size=plan.size,
        count=plan.count,
    )
