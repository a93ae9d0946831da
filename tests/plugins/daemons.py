"""The daemons under test: Go's as child processes, and ours with the same interface.

`Nsqd` and `Nsqlookupd` are the interfaces for tests, with the parts of the HTTP API that tests
need. Daemons are started, killed and restarted on request; Go daemons can be suspended as well.
Ports are reserved (`ports`), and a restart uses the same ones. The complete log is kept for the
report of a failed test.
"""

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self
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
    """Send a request; return the status, the headers that NSQ's clients use, and the body."""
    connection.request(method, target, body, dict(headers or {}))
    response = connection.getresponse()
    response_headers = {
        name: response.headers[name] for name in CLIENT_HEADERS if name in response.headers
    }
    return response.status, response_headers, response.read()


class Running:
    """A daemon on loopback ports, free ones at the first `start`, the same ones afterwards.

    `start` returns when it listens; `stop` acts like SIGTERM, and `kill` like SIGKILL. A context
    manager: entering starts it, leaving kills it. GET and POST take parameters as keywords.
    """

    name: str  # the program, for messages
    tcp_address: str
    http_address: str
    log: str  # the log of all runs
    start: Callable[[], None]
    stop: Callable[[], None]
    kill: Callable[[], None]
    _ports: list[ReservedPort]  # reserved between two runs

    def get(self, path: str, **query: object) -> bytes:
        """The body of the response; an error status fails the test with the response."""
        return self._successful("GET", path, query)

    def post(self, path: str, body: bytes = b"", **query: object) -> bytes:
        """Like `get`, but with a request body."""
        return self._successful("POST", path, query, body)

    def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and body of the response, whatever the status is."""
        connection = http.client.HTTPConnection(self.http_address, timeout=patience_s(10))
        with closing(connection):
            status, _, content = answer(connection, method, target, body)
            return status, content

    def _successful(
        self, method: str, path: str, query: dict[str, object], body: bytes = b""
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        status, answer = self.request(method, target, body)
        assert status < 400, f"{method} {target}: {status} {answer!r}"
        return answer

    def release_ports(self) -> None:
        """Release the ports for others; the daemon cannot be restarted afterwards."""
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
        """The nsqd of a topic as ``broadcast_address:tcp_port``; empty for an unknown topic."""
        status, answer = self.request("GET", f"/lookup?{urlencode({'topic': topic})}")
        if status == 404:
            return []
        producers = json.loads(answer)["producers"]
        return [f"{producer['broadcast_address']}:{producer['tcp_port']}" for producer in producers]


class Nsqd(Running):
    """An nsqd with its own data directory; a restart keeps messages, `kill` only those on disk.

    ``https_address`` is empty unless TLS is configured.
    """

    https_address: str
    data_path: Path

    @property
    def options(self) -> list[str]:
        """The options of a command that consumes from it."""
        tcp, http = self.tcp_address, self.http_address
        return [f"--nsqd-tcp-address={tcp}", f"--nsqd-http-address={http}"]

    def create_topic(self, topic: str) -> None:
        self.post("/topic/create", topic=topic)

    def create_channel(self, topic: str, channel: str) -> None:
        """Create the channel, and the topic if it does not exist."""
        self.create_topic(topic)
        self.post("/channel/create", topic=topic, channel=channel)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish all bodies in one request (binary mpub: bodies may hold any byte)."""
        packed = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        self.post("/mpub", len(bodies).to_bytes(4, "big") + packed, topic=topic, binary="true")

    def stats(self, topic: str | None = None) -> dict[str, Any]:
        """The ``/stats`` document of all topics, or of one."""
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
        """The messages queued in the topic itself, or in the channel, without those in flight."""
        counted = self.topic_stats(topic) if channel is None else self.channel_stats(topic, channel)
        return int(counted["depth"])


def _named(entries: list[dict[str, Any]] | None, key: str, name: str) -> dict[str, Any]:
    named = {entry[key]: entry for entry in entries or []}
    return named[name]


GO_PROGRAMS = Path(__file__).parent.parent / "go" / "bin"

_LISTENERS = {"TCP": "tcp_address", "HTTP": "http_address"}  # word in the log -> our attribute


class Daemon(Running):
    """One daemon process and its log."""

    def __init__(self, program: str, flags: Sequence[str], *, listeners: Mapping[str, str]) -> None:
        self.name = program
        self._flags = flags
        self._listeners = listeners
        self.tcp_address = self.http_address = self.https_address = ""
        self._ports = [ReservedPort() for _ in listeners]
        self._process: subprocess.Popen[bytes] | None = None
        # A file without a name, because a soak of hours logs more than its memory should hold.
        self._log_fd, path = tempfile.mkstemp()
        os.unlink(path)
        weakref.finalize(self, os.close, self._log_fd)
        self._run_began = 0  # size of the log at the start of the present run

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        return self._log_from(0)

    def _log_from(self, offset: int) -> str:
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, size - offset, offset).decode(errors="replace")

    def start(self) -> None:
        """Start, on the same ports as before; return when it listens."""
        assert self._process is None, f"{self.name} is already running"
        addresses = []
        for attribute, port in zip(self._listeners.values(), self._ports, strict=True):
            address = getattr(self, attribute) or f"127.0.0.1:{port.number}"
            addresses.append(f"-{attribute.replace('_', '-')}={address}")
        self._run_began = os.fstat(self._log_fd).st_size
        self._process = subprocess.Popen(
            [*self._command(), *addresses, *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log_fd,
            start_new_session=True,  # ^C stops only the tests, which then stop the daemon
        )
        try:
            for logged_as, attribute in self._listeners.items():
                pattern = rf"\b{logged_as}: listening on (\S+)"
                setattr(self, attribute, self.wait_for_log(pattern, timeout_s=10)[1])
            # It listens shortly before it handles signals: until then SIGTERM would just kill it.
            self.request("GET", "/ping")
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if it has not ended in time."""
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

    def pause(self) -> None:
        """Suspend it with SIGSTOP: connections stay open, and no request is answered.

        Return when each of its threads has stopped, because a running thread stops a bit later.
        """
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{process.pid}/task")

        def have_stopped() -> bool:
            try:
                stats = [(thread / "stat").read_text() for thread in threads.iterdir()]
            except (FileNotFoundError, ProcessLookupError):
                return False  # a thread has ended meanwhile
            return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

        wait_until(have_stopped, what="all threads to stop")

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def wait_for_log(self, pattern: str, *, timeout_s: float = 5.0) -> re.Match[str]:
        """Wait for the first match of `pattern` in the log of the current run."""
        process = self._running()

        def look() -> re.Match[str] | None:
            has_ended = process.poll() is not None
            match = re.search(pattern, self._log_from(self._run_began))
            if has_ended and not match:
                raise AssertionError(f"{self.name} ended without {pattern!r}\n{self.log}")
            return match

        return wait_until(look, what=f"{pattern!r} in the log of {self.name}", timeout_s=timeout_s)  # type: ignore[return-value]

    def _command(self) -> list[str | Path]:
        return [GO_PROGRAMS / self.name]

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} is not running"
        return self._process


class GoNsqd(Daemon, Nsqd):
    """The Go nsqd, with `data_path` and any further flags (``"-msg-timeout=2s"``)."""

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.data_path = data_path
        serves_tls = any(flag.lstrip("-").startswith("tls-cert") for flag in flags)
        listeners = _LISTENERS | {"HTTPS": "https_address"} if serves_tls else _LISTENERS
        basic_flags = (f"-data-path={data_path}", "-broadcast-address=127.0.0.1")
        super().__init__("nsqd", (*basic_flags, *flags), listeners=listeners)

    def publish(self, topic: str, *bodies: bytes) -> None:
        """Publish, and wait for the copies in the channels, which nsqd makes after its response."""
        expected = {channel: count + len(bodies) for channel, count in self._copied(topic).items()}
        super().publish(topic, *bodies)

        def have_all() -> bool:
            copied = self._copied(topic)
            return all(copied.get(channel, count) >= count for channel, count in expected.items())

        wait_until(have_all, what=f"the channels of {topic} to have it", timeout_s=20)

    def _copied(self, topic: str) -> dict[str, int]:
        """The message count of each channel; empty while the topic is paused."""
        return {
            channel["channel_name"]: channel["message_count"]
            for entry in self.stats(topic)["topics"] or []
            if not entry["paused"]
            for channel in entry["channels"] or []
        }


# CPU time, which other processes affect only by shared caches and hyper-threads.
MAX_TURN_S = patience_s(0.02)


class EmbeddedNsqdProcess(GoNsqd):
    """``nsq nsqd``: the embedded nsqd in its own process, which can be killed and restarted."""

    def longest_turn_cpu_s(self) -> float:
        """The longest CPU time of one iteration of the event loop."""
        page = self.get("/metrics").decode()
        match = re.search(r"^nsqd_longest_stall_cpu_seconds (\S+)$", page, re.MULTILINE)
        assert match
        return float(match[1])

    def _command(self) -> list[str | Path]:
        return [sys.executable, "-m", "nsqtools", "nsqd"]


class GoNsqlookupd(Daemon, Nsqlookupd):
    """The Go nsqlookupd; give its ``tcp_address`` to nsqd as ``-lookupd-tcp-address=``."""

    def __init__(self, *flags: str) -> None:
        basic_flags = ("-broadcast-address=127.0.0.1",)
        super().__init__("nsqlookupd", (*basic_flags, *flags), listeners=_LISTENERS)


ADDRESSES = ("tcp_address", "http_address", "https_address")


class _Embedded(Running):
    """An embedded daemon with flags in Go's syntax; a restart keeps its addresses and its log.

    ``https_address`` is empty unless TLS is configured.
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
        self.stop()  # an nsqlookupd has no state on disk


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
