"""The HTTP API of nsqd, as far as clients need it."""

from __future__ import annotations

from typing import Any

from nsqtools.client.http_api import HTTPAPI
from nsqtools.errors import ProtocolError


class NsqdHTTPClient(HTTPAPI):
    """One nsqd."""

    def info(self) -> dict[str, Any]:
        """Return what /info says: version, ports, limits. Raises what `HTTPAPI.get` raises."""
        return self._object(self.get("/info"))

    def stats(self, topic: str = "", channel: str = "") -> dict[str, Any]:
        """Return /stats as JSON, of one topic and channel or of all, without clients."""
        parameters = {"format": "json", "include_clients": "false", "include_mem": "false"}
        if topic:
            parameters["topic"] = topic
        if channel:
            parameters["channel"] = channel
        return self._object(self.get("/stats", **parameters))

    def _object(self, answer: Any) -> dict[str, Any]:
        if isinstance(answer, dict):
            return answer
        raise ProtocolError(
            f"{self.url} does not answer like nsqd", hint="nsqd's HTTP port is usually 4151."
        )
