"""Decisions of the pages without requests: order, problems, figures and layout of bodies."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from nsqtools.cluster.directory import DaemonFailure
from nsqtools.cluster.problems import EarlierTotals, find_problems
from nsqtools.cluster.queue_rows import NodeReport, QueueRow, Rates, consumers_of, sums_of, totals
from nsqtools.cluster.sampling import Sample
from nsqtools.cluster.texts import format_utc
from nsqtools.protocol.stats import read_stats
from nsqtools.web.pages import figures
from nsqtools.web.pages.messages import MAX_SHOWN, shown_body
from nsqtools.web.pages.queues import programs_of
from nsqtools.web.pages.site import Addresses
from nsqtools.web.pages.snapshot import QueueQuery, Snapshot, page_of_queues, parse_query


def row(topic: str, channel: str = "", **values: object) -> QueueRow:
    defaults = {"node": "", "depth": 0, "disk": 0, "messages": 0, "paused": False}
    return QueueRow(topic=topic, channel=channel, **{**defaults, **values})  # type: ignore[arg-type]


def rates(**values: float) -> Rates:
    return Rates(**{"ingress": 0, "egress": 0, "finish": 0, "requeue": 0, "timed_out": 0, **values})


def sample(*rows: QueueRow, failures: tuple[DaemonFailure, ...] = ()) -> Sample:
    return Sample(0, list(rows), totals(rows), (), failures)


def names(query: QueueQuery, *rows: QueueRow) -> list[str]:
    return [
        f"{row_of_page.topic}/{row_of_page.channel}"
        for row_of_page in page_of_queues(rows, query).rows
    ]


def test_the_deepest_queue_is_first_and_redundant_topics_are_hidden() -> None:
    rows = [row("a"), row("a", "one", depth=3), row("a", "two", depth=9)]
    rows += [row("b", depth=5), row("b", "one"), row("c")]

    assert names(QueueQuery(), *rows) == ["a/two", "b/", "a/one", "b/one", "c/"]
    assert names(QueueQuery(text="A TWO"), *rows) == ["a/two"]
    assert names(QueueQuery(sort="name", is_ascending=True), *rows)[0] == "a/one"
    assert names(QueueQuery(shown="unconsumed"), *rows) == ["a/two", "a/one"]
    growing = page_of_queues(rows, QueueQuery(sort="growth"), {("", "b", "one"): 2.0})
    assert growing.rows[0].topic == "b"


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(["q", "show", "sort", "order", "page"]), st.text()))
def test_any_parameters_are_a_query_and_any_query_has_an_address(
    parameters: dict[str, str],
) -> None:
    query = parse_query(parameters)

    assert query.address().startswith("?")
    assert page_of_queues([row("a")], query).pages == 1


def test_growth_and_the_time_to_drain_follow_from_two_samples() -> None:
    deeper, now = row("a", "c", depth=600), row("a", "c", depth=300)
    earlier = EarlierTotals([deeper], ago_s=60.0)

    shrinking = Snapshot(sample(now), earlier)
    growing = Snapshot(sample(deeper), earlier._replace(totals=[now]))

    assert (shrinking.growth[now.key], shrinking.drains_s(now)) == (-5, 60)
    assert (growing.growth[now.key], growing.drains_s(deeper)) == (5, None)
    assert Snapshot(sample(now)).drains_s(now) is None


def test_a_channel_paused_on_one_of_its_nsqd_is_reported() -> None:
    waiting = {0: "0 waiting", 1000: "1,000 waiting"}
    for depth, text in waiting.items():
        rows = [row("a", "c", node="one", depth=depth, paused=True), row("a", "c", node="two")]
        assert [problem.text for problem in find_problems(sample(*rows))] == [
            f"on 1 of 2 nsqd; {text}"
        ]


def test_ingress_is_summed_over_topics_and_other_rates_over_channels() -> None:
    both = rates(ingress=5, finish=3)
    sums = sums_of([*(row("a", name, rates=both) for name in ("", "one", "two")), row("a", "new")])

    assert (sums.topics, sums.channels, sums.ingress, sums.copies, sums.finish) == (1, 3, 5, 10, 6)
    assert sums_of([row("a")]).ingress is None


def test_figures_are_rounded_and_have_a_unit() -> None:
    assert [*map(figures.count, (1234567, None))] == ["1,234,567", "—"]
    assert [*map(figures.rate, (0.01, 3.14, 12345.6))] == ["<0.1", "3.1", "12,346"]
    durations = [figures.seconds(seconds) for seconds in (0.0000021, 0.0123, 75, 7500)]
    assert durations == ["2 µs", "12.3 ms", "1m", "2h5m"]
    assert (figures.age(-5), figures.size(1536)) == ("0s", "1.5 KiB")
    assert [*map(figures.brief, (999.4, 999_999))] == ["999", "1M"]
    assert [*map(format_utc, (1e300, 0))] == ["—", "1970-01-01 00:00:00 UTC"]


def test_a_trend_has_its_own_scale_and_gaps_for_unknown_values() -> None:
    high = figures.spark([(0.0, 10_000.0), (1.0, 10_200.0)])
    assert high == ("M0.0 17.0L80.0 1.0", "10k \N{EN DASH} 10.2k")
    assert figures.spark([(0.0, 0.0), (1.0, 0.0)]).range_text == ""
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, 0.0), (4.0, 2.0)]

    assert figures.line_path(points, 40, 12, 0, 2) == "M0.0 6.0L10.0 1.0M30.0 11.0L40.0 1.0"
    assert figures.line_path([(0.0, 1.0), (1.0, None)], 40, 12, 0, 2) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(JSON) | st.dictionaries(st.text(), JSON))
def test_layout_of_json_keeps_its_value(document: object) -> None:
    formatted = shown_body(json.dumps(document).encode())

    assert formatted.kind == "JSON"
    assert json.loads(formatted.text) == json.loads(json.dumps(document))


def test_any_body_is_shown() -> None:
    cut = b"x" * (MAX_SHOWN - 1) + "ë".encode() * 2
    kinds = dict.fromkeys((b"plain", b"{broken", b"[" * 100_000, cut), "text")
    for body, kind in (kinds | {b"\xff\x00": "binary"}).items():
        formatted = shown_body(body)
        assert formatted.kind == kind
        assert len(formatted.text) + formatted.left_out == len(body)


def test_names_that_a_path_cannot_contain_go_into_the_query() -> None:
    to = Addresses("/x/y")

    assert to.queue("orders", "a#ephemeral") == "/x/y/topics/orders/a%23ephemeral"
    assert to.queue("..") == "/x/y/topics?topic=.."
    assert to.queue("a/b", "c") == "/x/y/topics?topic=a%2Fb&channel=c"
    assert to.queue("\ud800") == "/x/y/topics?topic=%3F"


def test_the_connections_of_a_program_are_counted_together() -> None:
    channel = {"channel_name": "archive", "clients": [{"client_id": "c", "hostname": "h"}]}
    stats = read_stats({"topics": [{"topic_name": "orders", "channels": [channel]}]})
    [one] = consumers_of(NodeReport("n:4151", 0.0, stats))
    one.finish = 3
    [program] = programs_of([one, replace(one, node="other")], "ORDERS archive")
    assert (program.finish, len(program.connections)) == (6, 2)
    assert programs_of([one], "orders nobody") == []
