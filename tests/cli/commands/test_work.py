"""``nsq work`` as a process: signals, reloads, and a container with only Python in it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from plugins.archives import unfinished
from plugins.cli import CHECKOUT, NsqProcess, RunNsq, SpawnNsq
from plugins.processes import descendants
from plugins.servers import AnyNsqd, Nsqd
from plugins.waiting import patience_s, wait_until

SHOP = """
import logging, time, tax

def bill(message):
    logging.getLogger("shop").warning("bill %s", message.body.decode())
    print(tax.RATE, message.body.decode())

def hang(message):
    print("hanging")
    time.sleep(3600)
"""

Start = Callable[..., NsqProcess]


@pytest.fixture
def source(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel("orders", "billing")
    return nsqd


@pytest.fixture
def start(
    spawn_nsq: SpawnNsq, source: Nsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Start the command in a directory with the modules shop and tax."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tax.py").write_text("RATE = 1\n")

    def start(function: str, *options: str) -> NsqProcess:
        return spawn_nsq(args(source, function, *options))

    return start


def args(nsqd: Nsqd, function: str, *options: str) -> list[str]:
    return ["work", function, "-t", "orders", "-c", "billing", *nsqd.options, *options]


def read_line(process: NsqProcess) -> str:
    return process.stdout.readline().decode().rstrip()


def read_log_until(process: NsqProcess, text: str) -> str:
    """Return the line of the log with the text."""
    for line in iter(process.stderr.readline, b""):
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"the log ended without {text!r}")


def test_a_service_flushes_output_answers_probes_and_ends_on_term(
    start: Start, source: Nsqd
) -> None:
    process = start("shop:bill", "--listen-http", "0", "--log-format", "json", "-v")
    address = re.search(r"http://[^/]*", read_log_until(process, "serving"))
    source.publish("orders", b"one")
    assert read_line(process) == "1 one"
    assert address is not None
    with httpx.Client(base_url=address[0], trust_env=False) as probe:
        assert probe.get("/live").status_code == 200
        assert probe.get("/ready").text == f"connected to {source.tcp_address}\n"
        finished = 'nsq_work_handling_seconds_count{topic="orders",outcome="ok"} 1'
        wait_until(lambda: finished in probe.get("/metrics").text, what="the count")
    _, err = process.end(signal.SIGTERM)
    assert process.returncode == 143
    assert '"level": "warning", "logger": "shop", "message": "bill one"' in err.decode()
    assert err.decode().splitlines()[-1] == "nsq: 1 message handled"
    assert unfinished(source, "orders", "billing") == 0


def test_a_second_term_ends_a_hanging_handler_and_requeues_its_message(
    start: Start, source: Nsqd
) -> None:
    process = start("shop:hang")
    source.publish("orders", b"one")
    assert read_line(process) == "hanging"
    process.send_signal(signal.SIGTERM)
    read_log_until(process, "stopping waits")  # logged after the debounce time
    _, err = process.end(signal.SIGTERM)
    assert process.returncode == 143
    assert b"Traceback" not in err
    stats = source.channel_stats("orders", "billing")
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (1, 0, 1)


def test_hup_reloads_code_and_keeps_the_old_if_the_new_is_broken(
    start: Start, source: Nsqd, tmp_path: Path
) -> None:
    process = start("shop:bill")
    source.publish("orders", b"one")
    assert read_line(process) == "1 one"
    for text, printed, log in (
        ("RATE = 22\n", "22 two", "nsq: reloaded shop:bill"),
        ("RATE = (\n", "22 two", "the previous code continues: cannot import shop (/"),
    ):
        (tmp_path / "tax.py").write_text(text)
        process.send_signal(signal.SIGHUP)
        assert log in read_log_until(process, log)
        source.publish("orders", b"two")
        assert read_line(process) == printed
    _, err = process.end(signal.SIGTERM)
    assert b"Traceback" not in err


def test_a_handler_that_prints_to_a_closed_pipe_ends_the_service(
    start: Start, source: Nsqd
) -> None:
    process = start("shop:bill")
    source.publish("orders", b"one")
    assert read_line(process) == "1 one"
    process.stdout.close()
    source.publish("orders", b"two")
    assert process.wait(patience_s(20)) == 141
    stats = source.channel_stats("orders", "billing")
    assert (stats["deferred_count"], stats["in_flight_count"]) == (1, 0)


def test_dev_reloads_code_when_a_file_changes(start: Start, source: Nsqd, tmp_path: Path) -> None:
    process = start("shop:bill", "--dev")
    for rate in ("1", "2", "3"):  # within a second, stale bytecode would look current
        if rate != "1":
            (tmp_path / "new.txt").write_text(f"RATE = {rate}\n")
            (tmp_path / "new.txt").replace(tmp_path / "tax.py")
            read_log_until(process, "nsq: reloaded shop:bill")
        source.publish("orders", b"one")
        assert read_line(process) == f"{rate} one"


def test_a_module_that_cannot_be_imported_is_reported_with_its_line(
    run_nsq: RunNsq, source: Nsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("import json\nimport no_such_module\n")
    result = run_nsq(args(source, "shop:bill"))
    place = f"{tmp_path}/shop.py"
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    assert (result.status, result.err.splitlines()) == (
        2,
        [
            f'    File "{place}", line 2, in <module>',
            "      import no_such_module",
            f"  {reason}",
            f"nsq: error: cannot import shop ({place}:2: {reason})",
        ],
    )


# No HOME, no terminal, a read-only file system, and the service is process 1.
CONTAINER = 'mount -o remount,ro,bind / && touch "$0" 2>&- && exit 1; exec "$@"'


def test_a_service_works_as_the_first_process_of_a_container(
    start: Start, source: Nsqd, tmp_path: Path
) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount"]
    remount = subprocess.run([*unshare, "mount", "-o", "remount,ro,bind", "/"], capture_output=True)
    if remount.returncode:
        pytest.skip("no namespaces here")
    del start  # it has written the modules
    source.publish("orders", b"one")
    nsq = ["env", "-i", f"PYTHONPATH={CHECKOUT}", sys.executable, "-m", "nsqtools"]
    command = [*unshare, "sh", "-c", CONTAINER, str(tmp_path / "written"), *nsq]
    process = NsqProcess(
        [*command, *args(source, "shop:bill")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert read_line(process) == "1 one"
        wait_until(lambda: unfinished(source, "orders", "billing") == 0, what="its end")
        os.kill(descendants(process.pid)[0].pid, signal.SIGTERM)
        _, err = process.communicate(timeout=patience_s(10))
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 143
    assert err.decode().splitlines()[-1] == "nsq: 1 message handled"
