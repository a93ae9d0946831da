"""``nsq to-nsq`` between two real nsqd: delivered, requeued and refused messages."""

import json
import signal
import subprocess
import threading
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from plugins.archives import unfinished
from plugins.certificates import Certificates
from plugins.cli import RunNsq, SpawnNsq
from plugins.clients import bodies_in
from plugins.http_server import AuthServer
from plugins.ports import ReservedPort
from plugins.servers import AnyNsqd, GoNsqd, GoNsqlookupd, MakeNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.forward import dispatcher

TOPIC, CHANNEL = "clicks", "mirror"
BODIES = [b"one", b"\xff\x00two\n", b'{"status": 503}', b'{"status": 200, "id": 9007199254740993}']


class Pair(NamedTuple):
    """The source of messages and their destination."""

    source: Nsqd
    target: Nsqd

    def publish(self, *bodies: bytes) -> None:
        self.source.create_channel(TOPIC, CHANNEL)
        self.source.publish(TOPIC, *bodies)

    def args(self, *options: str) -> list[str]:
        to = [option.replace("--", "--destination-") for option in self.target.options]
        return ["to-nsq", "-t", TOPIC, "-c", CHANNEL, *self.source.options, *to, *options]

    def left(self) -> int:
        return unfinished(self.source, TOPIC, CHANNEL)

    def source_count(self, of: str) -> int:
        return int(self.source.channel_stats(TOPIC, CHANNEL)[f"{of}_count"])


def arrived_in(nsqd: Nsqd) -> int:
    return sum(topic["message_count"] for topic in nsqd.stats(TOPIC)["topics"] or ())


@pytest.fixture
def pair(go_nsqd: MakeNsqd) -> Pair:
    return Pair(go_nsqd(), go_nsqd())


A_MOMENT = ("--for", f"{patience_s(0.4):g}s")  # time for at least one attempt


def test_a_batch_stored_in_part_is_counted_as_repeated(
    run_nsq: RunNsq, nsqd: GoNsqd, go_nsqd: MakeNsqd, small_disk: Path
) -> None:
    pair = Pair(nsqd, go_nsqd("-mem-queue-size=0", f"-data-path={small_disk}"))
    pair.publish(*[b"x" * 1000] * 200)
    delivered = repeated = 0
    sizes = count(64 + 4, 4)

    def has_taken_a_part() -> bool:
        nonlocal delivered, repeated
        counts = json.loads(run_nsq(pair.args(*A_MOMENT, "--json")).out)
        delivered += counts["delivered"]
        repeated += counts["repeated"]
        if arrived_in(pair.target) > delivered:
            return True
        # The disk was full between two batches. One more page has room for three or four messages.
        grow = ["mount", "-o", f"remount,size={next(sizes)}k", str(small_disk)]
        subprocess.run(grow, check=True)
        return False

    wait_until(has_taken_a_part, what="a batch stored in part", timeout_s=patience_s(30))
    assert pair.left() > 0
    assert arrived_in(pair.target) <= delivered + repeated


def test_without_dead_letters_failed_messages_stay_in_the_queue(
    run_nsq: RunNsq, pair: Pair
) -> None:
    pair.publish(*BODIES)
    result = run_nsq(pair.args(*A_MOMENT, "--pick", ".status"))

    assert result.status == 6, result.err
    assert pair.left() == 2
    assert "is requeued: its body cannot be transformed" in result.err

    pair.source.create_channel("dead", "audit")  # matches the pattern, but is excluded
    pair.publish(*BODIES)
    options = ["--pick", ".status", "--topic-pattern", ".", "--dead-letter-topic", "dead"]
    assert "dead letters" in run_nsq(pair.args(*A_MOMENT, *options)).err
    assert pair.source.channels("dead") == ["audit"]


def test_messages_are_held_while_the_destination_is_down(
    run_nsq: RunNsq, go_nsqd: MakeNsqd, embedded_nsqd: AnyNsqd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded source times messages out immediately; Go's checks a new channel after 5 s."""
    monkeypatch.setattr(dispatcher, "RETRY_MAX_S", 1.0)
    pair = Pair(embedded_nsqd(), go_nsqd())
    pair.source.create_channel(TOPIC, CHANNEL)
    timeout_s = max(1.0, patience_s(0.6))  # a busy machine needs that to touch in time

    def be_away_for_a_while() -> None:
        wait_until(lambda: pair.source_count("client"), what="the destination was tried")
        pair.target.stop()
        pair.publish(*BODIES)
        wait_until(lambda: pair.source_count("in_flight"), what="a message held", timeout_s=15)
        time.sleep(1.2 * timeout_s)  # longer than the timeout of a message
        pair.target.start()

    outage = threading.Thread(target=be_away_for_a_while)
    outage.start()
    held = ["-X", f"msg_timeout={timeout_s:g}s"]
    result = run_nsq(pair.args("-n", "4", *held, "--no-loop-guard"))
    outage.join()

    assert result.status == 0, result.err
    assert "cannot deliver: " in result.err
    assert "delivering again" in result.err
    assert bodies_in(pair.target, TOPIC, 4) == sorted(BODIES)
    assert (pair.source_count("requeue"), pair.source_count("timeout")) == (0, 0)


def test_a_key_always_goes_to_the_same_nsqd(run_nsq: RunNsq, go_nsqd: MakeNsqd) -> None:
    pair, other = Pair(go_nsqd(), go_nsqd()), go_nsqd()
    bodies = [b'{"user": "u%d", "n": %d}' % (n % 7, n) for n in range(70)]
    pair.publish(*bodies)
    options = ["--destination-nsqd-tcp-address", other.tcp_address, "--no-loop-guard"]
    result = run_nsq(pair.args("-n", "70", "--mode", "hash", "--key", "{.user}", *options))

    assert result.status == 0, result.err
    first, second = (bodies_in(nsqd, TOPIC, arrived_in(nsqd)) for nsqd in (pair.target, other))
    users = [{json.loads(body)["user"] for body in part} for part in (first, second)]
    assert sorted(first + second) == sorted(bodies)
    assert users[0].isdisjoint(users[1])
    assert all(users)


@pytest.mark.parametrize("guard", ["--loop-guard", "--no-loop-guard"])
def test_a_topic_of_a_pattern_without_a_valid_name_is_left_out(
    run_nsq: RunNsq, pair: Pair, guard: str
) -> None:
    for topic in ("good", "bad"):
        pair.source.publish(topic, b"one")
    to = ["--destination-nsqd-tcp-address", pair.target.tcp_address, guard]
    words = ["--topic-pattern", "^(good|bad)$", "--map", "bad=no name", "--until-empty", *to]
    result = run_nsq(["to-nsq", *pair.source.options, *words])
    assert result.status == 0, result.err
    assert "invalid topic name 'no name'" in result.err
    assert bodies_in(pair.target, "good", 1) == [b"one"]


def test_the_destination_decides_whether_a_message_is_too_large(
    run_nsq: RunNsq, go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    source, letters = go_nsqd("-max-msg-size=3000000"), tmp_path / "letters"
    for target, dead in ((go_nsqd("-max-msg-size=3000000"), 0), (go_nsqd(), 1)):
        pair = Pair(source, target)
        pair.publish(b"x" * 2_000_000, b"small")
        result = run_nsq(pair.args("-n", "2", "--dead-letter-file", str(letters)))
        assert result.err.splitlines()[-1].startswith(f"nsq: {2 - dead} delivered"), result.err
        assert arrived_in(target) == 2 - dead


def test_rate_limits_forwarding(run_nsq: RunNsq, pair: Pair) -> None:
    pair.publish(*BODIES * 2)
    began = time.monotonic()
    result = run_nsq(pair.args("--rate", "10", "-n", "6"))

    assert result.err == "nsq: 6 delivered\n"
    assert time.monotonic() - began > 0.45
    wait_until(lambda: pair.left() == 2, what="the others are given back")


def test_a_dead_letter_that_cannot_be_kept_stays_in_the_queue(
    run_nsq: RunNsq, go_nsqd: MakeNsqd, auth_server: AuthServer, tmp_path: Path
) -> None:
    auth_server.allow("s3cret", topic=TOPIC)
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    source = go_nsqd("-max-msg-size=3000000", f"-auth-http-address={auth_server.address}")
    pair = Pair(source, go_nsqd())
    pair.publish(b"x" * 2_000_000, b"small")
    options = ("--dead-letter-topic", "dead", "--auth-secret-file", str(secret))
    result = run_nsq(pair.args(*A_MOMENT, *options))

    assert "1 delivered" in result.err
    assert pair.left() == 1
    assert "E_UNAUTHORIZED" in result.err


def test_a_destination_is_found_again_through_nsqlookupd(
    spawn_nsq: SpawnNsq, go_nsqd: MakeNsqd, lookupd: GoNsqlookupd
) -> None:
    source = go_nsqd()
    targets = [go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")]
    wait_until(lambda: len(lookupd.json("/nodes")["producers"]) == 1, what="the first nsqd")
    pair = Pair(source, targets[0])
    pair.publish(b"before")
    to = ["--destination-lookupd-http-address", lookupd.http_address]
    args = [option for option in pair.args() if not option.startswith("--destination")]
    process = spawn_nsq([*args, *to, "--producer-opt", "lookupd_poll_interval=100ms", "-n", "2"])
    wait_until(lambda: arrived_in(targets[0]) == 1, what="the first", timeout_s=20)

    targets.append(go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}"))
    wait_until(lambda: len(lookupd.json("/nodes")["producers"]) == 2, what="the second nsqd")
    targets[0].stop()
    pair.publish(b"after")

    _, stderr = process.communicate(timeout=patience_s(30))
    assert process.returncode == 0, stderr.decode()
    assert arrived_in(targets[1]) == 1


def test_tls_of_the_destination_is_its_own(
    run_nsq: RunNsq, go_nsqd: MakeNsqd, certificates: Certificates
) -> None:
    pair = Pair(go_nsqd(), go_nsqd(*certificates.server.nsqd_flags, "-tls-required=true"))
    pair.publish(*BODIES)
    dead = ["--dead-letter-topic", "dead"]  # not for a mistake in our options
    plain = run_nsq(pair.args(*A_MOMENT, "--no-loop-guard", *dead))
    assert pair.left() == 4
    assert "dead letter" not in plain.err
    assert "cannot deliver: " in plain.err

    tls = ["--destination-tls", "--destination-tls-ca-file", str(certificates.ca)]
    result = run_nsq(pair.args("-n", "4", "--no-loop-guard", *tls))
    assert (result.status, pair.left()) == (0, 0), result.err


def test_metrics_are_served_and_written(spawn_nsq: SpawnNsq, pair: Pair, tmp_path: Path) -> None:
    pair.publish(*BODIES)
    reserved = ReservedPort()
    port = reserved.number
    metrics = tmp_path / "metrics"
    process = spawn_nsq(pair.args("--listen-http", str(port), "--metrics-file", str(metrics)))
    line = f'nsq_forward_delivered_messages_total{{topic="{TOPIC}"}} 4'

    def served(path: str) -> tuple[int, str]:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=patience_s(5))
        except httpx.TransportError:
            return 0, ""
        return answer.status_code, answer.text

    wait_until(lambda: line in served("/metrics")[1], what="metrics", timeout_s=15)
    assert served("/health")[0] == 200
    pair.target.stop()
    pair.source.publish(TOPIC, b"held")
    wait_until(lambda: "nsq_forward_failing 1" in served("/metrics")[1], what="a failure")
    wait_until(lambda: served("/health")[0] == 503, what="ill health")
    process.end(signal.SIGTERM)
    assert line in metrics.read_text()


def test_two_mirrors_do_not_feed_each_other(
    run_nsq: RunNsq, spawn_nsq: SpawnNsq, pair: Pair
) -> None:
    pair.publish(b"there")
    spawn_nsq(pair.args())
    wait_until(lambda: pair.source_count("client"), what="a mirror", timeout_s=15)
    bodies_in(pair.target, TOPIC, 1)

    back = Pair(pair.target, pair.source)
    back.publish(b"and back")
    result = run_nsq(back.args())
    assert result.status == 2, result.err
    assert "would return to" in result.err
    assert run_nsq(back.args("-n", "1", "--destination-topic", "copy")).status == 0
