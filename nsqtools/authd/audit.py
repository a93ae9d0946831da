"""The record of decisions: counts for /metrics, and an audit log of one line of JSON for each.

Neither has a secret, nor a text that could be one: a refused client has the name of a user only if
the file has that user.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsqtools.authd.authority import Identity
from nsqtools.authd.users import Client
from nsqtools.errors import OutputError
from nsqtools.files.durable import append_whole
from nsqtools.files.opening import open_to_append
from nsqtools.records.prometheus import Metric, metric_of

log = logging.getLogger("nsqtools")

REPORT_S = 60.0  # a full disk is reported once a minute


class AuditFile:
    """A file of one JSON document a line, or none for None. Thread-safe.

    It is opened for each line, so it may be renamed meanwhile. Raises `OutputError` when it cannot
    be written, also at once.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            self._append(path, "")

    def write(self, **fields: Any) -> None:
        """Append a document of the time and these fields."""
        if self._path is not None:
            document = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **fields}
            self._append(self._path, json.dumps(document) + "\n")

    @staticmethod
    def _append(path: Path, line: str) -> None:
        try:
            with open_to_append(path) as file:
                append_whole(file.fileno(), line.encode(), is_durable=False)
        except OSError as exc:
            raise OutputError(f"cannot write the audit log {path} ({exc.strerror})") from exc


class Audit:
    """Records decisions. Raises `OutputError` for a file that cannot be written at the start."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = AuditFile(path)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._reported_s = -REPORT_S

    def record(
        self, request: str, result: str, client: Client, identity: Identity | None, peer: str
    ) -> None:
        """Record the decision about a request that ``peer``, an nsqd or a client, has sent."""
        self._counts[request, result] += 1
        try:
            self._file.write(
                request=request,
                result=result,
                user=identity and identity.user.name,
                method=identity and identity.method,
                remote=client.address,
                common_name=client.common_name or None,
                tls=client.tls,
                peer=peer,
            )
        except OutputError as exc:  # an nsqd without its auth server would refuse all clients
            now_s = time.monotonic()
            if now_s - self._reported_s >= REPORT_S:
                self._reported_s = now_s
                log.error("%s", exc)

    def metrics(self) -> Iterator[Metric]:
        """Return the counts for Prometheus."""
        yield metric_of(
            "nsq_authd_requests_total",
            "Requests by what was asked for and what was decided.",
            [
                ({"request": request, "result": result}, count)
                for (request, result), count in sorted(self._counts.items())
            ],
        )
