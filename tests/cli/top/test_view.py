"""The list of ``nsq top``: its keys and its text, without textual."""

import pytest
from plugins.hostile_cluster import EVIL
from rich.cells import cell_len

from nsqtools.cli.top.screen import draw, fit, short, sparkline
from nsqtools.cli.top.view import TopView, ViewKind, parse_line_filter
from nsqtools.cluster.problems import Fault, Problem
from nsqtools.cluster.queue_rows import NodeReport, QueueRow, rows_of_topic, totals
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.protocol.stats import read_stats


def sample_of(nodes: dict[str, dict[str, int]], *, silent: str = "") -> Sample:
    """A sample of nodes whose topics have these depths."""
    states = []
    for address, depths in nodes.items():
        topics = [
            {"topic_name": name, "depth": depth, "channels": []} for name, depth in depths.items()
        ]
        report = NodeReport(address, 0.0, read_stats({"topics": topics, "health": "OK"}))
        rows = [row for topic in report.stats.topics or () for row in rows_of_topic(address, topic)]
        states.append(NodeState(address, rows, [], health="OK"))
    if silent:
        states.append(NodeState(silent, [], [], silent_s=72.0, error="connection refused"))
    rows = [row for state in states for row in state.rows]
    return Sample(0, rows, totals(rows), (), (), tuple(states))


def look(**depths: int) -> Sample:
    """A sample of one nsqd whose topics have these depths."""
    return sample_of({"a:1": depths})


def view_of(sample: Sample) -> TopView:
    view = TopView()
    view.show(sample)
    return view


def texts(view: TopView, width: int = 80, height: int = 24) -> list[str]:
    return [row.text for row in draw(view, width, height, "? help").rows]


def press(view: TopView, *keys: str) -> None:
    for key in keys:
        names = {" ": "space", ">": "greater_than_sign", "/": "slash"}
        assert view.press(names.get(key, key), key if len(key) == 1 else None)


def keys(view: TopView) -> list[str]:
    return [line.key for line in view.lines()]


def test_the_selection_follows_its_topic_when_lines_move() -> None:
    view = view_of(look(clicks=3, views=2, orders=1))
    view.sort_by("depth")
    view.move(1)
    assert view.selected == "views"

    view.show(look(clicks=3, views=9, orders=1))
    assert keys(view) == ["views", "clicks", "orders"]
    assert view.position() == 0

    for wheel, selected in (("wheel down", "orders"), ("wheel up", "views")):
        press(view, wheel)
        assert view.selected == selected

    # when it disappears, the line in its place is selected
    view = view_of(look(a=1, b=1, c=1))
    view.select(1)
    view.show(look(a=1, c=1))
    assert view.selected_line() is view.lines()[1]
    view.show(look(a=1))
    assert view.selected_line() is view.lines()[0]
    view.show(look())
    assert view.selected_line() is None


def test_unknown_values_come_last_in_both_orders() -> None:
    view = view_of(sample_of({"a:1": {"clicks": 5}, "b:1": {"clicks": 9}}, silent="c:1"))
    view.go_to(ViewKind.NODES)
    view.sort_by("waiting")
    assert keys(view) == ["b:1", "a:1", "c:1"]
    press(view, "r")
    assert keys(view) == ["a:1", "b:1", "c:1"]
    press(view, "s")
    assert "clients▼" in texts(view)[3]
    assert keys(view)[-1] == "c:1"


def test_a_filter_has_words_and_conditions() -> None:
    view = view_of(look(clicks=5, views=0, web=9))
    press(view, "/", *"DEPTH", "escape")
    press(view, "/", *"w depthx", "backspace", *">0")
    assert "filter: w depth>0_" in texts(view)[2]
    press(view, "enter")
    assert keys(view) == ["web"]
    view.set_filter("dpth>0")
    assert len(view.lines()) == 3
    assert "unknown column 'dpth'" in texts(view)[2]
    view.set_filter("none")
    assert any("nothing meets the filter" in line for line in texts(view))
    assert parse_line_filter("depth >= 3 web").words == ("web",)
    press(view, "escape")
    assert keys(view) == ["web", "clicks", "views"]


def test_columns_are_dropped_and_named_before_values_are_cut() -> None:
    name = "orders-eu-west-1-production-archive"
    view = view_of(look(**{name: 182_000}))
    for width in (46, 60, 80, 120, 200):
        lines = texts(view, width)
        assert all(cell_len(line) == width for line in lines)
        [line] = [line for line in lines if line.startswith(name)]
        assert "…" not in line
        heading = [cell.strip("▼") for cell in lines[3].split()]
        cells = dict(zip(heading, line.split(), strict=False))
        assert cells["waiting"] == "182,000"
        assert ("left out: " in lines[2]) == (width < 200)


def test_only_the_lines_on_the_screen_are_formatted(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(sample_of({"a:1": {f"t{n:04}": n for n in range(2_000)}}))
    formatted: list[object] = []
    monkeypatch.setattr("nsqtools.cli.top.screen.short", lambda cell: formatted.append(cell) or "")
    texts(view)
    assert 0 < len(formatted) < 24 * 12


def test_invalid_names_and_single_nsqd_lines_are_no_target_of_actions() -> None:
    for name in ("*", "/./", EVIL, "a b"):  # a topic named * would be a pattern that matches all
        assert "not a name that NSQ allows" in view_of(look(**{name: 1})).target()

    view = view_of(sample_of({"a:1": {"clicks": 5}, "b:1": {"clicks": 5}}))
    assert view.target() == ("clicks", "")
    press(view, "2")
    assert "select a topic" in view.target()
    press(view, "enter")
    assert "every nsqd" in view.target()


def test_numbers_stay_short_texts_fit_and_trends_are_bars() -> None:
    values = (999_999, 12_345_678, 2.5e9, 0.04, None)
    assert [short(value) for value in values] == ["999,999", "12.3M", "2.5G", "0.0", "-"]
    assert short(-(2**63)) == "-9.2E"
    assert sparkline([0, 1, 7, 3.5], 3) == "▁█▄"
    assert fit("表表表", 5) == "表表…"
    assert fit("ab", 4, is_right=True) == "  ab"


def test_a_silent_nsqd_keeps_its_last_numbers_outside_the_sums() -> None:
    sample = sample_of({"a:1": {"clicks": 5}, "b:1": {"clicks": 9}})
    alive, dead = sample.nodes
    nodes = (alive, dead._replace(error="connection refused", silent_s=72.0))
    view = view_of(Sample(0, alive.rows, totals(alive.rows), (), (), nodes))
    assert "1 of 2 nsqd respond  1 topic  5 waiting" in texts(view)[0]
    press(view, "2", "j")
    assert ["b:1", "silent", "1m", "9"] in [text.split()[:4] for text in texts(view)]
    press(view, "enter")
    assert ["clicks", "9"] in [text.split()[:2] for text in texts(view)]


def test_a_stuck_consumer_is_named_at_its_topic_and_its_channel() -> None:
    view = view_of(look(clicks=5))
    channel = {"topic": "clicks", "depth": 9, "disk": 0, "paused": False}
    rows = [QueueRow(node="", channel=name, messages=9, **channel) for name in ("", "arch")]
    stuck = Problem(Fault.STUCK, "9 waiting", "clicks", "arch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nsqtools.cli.top.view.find_problems", lambda *_: [stuck])
        view.show(Sample(2.0, rows, rows, (), (), at_s=2.0))
    assert texts(view)[4].startswith("clicks (stuck) ")
    press(view, "enter")
    assert texts(view)[4].startswith("arch (stuck) ")
