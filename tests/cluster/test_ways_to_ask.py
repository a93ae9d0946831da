"""Every command asks a cluster in one way: over https, with a bearer token, by the address map.

The nsqlookupd and nsqd are real; nsqlookupd speaks no TLS, so a proxy does it for it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq
from plugins.daemons import GoNsqd, GoNsqlookupd
from plugins.network import ProxyTo
from plugins.servers import MakeLookupd, MakeNsqd
from plugins.waiting import wait_until

ANNOUNCED = "nsqd.internal"
DIRECTORY = "DIRECTORY"
BODIES = tuple(b"m%d" % number for number in range(5))


def registered(go_nsqd: MakeNsqd, lookupd: GoNsqlookupd, broadcast: str = "127.0.0.1") -> GoNsqd:
    """An nsqd with five messages in the topic payments, which has no channel."""
    nsqd = go_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", f"-broadcast-address={broadcast}")
    nsqd.publish("payments", *BODIES)
    wait_until(lambda: len(lookupd.producers("payments")) == 1, what="payments is registered")
    return nsqd


@pytest.fixture
def lookupd(nsqlookupd: MakeLookupd) -> GoNsqlookupd:
    return nsqlookupd()


@pytest.fixture
def https(lookupd: GoNsqlookupd, certificates: Certificates, proxy_to: ProxyTo) -> list[str]:
    """The options that lead a command to the nsqlookupd over https."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    address = proxy_to(lookupd.http_address, context).address
    return [f"--lookupd-http-address=https://{address}", f"--tls-ca-file={certificates.ca}"]


def test_an_https_nsqlookupd_leads_to_what_tail_must_not_destroy_and_to_file_archives(
    run_nsq: RunNsq, https: list[str], lookupd: GoNsqlookupd, go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    nsqd = registered(go_nsqd, lookupd)

    refused = run_nsq(["tail", "-t", "payments", "-n", "1", "--no-tls", *https])
    assert (refused.status, refused.out) == (2, b"")
    assert "no channel and 5 messages waiting" in refused.err
    assert nsqd.depth("payments") == 5

    misspelt = run_nsq(["tail", "-t", "payment", "-c", "c", "--no-tls", *https])
    assert misspelt.status == 3
    assert "Did you mean payments?" in misspelt.err

    flags = ["--output-dir", str(tmp_path / "out"), "--format", "raw", "--exit-idle", "1s"]
    archived = run_nsq(["to-file", "--topic-pattern", ".", "--no-tls", *https, *flags])
    assert archived.status == 0, archived.err
    [file] = (tmp_path / "out").glob("*.log")
    assert sorted(file.read_bytes().split()) == sorted(BODIES)


def test_a_pattern_that_nobody_can_be_asked_about_is_an_error(
    run_nsq: RunNsq, tmp_path: Path, dead_address: str
) -> None:
    where = ["--lookupd-http-address", dead_address, "--output-dir", str(tmp_path / "out")]
    result = run_nsq(["to-file", "--topic-pattern", ".", "--for", "3s", *where])

    assert result.status == 4
    assert f"cannot connect to http://{dead_address}" in result.err


@pytest.mark.parametrize(
    "command",
    [
        ["tail", "-t", "t", "-c", "c", "--for", "500ms"],
        ["peek", "-t", "t", "-c", "c"],
        ["to-file", "-t", "t", "--output-dir", DIRECTORY, "--for", "500ms"],
        ["to-file", "--topic-pattern", "t", "--output-dir", DIRECTORY, "--for", "500ms"],
        ["topic", "list"],
        ["stat", "--once"],
        ["lookup", "t"],
        ["nodes"],
    ],
    ids=" ".join,
)
def test_the_secret_goes_to_nsqlookupd_as_a_bearer_token_when_that_is_wanted(
    command: list[str], run_nsq: RunNsq, scripted_lookupd: Callable[[], Any], tmp_path: Path
) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": [], "channels": [], "producers": []}
    command = [str(tmp_path) if word == DIRECTORY else word for word in command]
    where = [f"--lookupd-http-address={lookupd.address}"]
    secret = {"NSQ_AUTH_SECRET": "s3cret"}

    plain = run_nsq([*command, *where, "--lookupd-authorization"], env=secret)
    wanted = {headers.get("Authorization") for _, headers in lookupd.requests}
    lookupd.requests.clear()
    run_nsq([*command, *where], env=secret)
    unwanted = {headers.get("Authorization") for _, headers in lookupd.requests}

    assert (wanted, unwanted) == ({"Bearer s3cret"}, {None})
    assert "the auth secret goes to http://" in plain.err


def test_every_command_reaches_an_announced_nsqd_by_the_address_map(
    run_nsq: RunNsq, lookupd: GoNsqlookupd, go_nsqd: MakeNsqd, tmp_path: Path
) -> None:
    nsqd = registered(go_nsqd, lookupd, ANNOUNCED)
    tcp_port = nsqd.tcp_address.rpartition(":")[2]
    pairs = [f"{ANNOUNCED}:{tcp_port}={nsqd.tcp_address}", f"{ANNOUNCED}=127.0.0.1"]
    where = [f"--lookupd-http-address={lookupd.http_address}"]
    where += [f"--address-map={pair}" for pair in pairs]

    refused = run_nsq(["tail", "-t", "payments", *where])
    assert "no channel and 5 messages waiting" in refused.err

    stat = run_nsq(["stat", "--once", "--json", *where])
    assert (stat.status, stat.err) == (0, "")
    assert nsqd.http_address.encode() in stat.out

    out = tmp_path / "out"
    flags = ["--output-dir", str(out), "--format", "raw", "--until-empty", "-c", "archive"]
    archived = run_nsq(["to-file", "--topic-pattern", "pay", *where, *flags])
    assert archived.status == 0, archived.err
    assert sum(len(path.read_bytes().split()) for path in out.glob("*.log")) == len(BODIES)

    nsqd.publish("payments", b"more")
    peeked = run_nsq(["peek", "-t", "payments", "-c", "archive", "-n", "1", *where])
    assert (peeked.status, peeked.out) == (0, b"more\n"), peeked.err


@pytest.mark.parametrize("command", [["topic", "list"], ["to-file", "--topic-pattern", "."]])
def test_how_long_a_daemon_may_take_is_one_option_of_every_command(
    command: list[str], run_nsq: RunNsq, lookupd: GoNsqlookupd, proxy_to: ProxyTo, tmp_path: Path
) -> None:
    slow = proxy_to(lookupd.http_address)
    slow.delay_s = 0.25
    args = [*command, f"--lookupd-http-address={slow.address}"]
    if command[0] == "to-file":
        args += ["--output-dir", str(tmp_path), "--for", "500ms"]

    assert run_nsq([*args, "--timeout", "100ms"]).status == 4
    assert run_nsq([*args, "--timeout", "20s"]).status == 0
