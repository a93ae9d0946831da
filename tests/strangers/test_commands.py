"""Environments, files, bodies and delimiters that broke other tools."""

import random
from pathlib import Path

import pytest
from plugins.cli import RunNsq
from plugins.daemons import EmbeddedServer

ODD_BODIES = {
    "newline": b"a\nb",
    "NUL": b"\0\1\2",
    "no UTF-8": b"\xff\xfe\x80",
    "CRLF": b"\r\n",
    "line separators": "\u2028\u0085x".encode(),
    "a newline alone": b"\n",
    "a blank": b" ",
    "every byte": bytes(range(256)),
    "surrogate in UTF-8": b"\xed\xa0\x80",
    "surrogate in JSON": b'{"a":"\\ud800"}',
    "BOM": b"\xef\xbb\xbfbom",
}


def variables(nsqd: EmbeddedServer) -> dict[str, str]:
    return {"NSQ_NSQD_TCP_ADDRESS": nsqd.tcp_address, "NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address}


def take(run_nsq: RunNsq, nsqd: EmbeddedServer, topic: str, count: int, *options: str) -> bytes:
    """Run ``nsq tail`` for ``count`` messages, and return its output."""
    tail = ["tail", "-t", topic, "-c", "c", "-n", str(count), *options]
    return run_nsq(tail, env=variables(nsqd)).out


def test_bodies_pass_through_pipes_byte_for_byte(
    quick_nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    """Copy with ``tail --json | pub --format jsonl``, then with hexadecimal digits."""
    for topic in ("first", "second"):
        quick_nsqd.create_channel(topic, "c")
    quick_nsqd.publish("first", *ODD_BODIES.values())

    lines = take(run_nsq, quick_nsqd, "first", len(ODD_BODIES), "--json")
    publish = ["pub", "-t", "second", "--format", "jsonl"]
    assert run_nsq(publish, stdin=lines, env=variables(quick_nsqd)).status == 0
    printed = take(run_nsq, quick_nsqd, "second", len(ODD_BODIES), "--format={body:hex}\\n")

    assert sorted(printed.decode().split()) == sorted(body.hex() for body in ODD_BODIES.values())


NUMBERS = """9007199254740993 12345678901234567890 -9007199254740993 1.0 0.1
    100000000000000000000000000001"""


def test_numbers_are_printed_as_they_were_published(
    quick_nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    quick_nsqd.create_channel("numbers", "c")
    numbers = NUMBERS.split()
    for selection in ("--pick=.id", "--format={.id}\\n", "--where=.id != 9007199254740992"):
        quick_nsqd.publish("numbers", *(b'{"id": %b}' % number.encode() for number in numbers))
        printed = take(run_nsq, quick_nsqd, "numbers", len(numbers), selection).decode()
        assert sorted(line.strip('{}"id: ') for line in printed.splitlines()) == sorted(numbers)


SERVICES = {"NSQ": "10.0.0.1", "NSQ_NSQD": "10.0.0.2", "NSQ_NSQLOOKUPD": "10.0.0.3"}


def test_service_variables_of_kubernetes_are_ignored(
    quick_nsqd: EmbeddedServer, run_nsq: RunNsq
) -> None:
    env = variables(quick_nsqd)
    for name, host in SERVICES.items():
        url = f"tcp://{host}:4150"
        env |= {f"{name}_SERVICE_HOST": host, f"{name}_SERVICE_PORT": "4150", f"{name}_PORT": url}
        env |= {f"{name}_PORT_4150_TCP": url, f"{name}_PORT_4150_TCP_ADDR": host}
    quick_nsqd.create_topic("clicks")
    for command in (["pub", "-t", "clicks", "x"], ["stat", "--once"], ["config", "show"]):
        status, _, err = run_nsq(command, env=env)
        assert (status, "NSQ_" in err) == (0, False), err


def test_windows_line_ends_and_byte_order_marks_are_accepted(
    quick_nsqd: EmbeddedServer, run_nsq: RunNsq, tmp_path: Path
) -> None:
    quick_nsqd.create_topic("clicks")
    config = tmp_path / "nsqtools/config.toml"
    config.parent.mkdir()
    publish = ["pub", "-t", "clicks", "x", "--retry-timeout", "0s"]
    address = quick_nsqd.tcp_address
    for text in ('nsqd_tcp_address = "{}"\r\n', '\ufeffnsqd_tcp_address = "{}"\n'):
        config.write_bytes(text.format(address).encode())
        assert run_nsq(publish, env={"XDG_CONFIG_HOME": str(tmp_path)}).status == 0
    for value in (f"{address}\n", f"{address}\r", f"  {address}  "):
        assert run_nsq(publish, env={"NSQ_NSQD_TCP_ADDRESS": value}).status == 0


@pytest.mark.parametrize("delimiter", [b"\r\n", b"||", b"\n--\n", b"\0", "é".encode(), b"aab"])
def test_a_delimiter_may_cross_the_end_of_a_read(
    quick_nsqd: EmbeddedServer, run_nsq: RunNsq, delimiter: bytes
) -> None:
    """Records end around the sizes of pipes and reads; the last one has no delimiter."""
    dice = random.Random(len(delimiter))
    edges = [edge + step for edge in (4096, 1 << 16, 1 << 17) for step in (-len(delimiter), 0, 1)]
    sizes = [*edges, 1, 2, *(dice.randint(1, 9000) for _ in range(30))]
    records = [b"%d" % dice.randint(0, 9) * size for size in sizes]
    quick_nsqd.create_channel("records", "c")
    typed = delimiter.decode().encode("unicode_escape").decode() if delimiter.isascii() else "é"

    publish, text = ["pub", "-t", "records", "-d", typed], delimiter.join(records)
    assert run_nsq(publish, stdin=text, env=variables(quick_nsqd)).status == 0

    printed = take(run_nsq, quick_nsqd, "records", len(records), "--format={body}\\n")
    assert sorted(printed.split(b"\n")[:-1]) == sorted(records)
