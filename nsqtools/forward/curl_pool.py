"""Send requests by libcurl, by the rules of `http_pool`.

libcurl follows no redirects by itself, and limits the size of the head of a response.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pycurl

from nsqtools.files.opening import ReloadedValue
from nsqtools.forward.http_pool import (
    MAX_BODY,
    MAX_IDLE,
    PRIVATE,
    TICK_S,
    HttpPool,
    HttpReply,
    OnReply,
    may_connect_to,
)
from nsqtools.forward.http_requests import HttpRequest
from nsqtools.transport.stream import TLSOptions, make_context


class _CurlTls:
    """TLS as libcurl gets it: ``blobs`` are the contents of CA file, certificate and key."""

    def __init__(self, options: TLSOptions) -> None:
        self._options = options
        self._files = (options.ca_file, options.cert_file, options.key_file)
        self.blobs = ReloadedValue(self._files, self._read)
        self._system = ssl.get_default_verify_paths()

    def _read(self) -> list[bytes | None]:
        make_context(self._options)  # raises an error that names the invalid file
        return [Path(path).read_bytes() if path else None for path in self._files]

    def prepare(self, curl: pycurl.Curl) -> None:
        """Set the options that do not change between requests."""
        curl.setopt(pycurl.SSLVERSION, pycurl.SSLVERSION_TLSv1_2)
        if self._options.insecure_skip_verify:
            curl.setopt(pycurl.SSL_VERIFYPEER, 0)
            curl.setopt(pycurl.SSL_VERIFYHOST, 0)
        elif not self._options.ca_file:  # the default paths of libcurl are those of its build host
            if self._system.cafile:
                curl.setopt(pycurl.CAINFO, self._system.cafile)
            if self._system.capath:
                curl.setopt(pycurl.CAPATH, self._system.capath)


class _Transfer:
    """A handle of libcurl, used for one request after another."""

    def __init__(self, pool: CurlPool) -> None:
        self.curl = curl = pycurl.Curl()
        self._done: OnReply
        self._pool = pool
        self._request: HttpRequest
        self._url = ""
        self._head: list[bytes] = []
        self._sent = 0
        self._problem = ""  # why no connection was opened
        self._blobs: list[bytes | None] | None = None
        curl.setopt(pycurl.NOSIGNAL, 1)
        curl.setopt(pycurl.PROXY, "")
        curl.setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
        curl.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        curl.setopt(pycurl.PATH_AS_IS, 1)
        curl.setopt(pycurl.MAXFILESIZE_LARGE, MAX_BODY)
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, _milliseconds(pool.connect_timeout_s))
        curl.setopt(pycurl.TIMEOUT_MS, _milliseconds(pool.request_timeout_s))
        curl.setopt(pycurl.OPENSOCKETFUNCTION, self._open)
        curl.setopt(pycurl.PREREQFUNCTION, self._before)
        curl.setopt(pycurl.HEADERFUNCTION, self._head.append)
        curl.setopt(pycurl.WRITEFUNCTION, _discard)
        if pool.curl_tls is not None:
            pool.curl_tls.prepare(curl)

    def begin(self, request: HttpRequest, done: OnReply) -> None:
        curl = self.curl
        self._request, self._done = request, done
        self._head.clear()
        self._sent = 0
        self._problem = ""
        if request.url != self._url:
            curl.setopt(pycurl.URL, request.url)
            self._url = request.url  # only after libcurl has accepted it
        if request.body is not None:
            curl.setopt(pycurl.POSTFIELDS, request.body)
        curl.setopt(pycurl.HTTPHEADER, request.headers)
        tls = self._pool.curl_tls
        if tls is not None and (blobs := tls.blobs.get()) is not self._blobs:
            self._blobs = blobs
            names = (pycurl.CAINFO_BLOB, pycurl.SSLCERT_BLOB, pycurl.SSLKEY_BLOB)
            for name, data in zip(names, blobs, strict=True):
                if data is not None:
                    curl.setopt(name, data)

    def end(self, code: int, message: str) -> None:
        """Call back with the response or the error of the request."""
        status = self.curl.getinfo(pycurl.RESPONSE_CODE)
        if not code or (status >= 200 and self._head and self._head[-1] == b"\r\n"):
            if status < 300:
                result = HttpReply(status)
            else:
                result = HttpReply(status, self._field(b"retry-after"), self._field(b"location"))
        else:
            result = self._broken(code, message)
        self._done(result, self._sent > 1)

    def _broken(self, code: int, message: str) -> HttpReply:
        name = self._request.name
        if self._sent and not self._problem:
            if code == pycurl.E_OPERATION_TIMEDOUT:
                message = f"no answer within {self._pool.request_timeout_s:.3g} s"
            # libcurl has no text for a head that is too long, for example.
            return HttpReply(0, error=f"{name}: {message or f'error {code} of libcurl'}")
        if self._problem:
            message = self._problem
        elif code == pycurl.E_COULDNT_CONNECT and (number := self.curl.getinfo(pycurl.OS_ERRNO)):
            message = os.strerror(number)
        error = f"cannot connect to {name} ({message})"
        return HttpReply(0, error=error, was_sent=False, is_forbidden=self._problem == PRIVATE)

    def _field(self, name: bytes) -> str:
        for line in reversed(self._head):  # earlier lines may belong to 100 Continue
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return value.strip().decode("latin-1")
        return ""

    def _open(self, purpose: int, address: tuple[int, int, int, tuple[str, int]]) -> int:
        family, kind, protocol, (host, *_) = address
        if self._is_allowed(host):
            try:
                return socket.socket(family, kind, protocol).detach()
            except OSError as exc:
                self._problem = exc.strerror or str(exc)
        return int(pycurl.SOCKET_BAD)

    def _before(self, host: str, *args: object) -> int:
        """Check the address again: a reused connection may be that of a less strict request."""
        if not self._is_allowed(host):
            return int(pycurl.PREREQFUNC_ABORT)
        self._problem = ""  # of another address of the same name
        self._sent += 1
        return int(pycurl.PREREQFUNC_OK)

    def _is_allowed(self, host: str) -> bool:
        if may_connect_to(host, allows_private=self._request.allows_private):
            return True
        self._problem = PRIVATE
        return False


class CurlPool(HttpPool):
    """A pool on libcurl."""

    engine = f"libcurl {pycurl.version_info()[1]}"

    def __init__(
        self, connect_timeout_s: float, request_timeout_s: float, tls: TLSOptions | None
    ) -> None:
        super().__init__(connect_timeout_s, request_timeout_s, tls)
        self.curl_tls = None if tls is None else _CurlTls(tls)
        self._idle: list[_Transfer] = []
        self._busy: dict[pycurl.Curl, _Transfer] = {}

    def start(self, on_tick: Callable[[float], None], after_turn: Callable[[], None]) -> None:
        self._poll = select.poll()  # unlike with epoll, changing the events is no system call
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_MAXCONNECTS, MAX_IDLE)
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poll.register(self._wake_receiver, select.POLLIN)
        super().start(on_tick, after_turn)

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"w")
        except OSError:
            pass  # a full socket wakes the thread anyway; a closed one means that it has ended

    def send(self, request: HttpRequest, done: OnReply) -> None:
        transfer = self._idle.pop() if self._idle else _Transfer(self)
        try:
            transfer.begin(request, done)
        except pycurl.error as exc:  # for example, the URL is longer than libcurl allows
            self._idle.append(transfer)
            answer = HttpReply(0, error=f"{request.name}: {exc.args[1]}")
            # A direct call would recurse, because `done` sends the next request.
            self.call_soon(lambda: done(answer, False))
            return
        self._busy[transfer.curl] = transfer
        self._multi.add_handle(transfer.curl)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        woken_by = self._wake_receiver.fileno()
        try:
            while not self._is_stopping:
                self._is_asleep = not self._calls
                ready = self._poll.poll(0 if self._calls else self._wait_ms())
                self._is_asleep = False
                for number, events in ready:
                    if number == woken_by:
                        self._wake_receiver.recv(4096)
                    else:
                        self._multi.socket_action(number, _CURL_EVENTS[events & _POLL_BOTH])
                self._run_calls()
                if not self._wait_ms():
                    self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
                self._end_requests()
                self._end_turn()
        except Exception as exc:
            self.failure = exc
        finally:
            self._close()

    def _wait_ms(self) -> int:
        """Return the time until libcurl's next timer, at most `TICK_S`."""
        tick_ms, wait_ms = _milliseconds(TICK_S), int(self._multi.timeout())
        return tick_ms if wait_ms < 0 else min(wait_ms, tick_ms)

    def _end_requests(self) -> None:
        remaining = 1
        while remaining:
            remaining, succeeded, failed = self._multi.info_read()
            for curl, code, message in (*((curl, 0, "") for curl in succeeded), *failed):
                self._end(curl, code, message)

    def _end(self, curl: pycurl.Curl, code: int, message: str) -> None:
        self._multi.remove_handle(curl)
        transfer = self._busy.pop(curl)
        transfer.end(code, message)
        self._idle.append(transfer)

    def _close(self) -> None:
        for curl in self._busy:  # not reported: a stop is no failure of an endpoint
            self._multi.remove_handle(curl)
        self._after_turn()
        self._multi.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    # -- callback of libcurl --------------------------------------------------------------------

    def _watch(self, event: int, number: int, *args: object) -> None:
        if event == pycurl.POLL_REMOVE:
            self._poll.unregister(number)
        else:
            self._poll.register(number, _POLL_EVENTS[event])


_POLL_BOTH = select.POLLIN | select.POLLOUT
_POLL_EVENTS = (0, select.POLLIN, select.POLLOUT, _POLL_BOTH)  # by POLL_NONE to POLL_INOUT
_CURL_EVENTS = {
    0: pycurl.CSELECT_ERR,
    select.POLLIN: pycurl.CSELECT_IN,
    select.POLLOUT: pycurl.CSELECT_OUT,
    _POLL_BOTH: pycurl.CSELECT_IN | pycurl.CSELECT_OUT,
}


def _discard(data: bytes) -> None:
    """Ignore a chunk of a body."""


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), (1 << 31) - 1)  # 0 would be without a limit
