"""Tables on narrow terminals: columns are left out by name, and no value is ever cut.

Tables of a wide terminal are in tests/cli/transcripts.
"""

import re
from itertools import product
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.clusters import KINDS, RunningCluster
from plugins.waiting import wait_until

COMMANDS = [
    "topic list NODE",
    "topic info clicks NODE",
    "channel list clicks NODE",
    "channel info clicks archive NODE",
    "stat --once -t clicks NODE",
    "stat --once --show nodes NODE",
    "topic delete clicks --dry-run NODE",
]


@pytest.mark.parametrize("cluster", KINDS[1:], indirect=True)
def test_narrow_tables_name_the_columns_left_out_and_cut_no_value(
    cluster: RunningCluster, run_nsq: RunNsq
) -> None:
    nsqd = cluster.nsqds[0]
    nsqd.create_channel("clicks", "archive")
    nsqd.publish("clicks", *(b"%d" % n for n in range(12_345)))
    cluster.wait_for_topic("clicks", 1)
    wait_until(lambda: nsqd.depth("clicks", "archive") == 12_345, what="all is in the channel")
    places = {
        "NODE": [f"--nsqd-http-address={nsqd.http_address}"],
        "LOOKUP": cluster.lookupd_options,
    }

    def shown(command: str, columns: int, *more: str) -> str:
        words = [part for word in command.split() for part in places.get(word, [word])]
        env = {"NO_COLOR": "1", "TERM": "dumb"}
        result = run_nsq([*words, *more], env=env, terminal=True, columns=columns)
        assert result.status == 0, result.out
        return result.out.decode()

    full_tables = {command: cells(shown(command, 20, "-o", "wide")) for command in COMMANDS}
    dropped_of_all: set[str] = set()
    for width, command in product((20, 44, 80, 140), COMMANDS):
        head, *rows = full_tables[command]
        text = shown(command, width)
        note = re.search(r"left out on this narrow terminal: ([^;]*); see -o wide", text)
        dropped = re.split(r",\s+", note[1]) if note else []
        kept = [number for number, name in enumerate(head) if name not in dropped]
        assert len(kept) + len(dropped) == len(head), command
        narrow = cells(text.partition("nsq: left out")[0])
        assert narrow == [[row[n] for n in kept] for row in (head, *rows)], command
        assert "…" not in text
        lines = text.partition("nsq: left out")[0].splitlines()
        assert width < 80 or max(len(line.rstrip()) for line in lines) <= width
        if width == 140:
            dropped_of_all |= set(dropped)
    assert "e2e_ms" in dropped_of_all, "the table of stat is wider than all of these"


def test_a_long_word_among_others_is_not_cut(tmp_path: Path, run_nsq: RunNsq) -> None:
    directory = tmp_path / ("long" * 10)
    file = directory / "nsqtools" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("tls = true\n")
    result = run_nsq(
        ["config", "show", "-o", "wide", "--columns", "setting,place"],
        env={"XDG_CONFIG_HOME": str(directory), "NO_COLOR": "1", "TERM": "dumb"},
        terminal=True,
        columns=40,
    )
    text = result.out.decode()
    assert f" {file}" in text, text
    assert "…" not in text


def cells(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
