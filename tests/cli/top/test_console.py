"""What keys and clicks do to the screen of ``nsq top``, without a terminal."""

from __future__ import annotations

import pytest
from plugins.hostile_cluster import EVIL

from nsqtools.cli.top.columns import Kind
from nsqtools.cli.top.console import CarryOut, Change, Console, Messages, Quit
from nsqtools.cli.top.keyboard import Click, KeyReader
from nsqtools.cli.top.lines import parse_line_filter
from nsqtools.cli.top.overlays import MOST_MESSAGE_LINES, MessagePane
from nsqtools.cli.top.screen import draw, plain
from nsqtools.cli.top.text import cells_of, fit, short, sparkline
from nsqtools.cli.top.view import Start, TopView
from nsqtools.cluster.admin import Action
from nsqtools.cluster.directory import NodeReport
from nsqtools.cluster.queue_rows import rows_of, totals
from nsqtools.cluster.sampling import NodeState, Sample
from nsqtools.protocol.stats import read_stats


def sample_of(nodes: dict[str, dict[str, int]], *, channels: int = 0, silent: str = "") -> Sample:
    """Nodes with topics that are so deep, each with so many channels."""
    states = []
    for address, depths in nodes.items():
        topics = [
            {
                "topic_name": name,
                "depth": depth,
                "channels": [{"channel_name": f"c{n}", "depth": 1} for n in range(channels)],
            }
            for name, depth in depths.items()
        ]
        report = NodeReport(address, 0.0, read_stats({"topics": topics, "health": "OK"}))
        states.append(NodeState(address, rows_of([report]), [], health="OK"))
    if silent:
        states.append(NodeState(silent, [], [], silent_s=72.0, error="connection refused"))
    rows = [row for state in states for row in state.rows]
    return Sample(0, rows, totals(rows), (), (), tuple(states))


def look(**depths: int) -> Sample:
    """One nsqd whose topics are so deep."""
    return sample_of({"a:1": depths})


def console(sample: Sample, *, allows_changes: bool = True, **start: object) -> Console:
    view = TopView(Start(**start))  # type: ignore[arg-type]
    view.show(sample)
    return Console(view, allows_changes=allows_changes)


def texts(console: Console, width: int = 80, height: int = 24) -> list[str]:
    return [row.text for row in draw(console, width, height, unicode=True)]


def press(console: Console, *keys: str) -> object:
    for key in keys:
        request = console.press(key)
    return request


def test_the_selection_stays_with_its_topic_when_lines_change_places() -> None:
    view = TopView()
    view.show(look(clicks=3, views=2, orders=1))
    view.sort_by("depth")
    view.move(1)
    assert view.selected == "views"

    view.show(look(clicks=3, views=9, orders=1))
    assert [line.key for line in view.lines()] == ["views", "clicks", "orders"]
    assert view.position() == 0


def test_when_the_selected_line_is_gone_the_one_in_its_place_is_selected() -> None:
    view = TopView()
    view.show(look(a=1, b=1, c=1))
    view.select(1)
    view.show(look(a=1, c=1))
    assert view.selected_line() is view.lines()[1]
    view.show(look(a=1))
    assert view.selected_line() is view.lines()[0]
    view.show(look())
    assert view.selected_line() is None


def test_unknown_values_come_last_in_both_orders() -> None:
    view = TopView()
    view.show(sample_of({"a:1": {"clicks": 5}, "b:1": {"clicks": 9}}, silent="c:1"))
    view.go_to(Kind.NODES)
    view.sort_by("waiting")
    assert [line.key for line in view.lines()] == ["b:1", "a:1", "c:1"]
    view.reverse()
    assert [line.key for line in view.lines()] == ["a:1", "b:1", "c:1"]


def test_a_skewed_nsqd_is_seen_in_a_topic() -> None:
    shown = console(sample_of({"a:1": {"clicks": 5, "x": 0}, "b:1": {"clicks": 900}}))
    press(shown, "n")
    rows = [line.split() for line in texts(shown) if line.startswith(("a:1", "b:1"))]
    assert [(row[0], row[2]) for row in rows] == [("a:1", "5"), ("b:1", "900")]
    press(shown, "escape")
    assert shown.view.kind is Kind.TOPICS
    assert shown.view.selected == "clicks"


def test_frozen_drops_samples_and_keeps_the_selection_free() -> None:
    shown = console(look(a=1, b=2))
    press(shown, " ")
    before = texts(shown)
    shown.view.show(look(a=7, c=1))
    assert texts(shown) == before
    press(shown, "down")
    assert shown.view.selected == "b"
    press(shown, " ")
    shown.view.show(look(a=7, c=1))
    assert any(line.startswith("c ") for line in texts(shown))


def test_a_filter_has_words_and_conditions() -> None:
    shown = console(look(clicks=5, views=0, web=9))
    press(shown, "/", *"DEPTH", "escape")
    press(shown, "/", *"w depth>0", "enter")
    assert [line.key for line in shown.view.lines()] == ["web"]
    shown.view.set_filter("dpth>0")
    assert len(shown.view.lines()) == 3
    assert "unknown column 'dpth'" in texts(shown)[1]
    shown.view.set_filter("nothing")
    assert any("nothing meets the filter" in line for line in texts(shown))
    assert parse_line_filter("depth >= 3 web").words == ("web",)


def test_columns_are_dropped_before_anything_is_cut_and_named() -> None:
    name = "orders-eu-west-1-production-archive"
    shown = console(look(**{name: 182_000}))
    for width in (46, 60, 80, 120, 200):
        lines = texts(shown, width)
        assert all(cells_of(line) == width for line in lines)
        [line] = [line for line in lines if line.startswith("orders")]
        assert name in line
        assert "…" not in line
        cells = line.split()
        heading = [cell.strip("▼") for cell in lines[2].split()]
        if "depth" in heading:
            assert cells[heading.index("depth")] == "182000"
        assert ("left out: " in lines[1]) == (width < 200)


def test_what_is_cut_all_the_same_ends_with_an_ellipsis() -> None:
    shown = console(look(**{"x" * 64: 1}))
    [line] = [line for line in texts(shown, 40) if line.startswith("xxx")]
    assert "…" in line
    assert cells_of(line) == 40


def test_who_does_not_answer_is_named_with_the_time() -> None:
    shown = console(sample_of({"a:1": {"clicks": 5}}, silent="c:1"))
    lines = texts(shown)
    assert "2 nsqd, 1 silent" in lines[0]
    assert lines[1].startswith("c:1 does not answer for 1m: connection refused")
    press(shown, "2")
    assert any(line.startswith("c:1") and "silent 1m" in line for line in texts(shown))


def test_only_the_lines_on_the_screen_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = console(sample_of({"a:1": {f"t{n:04}": n for n in range(2_000)}}))
    made: list[object] = []
    monkeypatch.setattr("nsqtools.cli.top.screen.short", lambda cell: made.append(cell) or "")
    texts(shown)
    assert len(made) < 24 * 12


def test_a_narrow_screen_says_what_it_needs() -> None:
    shown = console(look(a=1))
    assert texts(shown, 39)[0].startswith("nsq top needs 40 columns")
    assert texts(shown, 80, 5)[0].startswith("nsq top needs 40 columns")
    press(shown, "down", "page down", "?")
    assert len(texts(shown, 10, 2)) == 2


@pytest.mark.parametrize("key", "puedtv")
def test_keys_change_nothing_unless_they_may(key: str) -> None:
    shown = console(look(clicks=1), allows_changes=False)
    assert press(shown, key) is None
    assert "--allow-changes" in texts(shown)[-1]


def test_a_change_is_planned_shown_and_agreed_to_by_name() -> None:
    shown = console(look(clicks=1))
    change = press(shown, "d")
    assert change == Change(Action.DELETE, "clicks", "")
    assert isinstance(change, Change)
    shown.ask(change, ["delete topic clicks on a:1"])
    assert press(shown, *"click", "enter") is None
    assert press(shown, "s", "enter") == CarryOut(change)
    assert press(shown, "q") == Quit()


@pytest.mark.parametrize("key", ["escape", "n", "enter"])
def test_what_is_not_agreed_to_is_not_done(key: str) -> None:
    shown = console(look(clicks=1))
    change = press(shown, "p")
    assert isinstance(change, Change)
    shown.ask(change, ["pause topic clicks on a:1"])
    assert press(shown, key) is None
    assert press(shown, "y") is None


def test_a_plan_that_comes_after_one_went_on_is_not_shown() -> None:
    shown = console(look(clicks=1, views=2))
    change = press(shown, "d")
    assert isinstance(change, Change)
    press(shown, "down")
    shown.ask(change, ["delete topic clicks on a:1"])
    assert shown.overlay is None


@pytest.mark.parametrize("name", ["*", "/./", EVIL, "a b"])
def test_a_name_that_nsq_does_not_allow_is_never_planned_for(name: str) -> None:
    """A topic named * would be a pattern that every topic matches."""
    shown = console(look(**{name: 1}))
    assert press(shown, "d") is None
    assert "not a name that NSQ allows" in texts(shown)[-1]


def test_a_change_of_all_nsqd_is_not_begun_from_the_view_of_one() -> None:
    shown = console(sample_of({"a:1": {"clicks": 5}, "b:1": {"clicks": 5}}))
    press(shown, "2", "enter")
    assert press(shown, "d") is None
    assert "every nsqd" in texts(shown)[-1]


def test_tail_is_of_a_topic_and_view_of_a_channel() -> None:
    shown = console(sample_of({"a:1": {"clicks": 5}}, channels=2))
    assert press(shown, "v") is None
    press(shown, "enter", "down")
    assert press(shown, "v") == Messages("clicks", "c1", is_peek=True)
    press(shown, "escape")
    assert press(shown, "t") == Messages("clicks", "c1", is_peek=False)


def test_clicks_select_open_and_sort() -> None:
    shown = console(sample_of({"a:1": {"clicks": 1, "views": 2}}, channels=1))
    lines = texts(shown)
    shown.press(Click(lines[2].index("waiting"), 2))
    assert shown.view.look.sort == "waiting"
    lines = texts(shown)
    row = next(n for n, line in enumerate(lines) if line.startswith("views"))
    shown.press(Click(1, row))
    assert shown.view.selected == "views"
    shown.press(Click(1, row))
    assert shown.view.scope.topic == "views"
    texts(shown)
    shown.press(Click(1, 20))
    shown.press(Click(0, 99))


def test_messages_are_bounded_and_stay_where_one_reads() -> None:
    pane = MessagePane("tail clicks", folds=False)
    pane.add([f"m{n}" for n in range(MOST_MESSAGE_LINES)])
    assert pane.body(80, 3)[-1] == f"m{MOST_MESSAGE_LINES - 1}"
    pane.press("up", 3)
    seen = pane.body(80, 3)
    pane.add(["next"] * 10)
    assert pane.body(80, 3) == seen
    pane.press(" ", 3)
    pane.add(["missed"])
    assert "1 not shown" in pane.hint
    pane.press("end", 3)
    assert pane.body(80, 3)[-1] == "next"


def test_keys_are_read_from_whatever_comes_together() -> None:
    def keys(data: bytes) -> list[object]:
        return [*KeyReader().feed(data)]

    assert keys(b"\x1b[A\x1b[5~jq\r\x7f") == ["up", "page up", "j", "q", "enter", "backspace"]
    assert keys(b"\x1b[1;5Cx\x1bOB") == ["x", "down"]
    assert keys("ü\x00\xff".encode("latin-1")) == []
    assert keys("ü".encode()) == ["ü"]
    assert keys(b"\x1b[<0;3;5M\x1b[<0;3;5m\x1b[<64;1;1M") == [Click(2, 4), "wheel up"]
    assert keys(b"\x1b[<99999;3;5M\x1b[" + b"1" * 80) == [*"1" * 18]


def test_keys_come_in_pieces_and_an_escape_alone_is_a_key() -> None:
    reader = KeyReader()
    assert reader.feed(b"a\x1b") == ["a"]
    assert reader.is_waiting
    assert reader.flush() == ["escape"]
    assert reader.feed(b"\x1b") == []
    assert reader.feed(b"[") == []
    assert reader.feed(b"Aq") == ["up", "q"]
    assert reader.feed("ü".encode()[:1]) == []
    assert reader.feed("ü".encode()[1:]) == ["ü"]
    assert not reader.is_waiting
    assert reader.flush() == []


def test_numbers_stay_short_texts_fit_and_trends_are_bars() -> None:
    assert [short(value) for value in (999_999, 12_345_678, 2.5e9, 0.04, None)] == [
        "999999",
        "12.3M",
        "2.5G",
        "0.0",
        "-",
    ]
    assert short(-(2**63)) == "-9.2E"
    assert sparkline([0, 1, 7, 3.5], 3, unicode=True) == "▂█▅"
    assert sparkline([0, 0], 3, unicode=False) == "__"
    assert fit("表表表", 5, unicode=True) == "表表…"
    assert fit("abcdef", 5, unicode=False) == "ab..."
    assert fit("ab", 4, unicode=True, is_right=True) == "  ab"
    assert plain("↑ é") == r"k \xe9"
