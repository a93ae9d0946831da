"""Who may ask the console for what, on a running one."""

from __future__ import annotations

import base64
import math
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from plugins.certificates import Certificates
from plugins.cli import RunNsq
from plugins.console import Console, ask
from plugins.http_api import Nsqd
from plugins.waiting import patience_s

from nsqtools.web.access import (
    FREE_FAILURES,
    PasswordFile,
    TooManyFailures,
    basic_credentials,
    hash_password,
    is_own_host,
    refusal,
)

NOBODY = "--nsqd-http-address=127.0.0.1:1"
Start = Callable[..., Console]


def basic(user: str, password: str) -> dict[str, str]:
    pair = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def test_every_answer_has_the_headers_that_keep_a_browser_safe(console: Start) -> None:
    running = console(NOBODY)

    for answer in (running.get("/"), running.get("/nothing"), running.get("/ping")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"


def test_a_call_under_a_foreign_name_or_from_another_site_is_refused(console: Start) -> None:
    running = console(NOBODY, "--allow-changes", "--allowed-host", "Console.Example")

    def status(method: str, **headers: str) -> int:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(running.url + "/ping", method, headers=named).status

    assert status("GET", Host="evil.example") == 403
    assert status("GET", Host="console.example:4171") == 200
    assert status("GET", Host="evil.example", Sec_Fetch_Site="same-origin") == 403
    assert status("GET", Sec_Fetch_Site="cross-site") == 200
    assert status("POST", Sec_Fetch_Site="cross-site") == 403
    assert status("POST", Sec_Fetch_Site="same-site") == 403
    assert status("POST", Origin="http://evil.example") == 403
    assert status("POST", Origin="null") == 403
    assert status("POST", Sec_Fetch_Site="same-origin") == 405  # /ping is only for GET
    assert status("POST", Origin=running.url) == 405


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost:4171", True),
        ("127.0.0.1", True),
        ("[::1]:4171", True),
        ("nsq-web", True),
        ("10.1.2.3:80", True),
        ("a.localhost", True),
        ("console.example.", True),
        ("evil.example", False),
        ("", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_addresses_and_names_without_a_dot_cannot_be_rebound(host: str, is_ours: bool) -> None:
    assert is_own_host(host, {"console.example"}) is is_ours


def test_an_origin_has_to_be_the_host() -> None:
    headers = {"host": "a.example:4171", "origin": "https://a.example:4171"}

    assert refusal("POST", headers, {"a.example"}) == ""
    assert refusal("POST", headers | {"origin": "http://a.example"}, {"a.example"}) != ""


def test_a_body_that_is_too_large_is_refused(console: Start) -> None:
    answer = console(NOBODY).post("/ping", b"x" * (1 << 20) + b"x")

    assert answer.status == 413


def test_a_base_path_is_where_everything_is(console: Start) -> None:
    running = console(NOBODY, "--base-path", "x/y/")

    assert running.url.endswith("/x/y")
    assert running.get("/ping").text == "OK"
    assert ask(running.url.removesuffix("/x/y") + "/ping").status == 404


def test_a_password_is_asked_for_and_wrong_ones_slow_down(
    console: Start, run_nsq: RunNsq, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    made = run_nsq(["web", "--print", "password"], stdin=b"ann:s3cret: too\n")
    users.write_bytes(b"# users\n\n" + made.out)
    running = console(NOBODY, "--auth", str(users))

    nobody = running.get("/")
    assert nobody.status == 401
    assert nobody.headers["www-authenticate"].startswith("Basic ")
    assert running.get("/ping").status == 200
    assert running.get("/", headers=basic("ann", "s3cret: too")).status == 200
    assert running.get("/", headers={"Authorization": "Basic =="}).status == 401
    statuses = [
        running.get("/", headers=basic("ann", "wrong")).status for _ in range(FREE_FAILURES + 1)
    ]
    assert set(statuses) == {401, 429}
    # who knows the password is not locked out by others at the same address
    assert running.get("/", headers=basic("ann", "s3cret: too")).status == 200


def test_an_unknown_user_is_checked_as_long_as_a_known_one(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password('right')}\nbob:{hash_password('right')}\n")
    known = PasswordFile(users)

    assert known.is_right("ann", "right", "10.0.0.1")
    assert not known.is_right("ann", "wrong", "10.0.0.1")
    assert not known.is_right("nobody", "right", "10.0.0.1")
    for _ in range(FREE_FAILURES):
        known.is_right("ann", "wrong", "10.0.0.2")
    known._failures["10.0.0.2"] = FREE_FAILURES, math.inf
    with pytest.raises(TooManyFailures):
        known.is_right("ann", "wrong", "10.0.0.2")
    assert not known.is_right("bob", "wrong", "10.0.0.3")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "has 0 users"),
        (b"ann:plain\n", "line 1: not USER:HASH"),
        (b"ann:scrypt$999999999$8$1$YQ==$YQ==\n", "line 1: not USER:HASH"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_bad_password_file_is_one_error(
    run_nsq: RunNsq, tmp_path: Path, content: bytes, complaint: str
) -> None:
    users = tmp_path / "users"
    users.write_bytes(content)

    done = run_nsq(["web", "--listen", "127.0.0.1:0", NOBODY, "--auth", str(users)])

    assert done.status == 2
    assert complaint in done.err


def test_a_broken_authorization_header_is_nobody() -> None:
    assert basic_credentials("") is None
    assert basic_credentials("Bearer abc") is None
    assert basic_credentials("Basic YQ") is None
    assert basic_credentials("basic YTpiOmM=") == ("a", "b:c")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--listen", "0.0.0.0:0", "--allow-changes"],
            "would let anyone who reaches it delete topics",
        ),
        (["--listen", "nonsense"], "invalid address 'nonsense'"),
        (["--listen-tls-cert", "/missing"], "need each other"),
        (["--listen-tls-cert", "/missing", "--listen-tls-key", "/missing"], "cannot use /missing"),
        (["--trusted-proxy", "10.0.0.0/99"], "invalid network"),
        (["--base-path", "/a/../b"], "invalid base path"),
        (["--refresh", "1m"], "--refresh must be 100ms to 30s"),
        (["--audit-log", "/missing/log"], "cannot write the audit log /missing/log"),
    ],
)
def test_what_cannot_work_is_one_error(
    run_nsq: RunNsq, arguments: list[str], complaint: str
) -> None:
    given = arguments if "--listen" in arguments else ["--listen", "127.0.0.1:0", *arguments]
    done = run_nsq(["web", NOBODY, *given])

    assert done.status in (1, 2, 5)
    [line, *_] = done.err.splitlines()
    assert complaint in line
    assert "bug" not in done.err


def test_an_address_in_use_is_one_error(console: Start, run_nsq: RunNsq) -> None:
    running = console(NOBODY)

    taken = running.url.removeprefix("http://")
    done = run_nsq(["web", NOBODY, "--listen", taken])

    assert done.status == 2
    assert f"cannot listen on {taken} (address already in use)" in done.err.lower()


def test_https_is_served_with_the_certificate_given(
    console: Start, certificates: Certificates
) -> None:
    server = certificates.server
    running = console(
        NOBODY, "--listen-tls-cert", str(server.cert), "--listen-tls-key", str(server.key)
    )

    assert running.url.startswith("https://127.0.0.1:")
    assert running.get("/ping", tls=ssl.create_default_context(cafile=certificates.ca)).text == "OK"


def test_it_starts_without_a_cluster_and_ends_soon_after_a_signal(
    console: Start, any_nsqd: Callable[..., Nsqd]
) -> None:
    running = console(NOBODY, f"--nsqd-http-address={any_nsqd().http_address}")

    assert running.get("/").status == 200
    running.process.send_signal(signal.SIGTERM)

    assert running.process.wait(patience_s(10)) == 143
    assert "Traceback" not in running.log
