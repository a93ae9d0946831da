"""List and remove the parts of uploads that were begun and never ended.

When a process dies while it writes an object in parts, an S3-compatible store keeps the parts,
unseen and paid for. obstore cannot list them, so this asks the store itself: two requests, signed
with the keys that `storage_credentials` finds. Where others provide the credentials (the role of a
machine or a container) and on stores that are not S3 nothing is found, and a lifecycle rule of the
bucket should remove them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from nsqtools.archive.storage_credentials import S3Settings
from nsqtools.records.units import parse_time

TIMEOUT_S = 10.0
LONGEST_ANSWER = 1 << 20

_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_KEY = re.compile(r"<Key>([^<]*)</Key>")
_INITIATED = re.compile(r"<Initiated>([^<]*)</Initiated>")
_ID = re.compile(r"<UploadId>([^<]*)</UploadId>")


def list_multiparts(
    settings: S3Settings, bucket: str, prefix: str
) -> Iterator[tuple[str, str, int]]:
    """Iterate over uploads that were begun and not ended, of keys that begin with ``prefix``.

    Of each its key, its id, and when it was begun, in nanoseconds since 1970. None where others
    provide the credentials. Raises ``OSError``.
    """
    if not settings.key_id:
        return
    query = {"prefix": prefix, "uploads": ""}
    for text in _UPLOAD.findall(_ask(settings, "GET", f"/{quote(bucket)}", query)):
        key, number, began = _KEY.search(text), _ID.search(text), _INITIATED.search(text)
        if key and number:
            yield unescape(key[1]), unescape(number[1]), _time_ns(began[1] if began else "")


def _time_ns(text: str) -> int:
    try:
        return parse_time(text, now_ns=0)
    except ValueError:  # unknown: as if it was begun just now
        return time.time_ns()


def abort_multipart(settings: S3Settings, bucket: str, key: str, number: str) -> None:
    """Remove the parts of an upload that was not ended. Raises ``OSError``."""
    _ask(settings, "DELETE", f"/{quote(bucket)}/{quote(key)}", {"uploadId": number})


def _ask(settings: S3Settings, method: str, path: str, query: dict[str, str]) -> str:
    """Send a request; return the answer. Raises ``OSError``."""
    import ssl
    from urllib.request import Request, urlopen

    endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    text = "&".join(
        f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items())
    )
    url = f"{endpoint.rstrip('/')}{path}?{text}"
    headers = sign(settings, method, urlsplit(url).netloc, path, text, datetime.now(UTC))
    context = None
    if url.startswith("https:"):
        context = ssl.create_default_context(cafile=settings.ca_file or None)
    request = Request(url, method=method, headers=headers)
    with urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
        return str(answer.read(LONGEST_ANSWER).decode("utf-8", "replace"))


def sign(
    settings: S3Settings, method: str, host: str, path: str, query: str, now: datetime
) -> dict[str, str]:
    """Return the headers of a request without body, by AWS Signature Version 4."""
    date, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    nothing = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": nothing, "x-amz-date": moment}
    if settings.token:
        headers["x-amz-security-token"] = settings.token
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = "\n".join([method, path, query, lines, names, nothing])
    scope = f"{date}/{settings.region}/s3/aws4_request"
    text = "\n".join(
        ["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()]
    )
    key = f"AWS4{settings.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={settings.key_id}/{scope}"
    signed = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": signed}
