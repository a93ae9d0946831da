"""Remove the parts of uploads that were begun and never ended.

When a process dies while it writes an object in parts, an S3-compatible store keeps the parts,
unseen and paid for. obstore cannot list them, so this asks the store itself: two requests, signed
with the keys that `storage_credentials` finds. Where others provide the credentials (the role of a
machine or a container) and on stores that are not S3 nothing is removed, and a lifecycle rule of
the bucket should. In HDFS it is a hidden file that is left, and removed by `storage_hdfs`.

Only the parts of one object are touched, and its name belongs to one archiver: no upload of anybody
else can be hit.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import unescape

from nsqtools.archive.storage import Storage
from nsqtools.archive.storage_credentials import S3Settings, s3_settings
from nsqtools.archive.storage_hdfs import HDFSStorage
from nsqtools.archive.storage_objects import ObjectStorage

log = logging.getLogger("nsqtools")

TIMEOUT_S = 10.0
LONGEST_ANSWER = 1 << 20

_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_KEY = re.compile(r"<Key>([^<]*)</Key>")
_ID = re.compile(r"<UploadId>([^<]*)</UploadId>")


def abort_multiparts(storage: Storage, name: str) -> int:
    """Remove the parts of unfinished uploads of an object; return of how many uploads.

    A failure is logged: the object itself does not need it.
    """
    if isinstance(storage, HDFSStorage):
        try:
            return storage.remove_drafts(name)
        except OSError as exc:
            return _left(storage, name, exc)
    if not isinstance(storage, ObjectStorage) or storage.scheme not in ("s3", "s3a"):
        return 0
    settings = s3_settings(storage.options)
    if not settings.key_id:
        return 0
    key = f"{storage.prefix}/{name}" if storage.prefix else name
    bucket = f"/{quote(storage.bucket)}"
    try:
        listed = _ask(settings, "GET", bucket, {"prefix": key, "uploads": ""})
        found = []
        for text in _UPLOAD.findall(listed):
            upload_key, upload_id = _KEY.search(text), _ID.search(text)
            if upload_key and upload_id and unescape(upload_key[1]) == key:
                found.append(unescape(upload_id[1]))
        for each in found:
            _ask(settings, "DELETE", f"{bucket}/{quote(key)}", {"uploadId": each})
        return len(found)
    except OSError as exc:
        return _left(storage, name, exc)


def _left(storage: Storage, name: str, exc: OSError) -> int:
    log.warning("parts of an earlier upload of %s may be left (%s)", storage.where(name), exc)
    return 0


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
