"""The Go daemons as child processes: started, frozen, killed and started again on request.

Ports are reserved (`ports`) and read from the log at the first start; a restart asks for the same
ones. The log is kept in full for the report of a failed test.
"""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from plugins.http_api import Nsqd, Nsqlookupd, Running
from plugins.ports import ReservedPort
from plugins.waiting import patience_s, wait_until

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
        """All that was logged, over all runs."""
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
        """SIGKILL."""
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
        """SIGCONT."""
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
