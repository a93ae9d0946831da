"""The daemons under test: Go's as child processes, and ours in the same clothes.

`Nsqd` and `Nsqlookupd` are what each offers to a test, with its HTTP API as far as tests need
it. Each is started, killed and started again on request, the Go ones are frozen, too. Ports
are reserved (`ports`), and a restart asks for the same ones. The log is kept in full for the report
of a failed test.
"""

import http.client
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any, Self
from urllib.parse import urlencode

from plugins.ports import ReservedPort
from plugins.waiting import patience_s, wait_until

from nsqtools.server import EmbeddedNsqd, EmbeddedNsqlookupd
from nsqtools.server.go_flags import flags_of, parse_flags
from nsqtools.server.options import NsqdOptions, NsqlookupdOptions

CLIENT_HEADERS = ("Content-Type", "X-NSQ-Content-Type", "Allow", "Location")

Answer = tuple[int, dict[str, str], bytes]


def answer(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request; status, the headers that NSQ's clients look at, and body of the answer."""
    connection.request(method, target, body, dict(headers or {}))
    response = connection.getresponse()
    seen = {name: response.headers[name] for name in CLIENT_HEADERS if name in response.headers}
    return response.status, seen, response.read()


class Running:
    """A daemon on loopback ports, free ones at the first `start`, the same ones afterwards.

    `start` returns when it listens; `stop` is as SIGTERM, and `kill` as SIGKILL. A context manager:
    entering starts it, leaving kills it. GET and POST take parameters as keywords.
    """

    name: str  # of the program, for messages
    tcp_address: str
    http_address: str
    log: str  # of all runs
    start: Callable[[], None]
    stop: Callable[[], None]
    kill: Callable[[], None]
    _ports: list[ReservedPort]  # nobody has them between two runs

    def get(self, path: str, **query: object) -> bytes:
        """The body of the answer; an error status fails the test with what was answered."""
        return self._successful("GET", path, query)

    def post(self, path: str, body: bytes = b"", **query: object) -> bytes:
        """As `get`, with a body to send."""
        return self._successful("POST", path, query, body)

    def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer, whatever it is."""
        connection = http.client.HTTPConnection(self.http_address, timeout=patience_s(10))
        with closing(connection):
            status, _, said = answer(connection, method, target, body)
            return status, said

    def _successful(
        self, method: str, path: str, query: dict[str, object], body: bytes = b""
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        status, answer = self.request(method, target, body)
        assert status < 400, f"{method} {target}: {status} {answer!r}"
        return answer

    def release_ports(self) -> None:
        """Let others have the ports: it is not to be started again."""
        for port in self._ports:
            port.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self.release_ports()


class Nsqlookupd(Running):
    def json(self, path: str, **query: object) -> Any:
        return json.loads(self.get(path, **query))

    def producers(self, topic: str) -> list[str]:
        """Whom to consume from, as ``broadcast_address:tcp_port``; nobody for an unknown topic."""
        status, answer = self.request("GET", f"/lookup?{urlencode({'topic': topic})}")
        if status == 404:
            return []
        found = json.loads(answer)["producers"]
        return [f"{producer['broadcast_address']}:{producer['tcp_port']}" for producer in found]


class Nsqd(Running):
    """An nsqd with its own empty data directory; a restart keeps it, `kill` what is on disk.

    ``https_address`` is empty unless TLS is configured.
    """

    https_address: str
    data_path: Path

    @property
    def options(self) -> list[str]:
        """What a command is given to consume from it."""
        tcp, http = self.tcp_address, self.http_address
        return [f"--nsqd-tcp-address={tcp}", f"--nsqd-http-address={http}"]

    def create_topic(self, topic: str) -> None:
        self.post("/topic/create", topic=topic)

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and the topic when it is not there."""
        self.create_topic(topic)
        self.post("/channel/create", topic=topic, channel=channel)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish all bodies in one request (binary mpub: bodies may hold any byte)."""
        packed = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        self.post("/mpub", len(bodies).to_bytes(4, "big") + packed, topic=topic, binary="true")

    def stats(self, topic: str | None = None) -> dict[str, Any]:
        """The whole ``/stats`` document, or that of one topic."""
        query = {} if topic is None else {"topic": topic}
        document: dict[str, Any] = json.loads(self.get("/stats", format="json", **query))
        return document

    def topics(self) -> list[str]:
        return [topic["topic_name"] for topic in self.stats()["topics"] or []]

    def channels(self, topic: str) -> list[str]:
        return [channel["channel_name"] for channel in self.topic_stats(topic)["channels"]]

    def topic_stats(self, topic: str) -> dict[str, Any]:
        return _named(self.stats(topic)["topics"], "topic_name", topic)

    def channel_stats(self, topic: str, channel: str) -> dict[str, Any]:
        return _named(self.topic_stats(topic)["channels"], "channel_name", channel)

    def depth(self, topic: str, channel: str | None = None) -> int:
        """Messages waiting in the topic itself, or in the channel (in flight ones not counted)."""
        counted = self.topic_stats(topic) if channel is None else self.channel_stats(topic, channel)
        return int(counted["depth"])


def _named(entries: list[dict[str, Any]] | None, key: str, name: str) -> dict[str, Any]:
    named = {entry[key]: entry for entry in entries or []}
    return named[name]


GO_PROGRAMS = Path(__file__).parent.parent / "go" / "bin"

_LISTENERS = {"TCP": "tcp_address", "HTTP": "http_address"}  # word in the log: our attribute


class Daemon(Running):
    """One daemon process and its log."""

    def __init__(self, program: str, flags: Sequence[str], *, listeners: Mapping[str, str]) -> None:
        self.name = program
        self._flags = flags
        self._listeners = listeners
        self.tcp_address = self.http_address = self.https_address = ""
        self._ports = [ReservedPort() for _ in listeners]
        self._process: subprocess.Popen[str] | None = None
        self._log_lines: list[str] = []
        self._run_began = 0  # index into the log of the first line of the present run
        self._log_reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        return "".join(self._log_lines)

    def start(self) -> None:
        """Start, again on the same ports when it ran before; returns when it listens."""
        assert self._process is None, f"{self.name} is already running"
        addresses = []
        for attribute, port in zip(self._listeners.values(), self._ports, strict=True):
            address = getattr(self, attribute) or f"127.0.0.1:{port.number}"
            addresses.append(f"-{attribute.replace('_', '-')}={address}")
        self._run_began = len(self._log_lines)
        self._process = subprocess.Popen(
            [*self._command(), *addresses, *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the tester's ^C stops the tests, which then stop the daemon
        )
        self._log_reader = threading.Thread(
            target=self._read_log, args=(self._process.stderr,), daemon=True
        )
        self._log_reader.start()
        try:
            for logged_as, attribute in self._listeners.items():
                pattern = rf"\b{logged_as}: listening on (\S+)"
                setattr(self, attribute, self.wait_for_log(pattern, timeout_s=10)[1])
            # It listens a moment before it handles signals: SIGTERM would just end it until then.
            self.request("GET", "/ping")
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that has not ended it in time."""
        if self._process is not None:
            self.resume()
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s(10))
            self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._log_reader.join()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered.

        Returns when each of its threads has stopped: one that runs goes on for a moment.
        """
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{process.pid}/task")

        def have_stopped() -> bool:
            try:
                stats = [(each / "stat").read_text() for each in threads.iterdir()]
            except (FileNotFoundError, ProcessLookupError):
                return False  # one ended meanwhile
            return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

        wait_until(have_stopped, what="all threads to stop")

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def wait_for_log(self, pattern: str, *, timeout_s: float = 5.0) -> re.Match[str]:
        """The first match of `pattern` in the log of the present run, waiting for it."""
        reader = self._log_reader

        def look() -> re.Match[str] | None:
            has_ended = not reader.is_alive()
            found = re.search(pattern, "".join(self._log_lines[self._run_began :]))
            if has_ended and not found:
                raise AssertionError(f"{self.name} ended without {pattern!r}\n{self.log}")
            return found

        return wait_until(look, what=f"{pattern!r} in the log of {self.name}", timeout_s=timeout_s)  # type: ignore[return-value]

    def _command(self) -> list[str | Path]:
        return [GO_PROGRAMS / self.name]

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, f"{self.name} is not running"
        return self._process

    def _read_log(self, stderr: IO[str]) -> None:
        with stderr:
            for line in stderr:
                self._log_lines.append(line)


class GoNsqd(Daemon, Nsqd):
    """The Go nsqd, with `data_path` and any further flags (``"-msg-timeout=2s"``)."""

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        serves_tls = any(flag.lstrip("-").startswith("tls-cert") for flag in flags)
        listeners = _LISTENERS | {"HTTPS": "https_address"} if serves_tls else _LISTENERS
        basic_flags = (f"-data-path={data_path}", "-broadcast-address=127.0.0.1")
        super().__init__("nsqd", (*basic_flags, *flags), listeners=listeners)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish, and wait for the copies in the channels, which nsqd makes after its answer."""
        wanted = {channel: count + len(bodies) for channel, count in self._copied(topic).items()}
        super().publish(topic, *bodies)

        def have_all() -> bool:
            found = self._copied(topic)
            return all(found.get(channel, count) >= count for channel, count in wanted.items())

        wait_until(have_all, what=f"the channels of {topic} to have it", timeout_s=20)

    def _copied(self, topic: str) -> dict[str, int]:
        """How many messages each channel ever had; of no channel while the topic is paused."""
        return {
            channel["channel_name"]: channel["message_count"]
            for found in self.stats(topic)["topics"] or []
            if not found["paused"]
            for channel in found["channels"] or []
        }


# Of CPU. Other processes lengthen it only as far as they share caches and the halves of a core.
MAX_TURN_S = patience_s(0.02)


class EmbeddedNsqdProcess(GoNsqd):
    """``nsq nsqd``: the embedded nsqd as a process of its own, that can be killed and restarted."""

    def longest_turn_cpu_s(self) -> float:
        """The most CPU time that the loop spent before it looked at its clients again."""
        page = self.get("/metrics").decode()
        found = re.search(r"^nsqd_longest_stall_cpu_seconds (\S+)$", page, re.MULTILINE)
        assert found
        return float(found[1])

    def _command(self) -> list[str | Path]:
        return [sys.executable, "-m", "nsqtools", "nsqd"]


class GoNsqlookupd(Daemon, Nsqlookupd):
    """The Go nsqlookupd; give its ``tcp_address`` to nsqd as ``-lookupd-tcp-address=``."""

    def __init__(self, *flags: str) -> None:
        basic_flags = ("-broadcast-address=127.0.0.1",)
        super().__init__("nsqlookupd", (*basic_flags, *flags), listeners=_LISTENERS)


ADDRESSES = ("tcp_address", "http_address", "https_address")


class _Embedded(Running):
    """A daemon of some kind with flags in Go's syntax; a restart keeps its addresses and its log.

    ``https_address`` is empty where there is none.
    """

    _kind: type[EmbeddedNsqd | EmbeddedNsqlookupd]

    def __init__(self, options: dict[str, Any]) -> None:
        self._ports = [ReservedPort(), ReservedPort()]
        self.tcp_address, self.http_address = (
            str(options.get(name, f"127.0.0.1:{port.number}"))
            for name, port in zip(ADDRESSES, self._ports, strict=False)
        )
        self.https_address = ""
        self._options = options
        self._log = io.StringIO()
        self._daemon: EmbeddedNsqd | EmbeddedNsqlookupd | None = None

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def start(self) -> None:
        present = {name: address for name in ADDRESSES if (address := getattr(self, name))}
        daemon = self._kind(log=self._log, **{**self._options, **present})
        daemon.start()
        self._daemon = daemon
        for name in ADDRESSES:
            setattr(self, name, getattr(daemon, name, ""))

    def stop(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    def kill(self) -> None:
        if isinstance(self._daemon, EmbeddedNsqd):
            self._daemon.kill()
            self._daemon = None
        self.stop()  # a nsqlookupd has nothing that it could save


class EmbeddedServer(_Embedded, Nsqd):
    """`EmbeddedNsqd` with `data_path` and any further flags in nsqd's syntax."""

    name = "embedded nsqd"
    _kind = EmbeddedNsqd

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        options = parse_flags(flags_of(NsqdOptions, {}), flags).options
        super().__init__({**options, "data_path": str(data_path)})


class EmbeddedLookupServer(_Embedded, Nsqlookupd):
    """`EmbeddedNsqlookupd` with flags in nsqlookupd's syntax."""

    name = "embedded nsqlookupd"
    _kind = EmbeddedNsqlookupd

    def __init__(self, *flags: str) -> None:
        super().__init__(parse_flags(flags_of(NsqlookupdOptions, {}), flags).options)
