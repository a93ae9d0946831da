"""The sink of nsq-python(7) for PostgreSQL, and PostgreSQL killed: each message is one row."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugins.archives import unfinished
from plugins.ports import ReservedPort
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

pytestmark = pytest.mark.slow
psycopg = pytest.importorskip("psycopg")
FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
PROGRAM = Path(__file__).with_name("postgres_sink.py")
TOPIC, CHANNEL, MESSAGES = "orders", "copy", 5_000


class Postgres:
    """A server in a directory of its own; it refuses to run as root."""

    def __init__(self, directory: str) -> None:
        self._port = ReservedPort()
        self.dsn = f"host=127.0.0.1 port={self._port.number} user=postgres dbname=postgres"
        self._data, self._bin = f"{directory}/data", FOUND[-1].parent
        self._user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
        if self._user:
            shutil.chown(directory, "postgres")
        initdb = [self._bin / "initdb", "-U", "postgres", "-A", "trust", "-D", self._data]
        subprocess.run(initdb, check=True, capture_output=True, cwd=directory, **self._user)
        self.start()

    def start(self) -> None:
        flags = ["-D", self._data, "-p", str(self._port.number), "-k", "", "-h", "127.0.0.1"]
        how = {"start_new_session": True, "cwd": "/", **self._user}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen([self._bin / "postgres", *flags], **silent, **how)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(patience_s(10))

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsn) as database:
            return database.execute(query).fetchall()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    if not FOUND:
        pytest.skip("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        server = Postgres(directory)
        yield server
        server.kill()


def test_each_message_is_one_row_while_postgresql_and_the_program_are_killed(
    go_nsqd: MakeNsqd, postgres: Postgres, tmp_path: Path
) -> None:
    letters, nsqd = tmp_path / "letters", go_nsqd("-msg-timeout=2s")
    nsqd.create_channel(TOPIC, CHANNEL)
    bad = [b"not JSON %d" % number for number in range(5)]
    given = bad + [b'{"n": %d}' % number for number in range(MESSAGES)]
    random.Random(1).shuffle(given)
    words = [sys.executable, PROGRAM, postgres.dsn, nsqd.tcp_address, TOPIC, CHANNEL, letters]
    programs = [subprocess.Popen(words, stderr=subprocess.DEVNULL)]
    try:
        for begin in range(0, len(given), 500):
            nsqd.publish(TOPIC, *given[begin : begin + 500])
            before = unfinished(nsqd, TOPIC, CHANNEL)
            wait_until(
                lambda before=before: unfinished(nsqd, TOPIC, CHANNEL) < before,  # type: ignore[misc]
                what="progress",
                timeout_s=60,
            )
            if begin % 1000 == 0:
                postgres.kill()
                postgres.start()
            else:
                programs[-1].kill()
                programs[-1].wait(patience_s(10))
                programs.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
        wait_until(lambda: unfinished(nsqd, TOPIC, CHANNEL) == 0, what="the end", timeout_s=60)
        programs[-1].send_signal(signal.SIGTERM)
        assert programs[-1].wait(patience_s(10)) == 0
    finally:
        for program in programs:
            program.kill()
            program.wait()

    [(rows, different)] = postgres.rows("SELECT count(*), count(DISTINCT body->>'n') FROM messages")
    assert (rows, different) == (MESSAGES, MESSAGES)
    dead = {json.loads(line)["body"] for line in letters.read_text().splitlines()}
    assert dead == {body.decode() for body in bad}
