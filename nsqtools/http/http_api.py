"""What the HTTP APIs of nsqd and nsqlookupd have in common.

One client per address keeps its connection. Every failure becomes one of our errors and names the
URL: what a daemon sends, however odd, is never an error of usage nor a bug of ours. Both the plain
JSON of NSQ 1.0 and the wrapped form before it (``status_code``, ``data``) are read.

Proxies of the environment are not used, for daemons are not behind them, and redirects are not
followed: they would take the token elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from nsqtools.errors import (
    ConfigurationError,
    ConnectionFailed,
    DeadlineExceeded,
    HTTPError,
    NsqError,
    ProtocolError,
    TLSError,
)
from nsqtools.protocol.text import escape_line

if TYPE_CHECKING:
    import ssl

    from nsqtools.http.exchange import HTTPAnswer

NSQ_V1 = "application/vnd.nsq; version=1.0"

MAX_BODY_BYTES = 32 << 20
MAX_JSON_VALUES = 1 << 20
"""/stats of 30,000 consumers has as many. An empty list takes 3 bytes of JSON, and 64 of memory."""

_URL_MARKS = "/?%~:@!$&'()*+,;="  # what a URL as given may hold besides letters


class HTTPAPI:
    """One HTTP address. ``url`` is the base URL; ``timeout_s`` is for a whole exchange.

    Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 2.0,
        timeout_s: float = 5.0,
        max_body_bytes: int = MAX_BODY_BYTES,
        tls: ssl.SSLContext | None = None,
        bearer: str = "",
    ) -> None:
        import httpx

        from nsqtools.http.exchange import Exchanges

        self.url = url
        try:
            httpx.URL(url)
        except httpx.InvalidURL:
            raise ConfigurationError(f"invalid HTTP address {url!r}") from None
        headers = {"Accept": NSQ_V1}
        if bearer:  # user and password in the URL take its place
            headers["Authorization"] = f"Bearer {bearer}"
        self._exchanges = Exchanges(
            connect_timeout_s=connect_timeout_s,
            timeout_s=timeout_s,
            max_body_bytes=max_body_bytes,
            tls=tls,
            headers=headers,
        )

    def close(self) -> None:
        """Close the connection."""
        self._exchanges.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def get(self, path: str, **parameters: str) -> Any:
        """GET and decode JSON. Raises `ConnectionFailed`, `HTTPError`, `ProtocolError`."""
        return self._decode(self._request("GET", self.url + path, parameters))

    def get_url(self, url: str) -> Any:
        """GET a whole URL and decode JSON, with the same errors."""
        return self._decode(self._request("GET", url, None))

    def get_text(self, path: str) -> str:
        """GET and return the body as it is, with the same errors."""
        return decode_text(self._request("GET", self.url + path, None))

    def post(self, path: str, **parameters: str) -> None:
        """POST with nothing but parameters, with the same errors."""
        self._request("POST", self.url + path, parameters)

    def ping(self) -> None:
        """Ask /ping, which fails where the daemon is not healthy, with the same errors."""
        answer = self.get_text("/ping")
        if answer != "OK":
            raise self._unlike_nsq()

    def _request(
        self,
        method: str,
        url: str,
        parameters: dict[str, str] | None,
        content: bytes | None = None,
    ) -> bytearray:
        answer = self._exchange(method, url, parameters, content)
        if 200 <= answer.status < 300:
            return answer.body
        code = _error_code(answer)
        raise HTTPError(
            f"{self.url}: {escape_line(code or answer.reason)} (HTTP {answer.status})",
            status=answer.status,
            code=code,
            hint=_STATUS_HINTS.get(code, ""),
        )

    def _exchange(
        self,
        method: str,
        url: str,
        parameters: dict[str, str] | None,
        content: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPAnswer:
        """Ask, and return the answer whatever its status is."""
        import httpcore
        import httpx

        parts = urlsplit(url)
        # a name that a daemon gave may hold what is not UTF-8: the daemon shall refuse it
        given = urlencode(parameters or {}, errors="surrogatepass")
        query = "&".join(filter(None, (parts.query, given)))
        path = quote(parts.path or "/", safe=_URL_MARKS)
        query = quote(query, safe=_URL_MARKS)
        try:
            return self._exchanges.request(
                method, urlunsplit((*parts[:2], path, query, "")), headers, content
            )
        except (httpcore.TimeoutException, DeadlineExceeded) as exc:
            raise DeadlineExceeded(f"{self.url}: no answer in time") from exc
        except ProtocolError as exc:
            raise ProtocolError(f"{self.url}: {exc}", hint=exc.hint) from exc
        except (
            UnicodeError,
            httpx.InvalidURL,
            httpcore.UnsupportedProtocol,
            httpcore.LocalProtocolError,
        ) as exc:
            raise ConnectionFailed(f"{self.url}: {exc}", hint="Check the address.") from exc
        except (httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError) as exc:
            raise self._map(exc) from exc

    def _map(self, exc: Exception) -> NsqError:
        import httpcore
        import httpx

        cause: BaseException = exc
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()
        if "certificate" in reason:
            return TLSError(
                f"{self.url}: {reason}",
                hint="Set tls_root_ca_file (nsq: --tls-ca-file) to the CA of its certificate.",
            )
        if isinstance(exc, httpcore.ConnectError):
            return ConnectionFailed(
                f"cannot connect to {self.url} ({reason})", hint="Check the address and port."
            )
        if isinstance(exc, httpcore.RemoteProtocolError | httpx.RemoteProtocolError):
            return ProtocolError(
                f"{self.url} does not speak HTTP ({reason})",
                hint="nsqd's HTTP port is usually 4151, nsqlookupd's 4161.",
            )
        return ConnectionFailed(f"{self.url}: {reason}")

    def _decode(self, body: bytearray) -> Any:
        """Read JSON, wrapped or not. Raises `ProtocolError`."""
        try:
            answer = load_json(body)
        except (ValueError, RecursionError) as exc:
            raise self._unlike_nsq() from exc
        if isinstance(answer, dict) and "status_code" in answer and "data" in answer:
            return answer["data"]
        return answer

    def _unlike_nsq(self) -> ProtocolError:
        return ProtocolError(
            f"{self.url} does not answer like NSQ",
            hint="nsqd's HTTP port is usually 4151, nsqlookupd's 4161.",
        )


_STATUS_HINTS = {
    "TLS_REQUIRED": "This nsqd answers on its HTTPS port only: give an https:// address.",
}


def load_json(body: bytes | bytearray) -> Any:
    """Decode JSON of a size that is not absurd. Raises ``ValueError`` and ``RecursionError``."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")
    return json.loads(body)


def decode_text(body: bytes | bytearray) -> str:
    """Read text as UTF-8, whatever charset the answer claims."""
    return body.decode("utf-8", "backslashreplace")


def _error_code(answer: HTTPAnswer) -> str:
    try:
        message = load_json(answer.body)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return message if isinstance(message, str) else ""
