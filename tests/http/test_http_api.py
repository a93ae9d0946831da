"""The HTTP APIs' client: every failure is one of our errors and names the address."""

from __future__ import annotations

import ssl
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from plugins.certificates import Certificates
from plugins.clients import InBackground
from plugins.scripted_lookupd import MakeScripted
from plugins.servers import MakeNsqd
from plugins.waiting import patience_s, wait_until

from nsqtools.errors import ConnectionFailed, DeadlineExceeded, HTTPError, TLSError
from nsqtools.http.http_api import HTTPAPI, NsqlookupdHTTPClient


def get(url: str, **settings: Any) -> Any:
    with HTTPAPI(url, **settings) as api:
        return api.get("/x")


def test_who_refuses_or_never_answers(dead_address: str, deaf_address: str) -> None:
    refused = f"cannot connect to http://{dead_address} .connection refused"
    with pytest.raises(ConnectionFailed, match=refused):
        get(f"http://{dead_address}")
    with pytest.raises(DeadlineExceeded, match=f"http://{deaf_address}: no answer in time"):
        get(f"http://{deaf_address}", timeout_s=0.1)


def test_a_name_server_that_does_not_answer(silent_name_server: None) -> None:
    with pytest.raises(DeadlineExceeded, match="http://nsqd-1:4151: no answer in time"):
        get("http://nsqd-1:4151", timeout_s=0.1)


@pytest.mark.parametrize(
    ("status", "category"),
    [(401, "refused"), (403, "refused"), (404, "not_found"), (500, "failed")],
)
def test_an_error_status_has_its_category_and_nsqs_own_word(
    scripted_lookupd: MakeScripted, status: int, category: str
) -> None:
    lookupd = scripted_lookupd()
    lookupd.status, lookupd.answer = status, {"message": "SOME_WORD"}
    with pytest.raises(HTTPError, match=f"{lookupd.address}: SOME_WORD .HTTP {status}") as caught:
        get(f"http://{lookupd.address}")
    assert (caught.value.category, caught.value.code) == (category, "SOME_WORD")


def test_both_forms_of_json_are_read(scripted_lookupd: MakeScripted) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": ["a"]}
    assert get(f"http://{lookupd.address}") == {"topics": ["a"]}
    [(_, headers)] = lookupd.requests
    assert headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert "Authorization" not in headers
    lookupd.answer = {"status_code": 200, "status_txt": "OK", "data": {"topics": ["a"]}}
    assert get(f"http://{lookupd.address}") == {"topics": ["a"]}


def test_an_unknown_topic_is_an_answer(scripted_lookupd: MakeScripted) -> None:
    lookupd = scripted_lookupd()
    lookupd.status, lookupd.answer = 404, {"message": "TOPIC_NOT_FOUND"}
    with closing(NsqlookupdHTTPClient(f"http://{lookupd.address}")) as api:
        assert not api.lookup("t").is_known
        lookupd.answer = {"message": "PAGE_NOT_FOUND"}
        with pytest.raises(HTTPError):
            api.lookup("t")


def test_a_certificate_that_is_not_trusted_is_named(
    go_nsqd: MakeNsqd, certificates: Certificates
) -> None:
    nsqd = go_nsqd(*certificates.server.nsqd_flags)
    url = f"https://{nsqd.https_address}"
    with pytest.raises(TLSError, match=url) as caught:
        get(url)
    assert "--tls-ca-file" in caught.value.hint
    trusting = ssl.create_default_context(cafile=certificates.ca)
    with HTTPAPI(url, tls=trusting) as api:
        assert api.get("/info")["tcp_port"] == int(nsqd.tcp_address.rpartition(":")[2])


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_closing_during_a_question_waits_for_its_answer_and_leaves_no_socket(
    go_nsqd: MakeNsqd, certificates: Certificates, in_background: InBackground, scheme: str
) -> None:
    """Over TLS it is closed while the connection is being made."""
    nsqd = go_nsqd(*certificates.server.nsqd_flags)
    address = nsqd.http_address if scheme == "http" else nsqd.https_address
    trusting = ssl.create_default_context(cafile=certificates.ca)
    api = HTTPAPI(f"{scheme}://{address}", tls=trusting, timeout_s=patience_s(10))
    nsqd.pause()
    asked = in_background(api.get, "/info")
    wait_until(lambda: connections_to(address), what="a connection")
    api.close()
    nsqd.resume()
    assert asked.result(patience_s(10))["version"]
    assert connections_to(address) == []


def connections_to(address: str) -> list[str]:
    """The lines of the kernel about connections that are established to a port of ours."""
    port, is_established = f":{int(address.rpartition(':')[2]):04X}", "01"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [
        line for line in lines if line.split()[2][-5:] == port and line.split()[3] == is_established
    ]


def test_addresses_and_secrets_beyond_ascii_are_sent_as_http_wants_them(
    scripted_lookupd: MakeScripted,
) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": []}
    base = f"http://{lookupd.address}"

    with closing(NsqlookupdHTTPClient(f"{base}/zürich", bearer="geheimnüß")) as api:
        api.topics()
    with closing(NsqlookupdHTTPClient(base.replace("//", "//user:p%40ss@"))) as api:
        api.topics()
    with pytest.raises(ConnectionFailed), closing(HTTPAPI("http://zürich.invalid:1")) as api:
        api.get("/x")

    paths = [path for path, _ in lookupd.requests]
    assert paths == ["/z%C3%BCrich/topics", "/topics"]
    assert lookupd.requests[1][1]["Authorization"] == "Basic dXNlcjpwQHNz"
