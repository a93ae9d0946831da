"""Each command with its output, as a reviewed transcript.

A transcript is a file in transcripts/:

    = nsqd                               daemons that run, with flags: nsqd, other, lookupd
    ~ \\d+\\.\\d+ MS                         a pattern that varies, and its replacement
    $ printf 'a\\nb\\n' | nsq pub -t clicks   typed; other commands of the line run in a shell
    % nsq topic list                     typed on a terminal of 100 columns (``COLUMNS=80 nsq ...``)
      on stdout                          the output: two blanks before stdout,
    ! nsq: on stderr                     an exclamation mark before stderr,
    [3]                                  and the exit status unless it is 0

Commands run in an empty directory, which is their home, find nsqd through the environment, and may
use the addresses of daemons: ``$TCP``, ``$HTTP``, ``$OTHER_TCP``, ``$OTHER_HTTP``, ``$LOOKUP``,
``$LOOKUP_TCP``, ``$NAMED_TCP`` and ``$NAMED_HTTP`` (the nsqd at localhost). The output shows these
names, too. Before each command, all published messages are in their channels, none is in flight and
nsqlookupd lists all topics. A transcript with daemons holds for the Go daemons and, with
``-m slow``, for the embedded ones. Columns on a terminal are shown two blanks apart. A raw control
character is shown as its picture (``␛``), a byte that is not UTF-8 as ``<ff>``.

``NSQTOOLS_TEST_RECORD=1 pytest tests/cli/test_transcripts.py`` records the current output; review
it with ``git diff``.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

import pytest
from plugins import cli
from plugins.cli import Result, RunNsq
from plugins.clusters import KINDS
from plugins.daemons import EmbeddedLookupServer, EmbeddedServer, Nsqd, Nsqlookupd
from plugins.servers import DataPath, Serve, missing_programs
from plugins.waiting import wait_until

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))
OF_SPARK = [path for path in TRANSCRIPTS if path.stem.startswith("spark-")]
COLUMNS = 100
SHELL = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
Kind = tuple[Callable[..., Nsqd], Callable[..., Nsqlookupd]]
Play = Callable[[Path, Kind], None]
IS_RECORDING = os.environ.get("NSQTOOLS_TEST_RECORD", "0") != "0"


def cases() -> Iterator[object]:
    # tests/conformance compares both kinds of daemons, so the Go programs suffice where built.
    long_forms = () if missing_programs() else (pytest.mark.slow,)
    for path in TRANSCRIPTS:
        has_daemons = re.search(r"^= ", path.read_text("utf-8"), re.MULTILINE)
        kinds = KINDS[: 1 if IS_RECORDING else None] if has_daemons else KINDS[1:]
        for kind in kinds if path not in OF_SPARK else ():
            marks = long_forms if has_daemons and kind is KINDS[1] else kind.marks
            yield pytest.param(path, kind.values[0], id=f"{path.stem}-{kind.id}", marks=marks)


@pytest.fixture
def play(
    serve: Serve,
    data_path: DataPath,
    run_nsq: RunNsq,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Play:
    """Check a transcript. Commands of bench, which fail early, and of Spark run in this process."""
    monkeypatch.setattr(cli, "NEED_A_PROCESS", cli.NEED_A_PROCESS - {"bench", "spark"})
    monkeypatch.chdir(tmp_path)
    return lambda path, kind: check(path, Cluster(kind, serve, data_path), run_nsq)


@pytest.mark.parametrize(("path", "kind"), list(cases()))
def test_a_command_prints_its_transcript(play: Play, path: Path, kind: Kind) -> None:
    play(path, kind)


@pytest.mark.parametrize("path", OF_SPARK, ids=lambda path: path.stem)
def test_a_spark_command_prints_its_transcript(
    play: Play, path: Path, shared_session: None
) -> None:
    """With the session that the tests share."""
    play(path, (EmbeddedServer, EmbeddedLookupServer))


def check(path: Path, cluster: Cluster, run_nsq: RunNsq) -> None:
    """Type a transcript again and compare its output, or write it while recording."""
    text = path.read_text("utf-8")
    for name, flags in re.findall(r"^= (\w+) *(.*)$", text, re.MULTILINE):
        cluster.start(name, *flags.split())
    session = Session(run_nsq, cluster, re.findall(r"^~ (.*) (\S+)$", text, re.MULTILINE))
    transcript = []
    for line in text.splitlines():
        if not line.startswith(("  ", "! ", "[")):
            transcript.append(line)
        if line.startswith(("$ ", "% ")):
            transcript += session.type(line)
    if IS_RECORDING:
        path.write_text("\n".join(transcript) + "\n", "utf-8")
    assert transcript == text.splitlines() or IS_RECORDING, "\n".join(transcript)


class Cluster:
    """The daemons of a transcript. ``names`` has their addresses by variable."""

    def __init__(self, kind: Kind, serve: Serve, data_path: DataPath) -> None:
        self.names: dict[str, str] = {}
        self._kind, self._serve, self._data_path = kind, serve, data_path
        self._nsqds: list[Nsqd] = []
        self._lookupds: list[Nsqlookupd] = []

    def start(self, name: str, *flags: str) -> None:
        """Start a daemon by its name in transcripts; later nsqd register with an nsqlookupd."""
        if name == "lookupd":
            self._lookupds.append(self._serve(self._kind[1](*flags)))
            self.names["LOOKUP"] = self._lookupds[-1].http_address
            self.names["LOOKUP_TCP"] = self._lookupds[-1].tcp_address
            return
        register = [f"-lookupd-tcp-address={lookupd.tcp_address}" for lookupd in self._lookupds]
        nsqd = self._kind[0](self._data_path(), "-broadcast-address=127.0.0.1", *register, *flags)
        self._nsqds.append(self._serve(nsqd))
        prefix = "" if name == "nsqd" else f"{name.upper()}_"
        self.names |= {f"{prefix}TCP": nsqd.tcp_address, f"{prefix}HTTP": nsqd.http_address}
        if name == "nsqd":
            for kind, address in ("TCP", nsqd.tcp_address), ("HTTP", nsqd.http_address):
                self.names[f"NAMED_{kind}"] = f"localhost:{address.rpartition(':')[2]}"

    def settle(self) -> None:
        """Wait until nothing is under way between or inside the daemons."""
        wait_until(self._is_settled, what="the daemons have settled", timeout_s=20)

    def _is_settled(self) -> bool:
        topics = [topic for nsqd in self._nsqds for topic in nsqd.stats()["topics"] or []]
        channels = [channel for topic in topics for channel in topic["channels"] or []]
        return (
            not any(
                topic["channels"] and topic["depth"] and not topic["paused"] for topic in topics
            )
            and not any(channel["in_flight_count"] or channel["clients"] for channel in channels)
            and all(self._knows(lookupd, topics) for lookupd in self._lookupds)
        )

    def _knows(self, lookupd: Nsqlookupd, topics: list[dict[str, object]]) -> bool:
        registered = set(lookupd.json("/topics")["topics"])
        return len(lookupd.json("/nodes")["producers"]) == len(self._nsqds) and registered >= {
            topic["topic_name"] for topic in topics
        }


class Session:
    """Types the lines of a transcript."""

    def __init__(self, run_nsq: RunNsq, cluster: Cluster, masks: list[tuple[str, str]]) -> None:
        self._run_nsq, self._cluster, self._masks = run_nsq, cluster, masks

    def type(self, line: str) -> list[str]:
        """Run a line of a transcript and return the lines of its output."""
        self._cluster.settle()
        typed = Template(line[2:]).safe_substitute(self._cluster.names)
        status, out, err = 0, b"", ""
        for part in typed.split(" | "):
            if re.match(r"([A-Z_]+=\S* )*nsq\b", part):
                done = self._nsq(shlex.split(part), out, is_on_terminal=line.startswith("%"))
            else:
                shell = ["sh", "-c", part]
                ended = subprocess.run(shell, input=out, env=SHELL, capture_output=True)
                done = Result(ended.returncode, ended.stdout, ended.stderr.decode())
            status, out, err = status or done.status, done.out, err + done.err
        end = [f"[{status}]"] if status else []
        printed = self._masked(out.decode("utf-8", "surrogateescape"), line)
        return [*printed, *(f"! {text[2:]}" for text in self._masked(err, line)), *end]

    def _nsq(self, words: list[str], stdin: bytes, *, is_on_terminal: bool) -> Result:
        names = self._cluster.names
        env = {f"NSQ_NSQD_{name}_ADDRESS": names[name] for name in ("TCP", "HTTP") if name in names}
        while words[0] != "nsq":
            name, _, env[name] = words.pop(0).partition("=")
        if is_on_terminal:
            env = {"TERM": "dumb", "NO_COLOR": "1", **env}
            columns = int(env.pop("COLUMNS", COLUMNS))
            return self._run_nsq(words[1:], stdin, env, terminal=True, columns=columns)
        return self._run_nsq(words[1:], stdin, env)

    def _masked(self, text: str, line: str) -> list[str]:
        """Return the lines of a text as transcripts show them, with addresses etc. masked."""
        for name, address in self._cluster.names.items():
            text = re.sub(rf"{re.escape(address)}(?!\d)", f"${name}", text)
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
        text = re.sub(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME", text)
        text = text.replace(os.getcwd(), "HERE")
        text = re.sub(
            r"^ *[~^]+\n", "", text, flags=re.MULTILINE
        )  # of tracebacks, by Python's version
        for pattern, name in self._masks:
            text = re.sub(pattern, name, text)
        if line.startswith("%"):
            text = re.sub(r"(?<=\S) {2,}", "  ", text.replace("\r\n", "\n"))
        text = "".join(map(visible, text))
        end = "" if text.endswith("\n") or not text else "(no end of line)"
        lines = (text + end).split("\n")[: None if end else -1]
        return [f"  {content}".rstrip() or "  (empty line)" for content in lines]


def visible(char: str) -> str:
    """Return the character, or a marker if it is a raw control character or byte."""
    code = ord(char)
    if char in "\n\t" or char.isprintable():
        return char
    if 0xDC80 <= code <= 0xDCFF:
        return f"<{code - 0xDC00:02x}>"
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"
