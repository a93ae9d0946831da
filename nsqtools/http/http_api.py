"""What the HTTP APIs of nsqd and nsqlookupd have in common, on httpx.

One client per address keeps its connection. Every failure becomes one of our errors and names the
URL. Both the plain JSON of NSQ 1.0 and the wrapped form before it (``status_code``, ``data``) are
read.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nsqtools.errors import ConnectionFailed, DeadlineExceeded, HTTPError, ProtocolError, TLSError

if TYPE_CHECKING:
    import ssl

    import httpx

NSQ_V1 = "application/vnd.nsq; version=1.0"


class HTTPAPI:
    """One HTTP address. ``url`` is the base URL; timeouts are seconds.

    Thread-safe. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 2.0,
        timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
        bearer: str = "",
    ) -> None:
        import httpx

        self.url = url
        headers = {"Accept": NSQ_V1, "User-Agent": "nsqtools"}
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=connect_timeout_s),
            # certificates are loaded only where they are used: it takes longer than a request
            verify=tls if tls is not None else url.startswith("https:"),
            headers=headers,
            trust_env=False,  # daemons are not behind the proxy of the environment
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

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
        return self._request("GET", self.url + path, None).text

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
    ) -> httpx.Response:
        import httpx

        try:
            response = self._client.request(method, url, params=parameters, content=content)
        except httpx.TimeoutException as exc:
            raise DeadlineExceeded(f"{self.url}: no answer in time") from exc
        except httpx.HTTPError as exc:
            raise self._map(exc) from exc
        if response.is_success:
            return response
        code = _error_code(response)
        raise HTTPError(
            f"{self.url}: {code or response.reason_phrase} (HTTP {response.status_code})",
            status=response.status_code,
            code=code,
            hint=_STATUS_HINTS.get(code, ""),
        )

    def _map(self, exc: httpx.HTTPError) -> Exception:
        import httpx

        cause: BaseException = exc
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        reason = (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()
        if "certificate" in reason:
            return TLSError(
                f"{self.url}: {reason}", hint="Give the CA of its certificate with --tls-ca-file."
            )
        if isinstance(exc, httpx.ConnectError):
            return ConnectionFailed(
                f"cannot connect to {self.url} ({reason})", hint="Check the address and port."
            )
        if isinstance(exc, httpx.RemoteProtocolError):
            return ProtocolError(
                f"{self.url} does not speak HTTP ({reason})",
                hint="nsqd's HTTP port is usually 4151, nsqlookupd's 4161.",
            )
        return ConnectionFailed(f"{self.url}: {reason}")

    def _decode(self, response: httpx.Response) -> Any:
        try:
            answer = response.json()
        except ValueError as exc:
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


def _error_code(response: httpx.Response) -> str:
    try:
        message = response.json()["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return message if isinstance(message, str) else ""
