"""State inherited from a parent: blocked and ignored signals, and orphans in a container."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from plugins.cli import SpawnNsq
from plugins.processes import descendants
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until


@pytest.fixture
def source(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel("clicks", "c")
    return nsqd


@contextmanager
def careless_parent() -> Iterator[None]:
    """Start processes with signals blocked and SIGCHLD ignored."""
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGCHLD, ignored)


SERVES = {
    "tail": ("tail -t clicks -c c", 143),
    "to-exec": ("to-exec -t clicks -c c {options} -- cat", 143),
    "nsqd": ("nsqd --tcp-address 127.0.0.1:0 --http-address 127.0.0.1:0 --data-path {path}", 0),
    "nsqlookupd": ("nsqlookupd --tcp-address 127.0.0.1:0 --http-address 127.0.0.1:0", 0),
    "web": ("web --listen 127.0.0.1:0", 143),
}


@pytest.mark.parametrize("name", SERVES)
def test_a_signal_the_parent_blocked_still_ends_a_command(
    spawn_nsq: SpawnNsq, source: Nsqd, name: str, tmp_path: object
) -> None:
    line, status = SERVES[name]
    words = line.replace("{options} ", "").format(path=tmp_path).split()
    options = [] if name.startswith("nsq") else source.options
    with careless_parent():
        process = spawn_nsq([words[0], *options, *words[1:]])

    def handles_term() -> bool:
        with open(f"/proc/{process.pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(handles_term, what="its handler")
    process.send_signal(signal.SIGTERM)
    assert process.wait(patience_s(10)) == status


def test_commands_start_with_default_signals_and_keep_their_status(
    spawn_nsq: SpawnNsq, source: Nsqd
) -> None:
    source.publish("clicks", b"one")
    show = "grep -E 'Sig(Blk|Ign)' /proc/self/status; exit 3"
    options = ["-n", "1", "--fatal-status", "3", "--dead-letter-topic", "dead"]
    to_exec = ["to-exec", "-t", "clicks", "-c", "c", *source.options, *options]
    with careless_parent():
        process = spawn_nsq([*to_exec, "--", "sh", "-c", show])
    out, err = process.communicate(timeout=patience_s(20))

    states = dict(line.split() for line in out.decode().splitlines())
    numbers = {
        name: int(bits, 16) % (1 << 31) for name, bits in states.items()
    }  # not real-time ones
    # A shell without job control starts background jobs, such as the tests, with ignored signals.
    ignored = [
        number
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    assert numbers == {"SigBlk:": 0, "SigIgn:": sum(1 << number - 1 for number in ignored)}
    assert b"sh ended with status 3" in err
    assert b"1 dead letter" in err


INIT = """
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come here, as to a first process
from nsqtools.cli.running.inheritance import continue_below_init
continue_below_init()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
for _ in range(20):
    print(subprocess.run(["sh", "-c", "sleep 0.01 & exit 3"]).returncode)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_init_reaps_orphans_and_ends_like_its_child(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", INIT], stdout=subprocess.PIPE, text=True) as init:
        assert init.stdout is not None
        lines = list(iter(init.stdout.readline, "ready\n"))
        child = descendants(init.pid)[0].pid
        wait_until(lambda: len(descendants(init.pid)) == 1, what="no zombie is left")
        if number is signal.SIGKILL:
            subprocess.run(["kill", "-9", str(child)], check=True)
        else:
            init.send_signal(number)
    assert lines == ["3\n"] * 20
    assert init.returncode == (7 if number is signal.SIGTERM else 137)
