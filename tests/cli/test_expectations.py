"""What people expect of a command line tool, each row of a comparison tried on a real nsqd.

The rows are those of a comparison of kcat, natscli, rpk, kafkactl, redis-cli and HTTPie. Each has a
short test here that fails when the expectation does; the details are tested beside each command.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from pathlib import Path

import pytest
from manual.tree import Page, read_tree
from plugins.cli import RunNsq, SpawnNsq, all_commands
from plugins.daemons import GoNsqd
from plugins.screens import NsqOnAScreen
from plugins.waiting import patience_s

from nsqtools.cli.options.connection import CONNECTION, ENV

CHECKOUT = Path(__file__).parents[2]
ROWS = 30
SILENCE = f"{patience_s(0.7):g}s"  # longer than a busy machine keeps nsqd from running
BODIES = [b'{"user": "ann", "n": 1}', b'{"user": "bob", "n": 2}', b'{"user": "ann", "n": 3}']


class Tool:
    """The command line beside an nsqd whose topic ``clicks`` has a channel with three messages."""

    def __init__(self, nsqd: GoNsqd, run_nsq: RunNsq) -> None:
        self.nsqd, self.run = nsqd, run_nsq
        self.tcp = f"--nsqd-tcp-address={nsqd.tcp_address}"
        self.http = f"--nsqd-http-address={nsqd.http_address}"
        nsqd.create_channel("clicks", "arch")
        nsqd.publish("clicks", *BODIES)

    def out(self, *words: str, status: int = 0, stdin: bytes = b"") -> str:
        """What a command prints; it must end with ``status``."""
        result = self.run(words, stdin=stdin)
        assert result.status == status, result.err
        return result.out.decode()

    def tail(self, *words: str, status: int = 0) -> list[str]:
        """The lines of a tail of the channel."""
        place = ("-t", "clicks", "-c", "arch", self.tcp, self.http)
        return self.out("tail", *place, *words, status=status).splitlines()

    def bodies(self, topic: str, count: int) -> list[str]:
        place = ("-t", topic, "-c", "all", "--force", self.tcp, self.http)
        return sorted(self.out("tail", *place, "-n", str(count)).splitlines())


@pytest.fixture
def tool(nsqd: GoNsqd, run_nsq: RunNsq) -> Tool:
    return Tool(nsqd, run_nsq)


@pytest.fixture(scope="module")
def tree() -> Page:
    return read_tree()


def test_01_a_template_shapes_messages_wherever_they_are_printed(tool: Tool) -> None:
    form = ("--format", "{topic} {.user}\\n")
    place = ("-t", "clicks", "-c", "arch", tool.tcp, tool.http)

    peeked = tool.out("peek", *place, "-n", "3", *form).splitlines()

    assert sorted(peeked) == ["clicks ann", "clicks ann", "clicks bob"]
    assert sorted(tool.tail("-n", "3", *form)) == sorted(peeked)


def test_02_a_message_has_a_json_envelope(tool: Tool) -> None:
    envelopes = [json.loads(line) for line in tool.tail("-n", "3", "--json")]

    assert {each["topic"] for each in envelopes} == {"clicks"}
    assert {each["body"].encode() for each in envelopes} == set(BODIES)


def test_03_listings_have_every_form(tool: Tool) -> None:
    def listed(form: str) -> str:
        return tool.out("topic", "list", "-o", form, "--columns", "topic,nodes", tool.http)

    row = {"topic": "clicks", "nodes": "1"}
    assert list(csv.DictReader(io.StringIO(listed("csv")))) == [row]
    assert listed("tsv") == "topic\tnodes\nclicks\t1\n"
    assert json.loads(listed("json")) == [{"topic": "clicks", "nodes": 1}]
    assert json.loads(listed("jsonl")) == {"topic": "clicks", "nodes": 1}
    assert listed("wide").split() == ["topic", "nodes", "clicks", "1"]


def test_04_the_output_is_described(tool: Tool) -> None:
    schema = json.loads(tool.out("schema", "topic", "list"))
    [row] = json.loads(tool.out("topic", "list", "--json", tool.http))

    assert set(row) <= set(schema["items"]["properties"])


def test_05_content_is_filtered(tool: Tool) -> None:
    shown = tool.tail("--where", '.user == "ann"', "--pick", ".n", "--until-empty")

    assert sorted(shown) == ["1", "3"]


def test_06_a_count_limits_the_run(tool: Tool) -> None:
    assert len(tool.tail("-n", "2")) == 2
    assert len(tool.tail("-n", "5", "--exit-idle", SILENCE, status=7)) == 1


def test_07_the_end_of_the_queue_ends_the_run(tool: Tool) -> None:
    assert len(tool.tail("--until-empty")) == 3


def test_08_silence_ends_the_run(tool: Tool) -> None:
    assert len(tool.tail("--exit-idle", SILENCE)) == 3


def test_09_times_are_shown(tool: Tool) -> None:
    for line in tool.tail("-n", "3", "--format", "{timestamp:%Y-%m-%dT%H:%M:%SZ}\\n"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line)


def test_10_a_range_of_times_is_replayed(tool: Tool, tmp_path: Path) -> None:
    envelopes = [
        {"topic": "old", "id": f"{n:016x}", "ts": n * 3_600_000_000_000, "attempts": 1}
        | {"nsqd": "a:4150", "body": f"hour {n}"}
        for n in range(24)
    ]
    archive = tmp_path / "old.log"
    archive.write_text("".join(json.dumps(each) + "\n" for each in envelopes))

    chosen = ("--since", "1970-01-01T03:00:00Z", "--until", "1970-01-01T05:00:00Z")
    tool.out("replay", str(archive), *chosen, tool.tcp)

    assert tool.bodies("old", 2) == ["hour 3", "hour 4"]
    assert tool.nsqd.topic_stats("old")["message_count"] == 2


def test_11_a_dashboard_is_live(tool: Tool, nsq_on_a_screen: NsqOnAScreen) -> None:
    top = nsq_on_a_screen(["top", tool.http])

    top.wait_for("clicks")
    tool.nsqd.create_topic("views")
    top.wait_for("views")
    top.press("q")
    top.wait_for_end()


def test_12_speed_is_measured(tool: Tool) -> None:
    report = json.loads(tool.out("bench", "pub", "-n", "500", "--warm-up=0s", "--json", tool.tcp))

    assert (report["messages"], report["messages_per_s"] > 0) == (500, True)


def test_13_profiles_are_listed_chosen_and_ignored(tool: Tool, tmp_path: Path) -> None:
    config = tmp_path / ".config/nsqtools/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[profiles.lab]\nnsqd-http-address = "{tool.nsqd.http_address}"\n')

    tool.out("config", "use", "lab")

    assert "lab" in tool.out("config", "profiles")
    assert tool.out("topic", "list", "--columns", "topic") == "topic\nclicks\n"
    shown = json.loads(tool.out("config", "show", "--no-profile", "--json"))
    assert tool.nsqd.http_address not in str(shown)


def test_14_every_connection_option_has_a_variable(tool: Tool, tree: Page) -> None:
    options = {
        option.names[-1]: option.environment
        for page in tree.walk()
        for option in page.options
        if option.panel == CONNECTION and option.names[-1] != "--no-profile" and not page.is_raw
    }
    env = {"NSQ_NSQD_TCP_ADDRESS": tool.nsqd.tcp_address, "NSQ_TLS": "true"}

    refused = tool.run(["pub", "-t", "clicks", "-m", "x", "--retry-timeout", "0s"], env=env)

    assert {name: ENV + name[2:].replace("-", "_").upper() for name in options} == options
    assert (refused.status, "does not offer TLS" in refused.err) == (5, True)


def test_15_what_is_stronger_is_documented_and_shown(tool: Tool, tmp_path: Path) -> None:
    config = tmp_path / ".config/nsqtools/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('timeout = "1s"\nsnappy = true\n')
    show = ["config", "show", "--json", "--deflate"]

    rows = json.loads(tool.run(show, env={"NSQ_TIMEOUT": "2s"}).out)

    origins = {row["setting"]: row["origin"] for row in rows}
    assert [origins[name] for name in ("deflate", "timeout", "snappy", "tls")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]
    page = (CHECKOUT / "man/nsq-config.5.md").read_text()
    assert "## Precedence" in page


def test_16_any_client_option_can_be_set(tool: Tool) -> None:
    names = {line.split("\t")[0] for line in tool.out("tail", "-X", "list").splitlines()}

    assert {"max_in_flight", "msg_timeout", "lookupd_poll_interval"} <= names
    assert len(tool.tail("-n", "3", "-X", "max_in_flight=1")) == 3
    assert tool.tail("-X", "bogus=1", status=2) == []


def test_17_words_and_names_are_completed(tool: Tool) -> None:
    script = tool.out("completion", "bash")

    assert subprocess.run(["bash", "-n"], input=script.encode(), check=False).returncode == 0
    names = tool.run(["__complete", "topics", tool.http], own_process=True)
    assert names.out in (b"clicks\n", b"")  # nothing where a second is too short


def test_18_every_command_has_a_manual_page() -> None:
    for command, entry in all_commands().items():
        if not entry.hidden:
            page = CHECKOUT / "man/man1" / f"nsq-{command.replace(' ', '-')}.1"
            assert ".SH EXAMPLES" in page.read_text() or entry.raw, command


def test_19_color_is_where_it_is_wanted(tool: Tool) -> None:
    page = ("schema", "-o", "table")

    def colored(env: dict[str, str], *words: str) -> bool:
        return b"\x1b[" in tool.run(words, env=env).out

    assert not colored({}, *page)
    assert colored({"FORCE_COLOR": "1"}, *page)
    assert not colored({"FORCE_COLOR": "1", "NO_COLOR": "1"}, *page)
    assert not colored({"FORCE_COLOR": "1"}, "topic", "list", "--json", tool.http)
    assert colored({}, "stat", "--once", "-o", "table", "--color", "always", tool.http)


def test_20_progress_is_on_a_terminal_only(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a line\n" * 2000)
    pub = ["pub", "-t", "clicks", "-f", str(tmp_path / "lines"), "--rate", "4000", tool.tcp]

    piped = tool.run(pub)
    shown = tool.run(pub, terminal=True)

    assert (piped.status, piped.out, "\r" in piped.err) == (0, b"", False)
    assert b"\r\x1b[K" in shown.out


def test_21_exit_codes_mean_something(tool: Tool) -> None:
    tool.out("topic", "info", "clicks", tool.http)
    tool.out("stat", "--once", "-t", "clicks", "--max-depth", "1", tool.http, status=1)
    tool.out("topic", "list", "--bogus", status=2)
    tool.out("topic", "info", "klicks", tool.http, status=3)
    tool.out("topic", "list", "--nsqd-http-address=127.0.0.1:1", status=4)
    tool.out("topic", "list", tool.http, "--nsqd-http-address=127.0.0.1:1", status=6)


def test_22_a_reader_that_leaves_is_no_error(tool: Tool, spawn_nsq: SpawnNsq) -> None:
    process = spawn_nsq(["tail", "-t", "clicks", "-c", "arch", tool.tcp, tool.http])
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    while process.poll() is None:
        tool.nsqd.publish("clicks", b"one more")

    assert (process.returncode, process.stderr.read()) == (141, b"")


def test_23_it_can_be_quiet_and_talk(tool: Tool) -> None:
    pub = ["pub", "-t", "clicks", "-m", "x", tool.tcp]

    quiet, plain, loud = (tool.run([*pub, *more]).err for more in (["-q"], [], ["-vv"]))

    assert quiet == ""
    assert "1 confirmed" in plain
    assert len(loud.splitlines()) > len(plain.splitlines())


def test_24_log_lines_are_objects(tool: Tool) -> None:
    tail = ["tail", "-t", "clicks", "-c", "arch", "-n", "1", "-vv", "--log-format", "json"]
    logged = tool.run([*tail, tool.tcp, tool.http]).err

    lines = [line for line in logged.splitlines() if line.startswith("{")]
    assert lines
    assert all({"level", "message"} <= set(json.loads(line)) for line in lines)


def test_25_a_dry_run_changes_nothing(tool: Tool) -> None:
    plan = tool.out("topic", "delete", "clicks", "--dry-run", tool.http)

    assert "delete\tclicks" in plan
    assert tool.nsqd.depth("clicks", "arch") == 3


def test_26_what_destroys_asks_and_can_be_let_through(tool: Tool) -> None:
    delete = ["topic", "delete", "clicks", tool.http]

    tool.out(*delete, status=2)
    declined = tool.run(delete, stdin=b"\n", terminal=True)
    assert (declined.status != 0, tool.nsqd.depth("clicks", "arch")) == (True, 3)
    tool.out(*delete, "--yes")
    assert not tool.nsqd.stats()["topics"]


def test_27_errors_say_what_to_do(tool: Tool) -> None:
    for words, hint in (
        (["topic", "info", "clikcs", tool.http], "Did you mean clicks?"),
        (
            ["tail", "-t", "clicks", "-n", "1", f"--nsqd-tcp-address={tool.nsqd.http_address}"],
            "TCP",
        ),
        (["topic", "delete", "clicks", tool.http], "--yes"),
    ):
        [error, advice] = tool.run(words).err.splitlines()[-2:]
        assert error.startswith("nsq: error: ")
        assert advice.startswith("hint: ")
        assert hint in advice


def test_28_a_server_is_in_it(tool: Tool) -> None:
    report = json.loads(tool.out("bench", "e2e", "--embedded", "-n", "200", "--json"))

    assert report["intact"]


def test_29_programs_read_results_and_errors(tool: Tool) -> None:
    counts = json.loads(tool.out("pub", "-t", "clicks", "-m", "x", "--json", tool.tcp))
    failed = tool.run(["topic", "info", "klicks", "--json", tool.http])

    assert counts["confirmed"] == 1
    error = json.loads(failed.err)
    assert (failed.out, error["code"], error["status"]) == (b"", "not_found", 3)


@pytest.mark.parametrize(
    ("words", "stdin", "bodies"),
    [
        ([], b"a\nb\n", ["a", "b"]),
        (["-d", "\\0"], b"a\0b", ["a", "b"]),
        (["--format", "raw"], b"whole", ["whole"]),
        (["--format", "jsonl"], b'{"body": "a"}\n', ["a"]),
        (["hello"], b"", ["hello"]),
        (["-m", "a", "-m", "b"], b"", ["a", "b"]),
        (["-m", "no {n}", "--repeat", "2"], b"", ["no 1", "no 2"]),
    ],
    ids=["lines", "delimiter", "raw", "jsonl", "argument", "option", "template"],
)
def test_30_messages_come_in_many_ways(
    tool: Tool, words: list[str], stdin: bytes, bodies: list[str]
) -> None:
    tool.nsqd.create_channel("in", "all")

    tool.out("pub", "-t", "in", *words, tool.tcp, stdin=stdin)

    assert tool.bodies("in", len(bodies)) == bodies


def test_every_row_has_its_test() -> None:
    numbers = re.findall(r"^def test_(\d\d)_", Path(__file__).read_text("utf-8"), re.M)

    assert numbers == [f"{n:02}" for n in range(1, ROWS + 1)]
