"""The default requests of HTTP clients in other languages reach the daemons completely."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from plugins.raw_client import RawClient
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s

from nsqtools.server import EmbeddedNsqlookupd

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAI\r\n"
SIZED = b"Content-Length: 3\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
# recorded: POST of a, newline, b with Java 17, curl 7.88, node 20 and Go 1.26; then by hand
HEADS = {
    "java.net.http": H2C + SIZED + b"Host: 127.0.0.1:4151\r\nUser-Agent: Java-http-client/17\r\n",
    "curl --http2": b"Host: 127.0.0.1:4151\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n"
    + H2C
    + SIZED
    + b"Content-Type: application/x-www-form-urlencoded\r\n",
    "node fetch": b"host: 127.0.0.1:4151\r\nconnection: keep-alive\r\ncontent-type: text/plain;"
    b"charset=UTF-8\r\naccept: */*\r\naccept-language: *\r\nsec-fetch-mode: cors\r\n"
    b"user-agent: node\r\naccept-encoding: gzip, deflate\r\ncontent-length: 3\r\n",
    "node http": b"Host: 127.0.0.1:4151\r\nConnection: keep-alive\r\n" + SIZED,
    "node http, written": b"Host: 127.0.0.1:4151\r\nConnection: keep-alive\r\n" + CHUNKED,
    "go": b"Host: 127.0.0.1:4151\r\nUser-Agent: Go-http-client/1.1\r\n"
    + SIZED
    + b"Content-Type: text/plain\r\nAccept-Encoding: gzip\r\n",
    "h2c, chunked": b"Host: 127.0.0.1:4151\r\n" + H2C + CHUNKED,
    "websocket": b"Host: x\r\n"
    + SIZED
    + b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "h2c, then closed": b"Host: x\r\n" + SIZED + H2C + b"Connection: close\r\n",
}


@pytest.mark.parametrize("client", HEADS)
def test_a_body_is_read_with_the_headers_of_each_client(client: str, any_nsqd: AnyNsqd) -> None:
    nsqd = any_nsqd()
    fields = HEADS[client]
    body = b"3\r\na\nb\r\n0\r\n\r\n" if b"chunked" in fields else b"a\nb"
    post = b"POST /mpub?topic=t HTTP/1.1\r\n" + fields + b"\r\n"
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n" + H2C + b"\r\n"
    requests = [*([post + body] * 2), post, body, post + body[:1], body[1:], ping, ping]
    if b"close" in fields:
        requests = [post, body]
    with RawClient(nsqd.http_address, magic=b"") as connection:
        for request in requests:
            connection.send(request)
            time.sleep(0.01)  # so that most arrive in separate reads
        connection.socket.shutdown(1)
        answers = connection.socket.makefile("rb").read()
    posts = requests.count(post) + requests.count(post + body) + requests.count(post + body[:1])
    assert answers.count(b"HTTP/1.1 200 OK") == posts + requests.count(ping)
    assert answers.count(b"Connection: close") == (b"close" in fields)
    assert nsqd.topic_stats("t")["depth"] == 2 * posts


def test_an_offered_upgrade_keeps_the_connection_to_nsqlookupd() -> None:
    with EmbeddedNsqlookupd() as lookupd, RawClient(lookupd.http_address, magic=b"") as client:
        for path in (b"/topic/create?topic=t", b"/channel/create?topic=t&channel=c"):
            client.send(b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (path, H2C))
            assert client.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_old_http_clients_are_answered_as_by_go(any_nsqd: AnyNsqd) -> None:
    address = any_nsqd().http_address
    padded = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n3 \r\nabc\r\n0\r\n\r\n"
    star = b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"
    twice = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n" + SIZED + b"A: b\r\n" + SIZED + b"\r\nabc"
    unix = b"GET /ping HTTP/1.1\nHost: x\nConnection: keep-alive\n\n"
    with RawClient(address, magic=b"") as connection:
        for request in (padded, star, unix, twice, padded):
            connection.send(request)
            assert connection.socket.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        connection.send(twice.replace(b"3", b"4", 1))  # The lengths differ.
        assert connection.socket.recv(1 << 16).startswith(b"HTTP/1.1 400 Bad Request")


def test_a_daemon_serves_its_stacks_and_refers_to_tools_for_other_profiles() -> None:
    with EmbeddedNsqlookupd() as lookupd:
        url = f"http://{lookupd.http_address}/debug/pprof/"
        assert "goroutine" in httpx.get(url).text
        stacks = httpx.get(url + "goroutine").text
        assert ("thread MainThread" in stacks, "serve" in stacks) == (True, True)
        heap = httpx.get(url + "heap")
        assert (heap.status_code, f"--pid {os.getpid()}" in heap.text) == (501, True)


JAVA = """import java.net.URI; import java.net.http.*; class Post {
  public static void main(String[] args) throws Exception { var client = HttpClient.newHttpClient();
    for (int i = 0; i < 20; i++) client.send(HttpRequest.newBuilder(URI.create(args[0])).POST(
      HttpRequest.BodyPublishers.ofString("a\\nb")).build(), HttpResponse.BodyHandlers.ofString());
} }"""
GO = """package main
import ("net/http"; "os"; "strings")
func main() { for i := 0; i < 20; i++ {
  _, err := http.Post(os.Args[1], "", strings.NewReader("a\\nb"))
  if err != nil { panic(err) } } }"""
NODE = "(async () => { for (let i = 0; i < 20; i++) await fetch(process.argv[1], "
NODE += "{method: 'POST', body: 'a\\nb'}) })()"
PROGRAMS = {
    "java": ("Post.java", JAVA, ["java", "Post.java"]),
    "go": ("post.go", GO, ["go", "run", "post.go"]),
    "node": ("post.js", NODE, ["node", "-e", NODE]),
    "curl": ("body", "a\nb", ["curl", "-sf", "--http2", "--data-binary", "@body"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_real_client_publishes(program: str, any_nsqd: AnyNsqd, tmp_path: Path) -> None:
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    nsqd = any_nsqd()
    name, source, command = PROGRAMS[program]
    (tmp_path / name).write_text(source)
    url = f"http://{nsqd.http_address}/mpub?topic=t"
    result = subprocess.run(
        [*command, url], cwd=tmp_path, timeout=patience_s(60), capture_output=True
    )
    assert result.returncode == 0, result.stderr
    assert nsqd.topic_stats("t")["depth"] == (2 if program == "curl" else 40)
