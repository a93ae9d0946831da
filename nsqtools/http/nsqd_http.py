"""The HTTP API of nsqd, as far as clients need it.

A server other than nsqd is recognized by its answers, not by its status alone: to ``/stats``
nsqlookupd says 404 as any other web server does, which must not read as "the topic is not there".
"""

from __future__ import annotations

from typing import Any

from nsqtools.errors import HTTPError, ProtocolError
from nsqtools.http.http_api import HTTPAPI, decode_text, load_json


class NsqdHTTPClient(HTTPAPI):
    """One nsqd."""

    def info(self) -> dict[str, Any]:
        """Return what /info says: version, ports, limits. Raises what `HTTPAPI.get` raises."""
        info = self._object("/info", "tcp_port")
        ports = [info["tcp_port"], info.get("http_port", 0)]
        host = info.setdefault("broadcast_address", "")
        if not isinstance(host, str) or not all(type(p) is int and 0 <= p < 65536 for p in ports):
            raise self._unlike_nsqd()
        return info

    def stats(
        self, topic: str = "", channel: str = "", *, clients: bool = False, memory: bool = False
    ) -> dict[str, Any]:
        """Return /stats as JSON, of one topic and channel or of all.

        What is about clients and memory is left out unless asked for: it costs nsqd the most.
        """
        parameters = {
            "format": "json",
            "include_clients": str(clients).lower(),
            "include_mem": str(memory).lower(),
        }
        if topic:
            parameters["topic"] = topic
        if channel:
            parameters["channel"] = channel
        return self._object("/stats", "topics", **parameters)

    def administer(self, action: str, topic: str, channel: str = "") -> None:
        """Create, delete, empty, pause or unpause a topic, or one channel of it.

        Raises `HTTPError` of category ``not_found`` where it does not exist.
        """
        if channel:
            self.post(f"/channel/{action}", topic=topic, channel=channel)
        else:
            self.post(f"/topic/{action}", topic=topic)

    def config(self, option: str) -> Any:
        """Return one option of the running nsqd: a number, a switch, a list, or text."""
        return self._setting(self._request("GET", f"{self.url}/config/{option}", None))

    def set_config(self, option: str, value: str) -> Any:
        """Change one option of the running nsqd, until it ends, and return its new value."""
        answer = self._request("PUT", f"{self.url}/config/{option}", None, value.encode())
        return self._setting(answer)

    @staticmethod
    def _setting(body: bytearray) -> Any:
        """nsqd writes text bare, and everything else as JSON."""
        try:
            return load_json(body)
        except (ValueError, RecursionError):
            return decode_text(body)

    def _object(self, path: str, expected: str, **parameters: str) -> dict[str, Any]:
        try:
            answer = self.get(path, **parameters)
        except HTTPError as exc:
            if exc.status == 404:
                raise self._unlike_nsqd() from exc
            raise
        if isinstance(answer, dict) and expected in answer:
            return answer
        raise self._unlike_nsqd()

    def _unlike_nsqd(self) -> ProtocolError:
        return ProtocolError(
            f"{self.url} does not answer like nsqd", hint="nsqd's HTTP port is usually 4151."
        )
