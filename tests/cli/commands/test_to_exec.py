"""``nsq to-exec`` with real commands: their input, and the outcome of each exit status."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from plugins.archives import unfinished
from plugins.cli import NsqOnAScreen, Result, RunNsq, SpawnNsq
from plugins.processes import is_alive
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.cli.running.channel_watch import ChannelWatch

TOPIC, CHANNEL = "clicks", "run"
LETTERS = ("--dead-letter-topic", "dead")

Run = Callable[..., Result]


@pytest.fixture
def source(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel(TOPIC, CHANNEL)
    return nsqd


def args(nsqd: Nsqd, *options: str) -> list[str]:
    return ["to-exec", "-t", TOPIC, "-c", CHANNEL, *nsqd.options, *options]


@pytest.fixture
def run(run_nsq: RunNsq, source: Nsqd) -> Run:
    """Run the command to its end; ``script`` is Python, ``shell`` is for sh."""

    def run(*options: str, script: str = "", shell: str = "") -> Result:
        command = [sys.executable, "-c", script] if script else ["sh", "-c", shell]
        return run_nsq(args(source, *options, "--", *command))

    return run


def wait_for_pids(path: Path, count: int) -> list[int]:
    """Wait for the process ids that the commands write to ``path``."""
    path.touch()
    complete = re.compile(rf"(?:\d+\s){{{count}}}")
    wait_until(lambda: complete.fullmatch(path.read_text()), what="the commands", timeout_s=20)
    return [int(pid) for pid in path.read_text().split()]


SHOW = """
import hashlib, json, os, sys
env = {name: value for name, value in os.environ.items() if name.startswith("NSQ_")}
print(json.dumps([hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), env]))
"""


def test_a_command_has_the_body_on_stdin_and_metadata_in_its_environment(
    run: Run, source: Nsqd
) -> None:
    bodies = [b"one\ntwo", b"\xff\x00", b"x" * (1 << 20)]  # more than a pipe holds
    source.publish(TOPIC, *bodies)

    result = run("-n", "3", "--workers", "2", script=SHOW)

    assert (result.status, result.err) == (0, "nsq: 3 delivered\n")
    outputs = [json.loads(line) for line in result.out.splitlines()]
    assert {digest for digest, _ in outputs} == {sha256(body).hexdigest() for body in bodies}
    for _, env in outputs:
        assert (env["NSQ_TOPIC"], env["NSQ_CHANNEL"], env["NSQ_ATTEMPTS"]) == (TOPIC, CHANNEL, "1")
        assert len(env["NSQ_MESSAGE_ID"]) == 16
        assert int(env["NSQ_TIMESTAMP"]) > 1.6e18
    assert unfinished(source, TOPIC, CHANNEL) == 0


def test_a_program_that_is_not_executable_is_named(run_nsq: RunNsq, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh")
    result = run_nsq(["to-exec", "-t", "clicks", "--", str(script)])
    assert result.status == 3
    assert f"{script} is not executable" in result.err


def test_a_body_is_an_argument_of_a_script_and_never_code(run_nsq: RunNsq, source: Nsqd) -> None:
    source.publish(TOPIC, b"$(echo run)`id`")

    refused = run_nsq(args(source, "-n", "1", "--arg", "--", "env", "sh", "-c", "echo {}"))
    advised = re.findall(r"sh -c '(.*)' sh \{\}", refused.err)
    safe = run_nsq(args(source, "-n", "1", "--arg", "--", "sh", "-c", *advised, "sh", "{}"))

    assert (refused.status, refused.out) == (2, b"")
    assert "env would run the body in place of {} in 'echo {}'" in refused.err
    assert (safe.status, safe.out) == (0, b"$(echo run)`id`\n")


JUDGED = [b'{"page": "/buy", "note": "cut \\ud83d"}', b'{"page": "/buy", "name": "M\xfcller"}']
UNJUDGED = [b'{"page": "/buy"}\0', b"no JSON", b" ", b"[1]"]


@pytest.mark.parametrize("letters", [(), LETTERS])
def test_a_message_that_a_filter_cannot_judge_is_not_finished(
    run: Run, source: Nsqd, letters: tuple[str, ...]
) -> None:
    source.publish(TOPIC, *UNJUDGED, b'{"page": "/"}', *JUDGED)

    result = run("-n", "2", "--where", '.page == "/buy"', *letters, shell="cat >/dev/null")

    assert "its body cannot be judged (parse error: Invalid numeric literal" in result.err
    fate = "dead letters" if letters else "requeued"  # these may be redelivered meanwhile
    assert re.search(rf"2 delivered, 1 filtered out, \d not judged, \d {fate}", result.err)
    assert result.status == 6
    assert unfinished(source, TOPIC, CHANNEL) == (0 if letters else 4)


@pytest.mark.parametrize(
    "fault", ["print('debug', flush=True)", "sys.stdout.write('ok'); sys.exit(3)"]
)
def test_unanswered_messages_of_a_persistent_command_go_to_the_next(
    run: Run, source: Nsqd, fault: str, tmp_path: Path
) -> None:
    """A stray line must not shift the answers: an ok would count for another message."""
    handled = tmp_path / "handled"
    script = f"""
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["body"] == "bad":
        {fault}
    with open({str(handled)!r}, "a") as file:
        file.write(message["body"] + "\\n")
    print("ok", flush=True)
"""
    source.publish(TOPIC, b"a", b"b", b"bad", b"c", b"d")
    letters = ("--max-attempts", "1", *LETTERS)

    result = run("-n", "5", "--persistent", *letters, script=script)

    assert result.err.endswith("nsq: 4 delivered, 1 dead letter\n")
    assert set(handled.read_text().split()) >= {"a", "b", "c", "d"}
    assert unfinished(source, TOPIC, CHANNEL) == 0


def test_a_dead_letter_counts_the_attempts_of_earlier_consumers(
    run: Run, run_nsq: RunNsq, source: Nsqd
) -> None:
    source.publish(TOPIC, b"one")
    run_nsq(["peek", "-t", TOPIC, "-c", CHANNEL, *source.options, "-n", "1"])

    result = run("-n", "1", "--max-attempts", "1", *LETTERS, shell="exit 3")

    assert "sh ended with status 3, after 2 attempts" in result.err


def test_a_dead_letter_has_one_attempt_in_the_singular(run: Run, source: Nsqd) -> None:
    source.publish(TOPIC, b"one")

    result = run("-n", "1", "--max-attempts", "1", *LETTERS, shell="exit 3")

    assert result.err.splitlines()[-2].endswith("after 1 attempt")


def test_a_command_that_times_out_is_ended_with_its_children(
    run: Run, source: Nsqd, tmp_path: Path
) -> None:
    source.publish(TOPIC, b"one")
    pids = tmp_path / "pids"
    shell = f"trap 'exit 1' TERM; sleep 1000 & echo $$ $! > {pids}; wait; sleep 1000"
    limit = f"{patience_s(0.5):g}"  # long enough for the shell to reach its sleep
    options = ("--command-timeout", f"{limit}s", "--max-attempts", "1", *LETTERS)

    result = run("-n", "1", *options, shell=shell)

    assert f"sh took longer than {limit} s" in result.err
    assert result.err.endswith("1 dead letter\n")
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())


def test_a_message_is_touched_while_its_command_runs(run_nsq: RunNsq, quick_nsqd: Nsqd) -> None:
    """The command does not have to read its input, either."""
    quick_nsqd.create_channel(TOPIC, CHANNEL)
    quick_nsqd.publish(TOPIC, b"x" * (1 << 20))

    result = run_nsq(args(quick_nsqd, "-n", "1", "--", "sh", "-c", "sleep 1.5; echo $NSQ_ATTEMPTS"))

    assert (result.out, result.err) == (b"1\n", "nsq: 1 delivered\n")
    assert unfinished(quick_nsqd, TOPIC, CHANNEL) == 0
    assert quick_nsqd.channel_stats(TOPIC, CHANNEL)["timeout_count"] == 0


@pytest.mark.parametrize("mode", ["once", "persistent"])
def test_no_command_outlives_a_killed_runner(
    spawn_nsq: SpawnNsq, source: Nsqd, tmp_path: Path, mode: str
) -> None:
    source.publish(TOPIC, b"one", b"two")
    pids = tmp_path / "pids"
    shell = f"sleep 1000 & echo $$ $! >> {pids}; wait"
    mode_flags = ["--persistent"] if mode == "persistent" else []
    process = spawn_nsq(args(source, "--workers", "2", *mode_flags, "--", "sh", "-c", shell))
    started = wait_for_pids(pids, 4)

    process.kill()

    wait_until(lambda: not any(map(is_alive, started)), what="the end of the commands")


def test_a_killed_spawner_is_replaced_and_its_message_redelivered(
    spawn_nsq: SpawnNsq, source: Nsqd, tmp_path: Path
) -> None:
    source.publish(TOPIC, b"one")
    pids = tmp_path / "pids"
    shell = f"echo $PPID $$ >> {pids}; test $NSQ_ATTEMPTS -gt 1 || sleep 1000"
    spawn_nsq(args(source, "--", "sh", "-c", shell))
    starter, command = wait_for_pids(pids, 2)

    os.kill(starter, signal.SIGKILL)

    wait_until(lambda: unfinished(source, TOPIC, CHANNEL) == 0, what="the message's end")
    assert not is_alive(command)


@pytest.mark.parametrize(
    ("shell", "said", "left"),
    [
        # no dead letter, as the message is not at fault
        ("{}; exec sleep 1000", b"nsq: 0 delivered, 1 requeued\n", 1),
        ("trap 'exit 0' TERM; {}; sleep 1000 & wait", b"nsq: 1 delivered\n", 0),
    ],
)
def test_a_stop_ends_commands_and_requeues_their_unfinished_messages(
    spawn_nsq: SpawnNsq, source: Nsqd, tmp_path: Path, shell: str, said: bytes, left: int
) -> None:
    source.publish(TOPIC, b"one")
    pids = tmp_path / "pids"
    options = ("-X", "drain_timeout=200ms", "--max-attempts", "1", *LETTERS)
    process = spawn_nsq(args(source, *options, "--", "sh", "-c", shell.format(f"echo $$ > {pids}")))
    [command] = wait_for_pids(pids, 1)

    process.send_signal(signal.SIGTERM)

    _, stderr = process.communicate(timeout=patience_s(20))
    assert (process.returncode, stderr) == (143, said)
    assert not is_alive(command)
    assert unfinished(source, TOPIC, CHANNEL) == left


def test_all_workers_run_commands_whatever_the_size_of_bodies(
    run: Run, source: Nsqd, tmp_path: Path
) -> None:
    source.publish(TOPIC, *[b"x" * (1 << 20)] * 4)
    started = tmp_path / "started"
    started.mkdir()
    all_run = f"until [ $(ls {started} | wc -l) = 4 ]; do sleep 0.05; done"
    limits = ("--for", f"{patience_s(20):g}s", "-X", "drain_timeout=100ms")

    result = run("-n", "4", "--workers", "4", *limits, shell=f"touch {started}/$$; {all_run}")

    assert (result.status, result.err) == (0, "nsq: 4 delivered\n")


def test_the_first_batch_is_as_large_as_the_others(run: Run, source: Nsqd) -> None:
    """A batch larger than max_in_flight runs as soon as max_in_flight messages are available."""
    source.publish(TOPIC, *[b"%d" % n for n in range(200)])
    wait = ("--batch-wait", f"{patience_s(20):g}s")
    assert run("-n", "200", "--batch", "100", *wait, shell="wc -l").out == b"100\n100\n"

    source.publish(TOPIC, *[b"%d" % n for n in range(200)])
    sizes = ("--batch", "1000", "--max-in-flight", "50")
    assert run("-n", "200", *sizes, *wait, shell="wc -l").out == b"50\n" * 4


def test_the_last_batch_does_not_wait_to_fill(run: Run, source: Nsqd) -> None:
    source.publish(TOPIC, b"1", b"2")
    limits = ("-n", "2", "--for", f"{patience_s(20):g}s", "-X", "drain_timeout=1s")
    assert run(*limits, "--batch", "10", "--batch-wait", "1h", shell="wc -l").out == b"2\n"


def test_lines_of_concurrent_commands_are_not_mixed(run: Run, source: Nsqd) -> None:
    source.publish(TOPIC, *[b"%d" % number for number in range(40)])
    shell = 'read n; printf "a$n"; printf "b$n\\nc$n"; printf "e$n" >&2'

    result = run("-n", "40", "--workers", "4", shell=shell)

    expected = [line for n in range(40) for line in (b"a%db%d" % (n, n), b"c%d" % n)]
    assert sorted(result.out.splitlines()) == sorted(expected)
    assert sorted(result.err.splitlines()[:-1]) == sorted(f"e{n}" for n in range(40))


def test_a_line_of_a_command_does_not_join_the_progress_line(
    nsq_on_a_screen: NsqOnAScreen, source: Nsqd
) -> None:
    source.publish(TOPIC, b"one")
    screen = nsq_on_a_screen(args(source, "-n", "1", "--", "echo", "printed"))
    assert "printed" in screen.wait_for("nsq: 1 delivered")


def test_a_message_counts_as_received_while_its_command_runs(
    run: Run, source: Nsqd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The idle report must not claim that no message was received."""
    source.publish(TOPIC, b"one")
    received = tmp_path / "came"

    @contextmanager
    def watching(*arguments: Any, **_: Any) -> Iterator[None]:
        def watch() -> None:
            wait_until(arguments[1], what="a message that came")
            received.touch()

        threading.Thread(target=watch).start()
        yield

    monkeypatch.setattr(ChannelWatch, "idle_report", watching)
    limit = ("--command-timeout", f"{patience_s(10):g}s")
    result = run("-n", "1", *limit, shell=f"until [ -e {received} ]; do sleep 0.05; done")
    assert result.status == 0


def test_messages_wait_while_their_program_is_missing(
    spawn_nsq: SpawnNsq, source: Nsqd, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ntest $(ulimit -n) = 300\n")  # nsq was started with it
    program.chmod(0o755)
    process = spawn_nsq(args(source, "-n", "2", "--", str(program)), soft_descriptors=300)
    source.publish(TOPIC, b"one")
    wait_until(lambda: unfinished(source, TOPIC, CHANNEL) == 0, what="the first")
    program.rename(tmp_path / "away")
    source.publish(TOPIC, b"two")
    assert b"cannot deliver: cannot start" in process.stderr.readline()

    (tmp_path / "away").rename(program)

    assert process.wait(patience_s(30)) == 0


@pytest.mark.parametrize("command", ["to-exec", "to-file"])
def test_exit_idle_waits_until_every_nsqd_could_send(
    run_nsq: RunNsq, embedded_nsqd: AnyNsqd, tmp_path: Path, command: str
) -> None:
    """A single message in flight rotates among the connections."""
    nsqds = [embedded_nsqd() for _ in range(3)]
    for nsqd in nsqds:
        nsqd.create_channel(TOPIC, CHANNEL)
        nsqd.publish(TOPIC, b"one")
    to = ["--output-dir", str(tmp_path)] if command == "to-file" else ["--", "true"]
    limits = ["--max-in-flight", "1", "--exit-idle", "50ms"]
    places = [option for nsqd in nsqds for option in nsqd.options]
    result = run_nsq([command, "-t", TOPIC, "-c", CHANNEL, *places, *limits, *to])

    assert result.status == 0, result.err
    assert [unfinished(nsqd, TOPIC, CHANNEL) for nsqd in nsqds] == [0, 0, 0]


def test_the_wait_for_a_batch_needs_batches(run: Run) -> None:
    result = run("--batch-wait", "1s", shell="cat")
    assert result.status == 2
    assert "--batch-wait is for --batch" in result.err
