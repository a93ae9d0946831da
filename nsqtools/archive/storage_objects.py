"""Places in an object store: S3, Google Cloud Storage, Azure, and stores with a compatible API.

`BucketPlace` calls obstore, which is imported when a store is first opened: it is an optional
package, and importing it takes longer than most commands run.

The settings of S3 (`S3Settings`) serve both obstore and Hadoop's s3a. Endpoint, region and
credentials come from the options of the caller, then from the environment (the variables of the AWS
tools), then from the profile in ``~/.aws``. Without keys in any of them, obstore uses its own
sources: a web identity, or the role of the container or machine. For a profile without keys (SSO,
an assumed role) boto3 provides the credentials, if it is installed. An S3-compatible store needs
its endpoint, ``AWS_ENDPOINT_URL``. Buckets are addressed by path, not by host name, because a
private store rarely has a DNS name for each bucket.

A large object is written in parts. If the process dies before the last one, the parts stay in the
bucket, hidden and billed, until a lifecycle rule of the bucket removes them. A conditional put is a
single request with the content in memory, so only small objects are written that way.

Trap: messages of obstore span many lines and quote the response of the server. Users are shown one
line without control characters.
"""

from __future__ import annotations

import configparser
import errno
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from nsqtools.archive.lease import hold_lease
from nsqtools.archive.place import (
    ChangedError,
    DeniedError,
    Place,
    PlaceLock,
    StoredObject,
    UnreachableError,
    map_concurrently,
)
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.files.opening import open_to_read, state_of

DEFAULT_REGION = "us-east-1"
_URL = re.compile(r"([a-z0-9]+):/+([^/]+)/*(.*)", re.DOTALL | re.IGNORECASE)
S3_SCHEMES = ("s3", "s3a")
HADOOP_SCHEMES = {"s3": "s3a", "az": "abfss"}
NO_BUCKET = re.compile(r"NoSuchBucket|(bucket|container) does not exist", re.IGNORECASE)
_MD5_TAG = re.compile(r'"?([0-9a-f]{32})(?:-(\d+))?"?')

PART_SIZE = 8 << 20
# S3 accepts at most 10,000 parts of an object; a larger file gets larger parts.
MAX_PARTS = 9000
# Parts of one file in memory at the same time: 8 uploading threads hold 128 MiB at most.
CONCURRENT_PARTS = 2
# Objects in one response to a listing: the maximum of S3.
LIST_PAGE_SIZE = 1000
# Bytes of the first and of the largest request of a sequential read: see `RangeFile`.
FIRST_READ_SIZE = 256 << 10
MAX_READ_SIZE = 8 << 20

# A user at a terminal should see the error soon, and the uploader retries without a limit.
RETRY: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
# Plain HTTP is only used for an endpoint that the user configured with http://.
CLIENT: dict[str, Any] = {"connect_timeout": "5s", "timeout": "2m", "allow_http": True}


def parse_object_url(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and key of a URL. Raises `ConfigurationError`."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigurationError(f"{url} names no bucket", hint="Write s3://BUCKET/PREFIX.")
    return match[1].lower(), match[2], match[3].strip("/")


class Bucket:
    """A bucket or container. ``options`` are settings of the store, under obstore's names."""

    def __init__(self, scheme: str, name: str, options: Mapping[str, str]) -> None:
        self.scheme, self.name, self.options = scheme, name, dict(options)
        self.url = f"{scheme}://{name}"
        self._opened: tuple[object, Any] | None = None

    @property
    def store(self) -> Any:
        """The client of obstore, made again after a fork or a change of credentials.

        A forked child has none of the client's threads. In a notebook, a user may set credentials
        in the environment after the first attempt.
        """
        environment = [item for item in os.environ.items() if item[0].startswith("AWS_")]
        state = [os.getpid(), environment, *map(state_of, credential_files())]
        opened = self._opened
        if opened is None or opened[0] != state:
            self._opened = opened = state, _open_store(self)
        return opened[1]


@cache
def _bucket(scheme: str, name: str, options: tuple[tuple[str, str], ...]) -> Bucket:
    """Return the one `Bucket` of all places in it, so that they share its connections."""
    return Bucket(scheme, name, dict(options))


class BucketPlace(Place):
    """An object, or all objects below a prefix. ``key`` is the path in the bucket."""

    is_remote = True

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self.url = f"{bucket.url}/{key}" if key else bucket.url

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, str]) -> BucketPlace:
        """Return the place of a URL. Raises `ConfigurationError`, `NsqError` without obstore."""
        scheme, name, key = parse_object_url(url)
        if find_spec("obstore") is None:
            raise NsqError(
                f"{url} needs the package obstore", hint="pip install 'nsqtools[object-store]'"
            )
        return cls(_bucket(scheme, name, tuple(sorted(options.items()))), key)

    def __reduce__(self) -> tuple[Any, tuple[str, dict[str, str]]]:
        return BucketPlace.from_url, (self.url, self._bucket.options)

    def __truediv__(self, name: str) -> BucketPlace:
        return BucketPlace(self._bucket, self._key_of(name))

    @property
    def name(self) -> str:
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPlace:
        return BucketPlace(self._bucket, self._key.rpartition("/")[0])

    @property
    def hadoop_url(self) -> str:
        scheme, _, path = self.url.partition("://")
        return f"{HADOOP_SCHEMES.get(scheme, scheme)}://{path}"

    def _key_of(self, name: str) -> str:
        return "/".join(filter(None, (self._key, name.strip("/"))))

    def check(self) -> None:
        next(self.list(), None)

    def may_be_folder(self) -> bool:
        return True

    def for_delta_rs(self) -> dict[str, str]:
        if self._bucket.scheme not in S3_SCHEMES:
            return dict(self._bucket.options)
        settings = s3_settings(self._bucket.options)
        if settings.credential_provider is not None and not settings.access_key_id:
            credentials = settings.credential_provider()
            keys = _keys_of({**credentials, "session_token": credentials.get("token") or ""})
            settings = replace(settings, **keys)
        environment = {f"aws_{name}": value for name, value in settings.for_obstore().items()}
        if settings.endpoint.startswith("http://"):
            environment["aws_allow_http"] = "true"
        options = {
            f"aws_{key.removeprefix('aws_')}": value for key, value in self._bucket.options.items()
        }
        return options | environment | {"aws_conditional_put": "etag"}

    def _entry(self, meta: Any) -> StoredObject:
        name = meta["path"][len(self._key) + 1 if self._key else 0 :]
        modified_ns = int(meta["last_modified"].timestamp() * 1_000_000) * 1000
        return StoredObject(name, meta["size"], modified_ns, meta["e_tag"] or "")

    def _entries(self, listed: Iterable[Any]) -> Iterator[StoredObject]:
        """Iterate over listed objects, without those that stand for a folder.

        Consoles and Hadoop mark a folder by an empty object whose key ends with a slash. obstore
        drops the slash, so it looks like an empty file, and no file has this name.
        """
        entries = list(map(self._entry, listed))
        empty = [entry.name for entry in entries if not entry.size]
        are_files = map_concurrently(self._has_object, empty) if empty else ()
        folders = {name for name, is_file in zip(empty, are_files, strict=True) if not is_file}
        return (entry for entry in entries if entry.name not in folders)

    def _has_object(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return bool(self.stat(name))
        return False

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        with self._translating(prefix):
            for chunk in self._store.list(self._key_of(prefix) or None, chunk_size=LIST_PAGE_SIZE):
                yield from self._entries(chunk)

    def children(self, prefix: str = "") -> tuple[Sequence[StoredObject], Sequence[str]]:
        with self._translating(prefix):
            listing = self._store.list_with_delimiter(self._key_of(prefix) or None)
        begin = len(self._key) + 1 if self._key else 0
        folders = [str(folder).strip("/")[begin:] for folder in listing["common_prefixes"]]
        return list(self._entries(listing["objects"])), folders

    @property
    def _store(self) -> Any:
        return self._bucket.store

    def stat(self, name: str = "") -> StoredObject:
        with self._translating(name):
            return self._entry(self._store.head(self._key_of(name)))

    def open(self, name: str = "", entry: StoredObject | None = None) -> BinaryIO:
        entry = entry or self.stat(name)
        return io.BufferedReader(RangeFile(self, name, entry.size, entry.version), FIRST_READ_SIZE)

    def read(self, name: str = "") -> bytes:
        with self._translating(name):
            return bytes(self._store.get(self._key_of(name)).bytes())

    def read_range(self, name: str, start: int, length: int, version: str = "") -> bytes:
        if length <= 0:
            return b""
        options: dict[str, Any] = {"range": (start, start + length)}
        if version:
            options["if_match"] = version
        try:
            with self._translating(name):
                return bytes(self._store.get(self._key_of(name), options=options).bytes())
        except OSError as exc:
            # A store refuses a range that begins at the end of the object or after it.
            if _NO_RANGE in str(exc.strerror):
                return b""
            raise

    def put(self, name: str, data: bytes) -> str:
        return self._put(name, data, use_multipart=False)

    def put_file(self, name: str, path: Path) -> str:
        size = _part_size(path.stat().st_size)
        return self._put(name, path, chunk_size=size, max_concurrency=CONCURRENT_PARTS)

    def put_if_absent(self, name: str, data: bytes) -> str:
        return self._put(name, data, mode="create")

    def _put(self, name: str, data: bytes | Path, **options: Any) -> str:
        with self._translating(name):
            return self._store.put(self._key_of(name), data, **options)["e_tag"] or ""

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._translating(name):
            self._store.delete(self._key_of(name))

    def move(self, name: str, target: str) -> None:
        with self._translating(name):
            self._store.copy(self._key_of(name), self._key_of(target))
        self.delete(name)

    def lock(self, name: str) -> AbstractContextManager[PlaceLock]:
        return hold_lease(self, name)

    def verify(self, name: str, path: Path, version: str = "") -> None:
        """Compare the file with the ETag, or with the object itself.

        The ETag is the MD5 of the content, or of the MD5s of its parts. If the store encrypts with
        a key of its own or computes something else, the object is read back.
        """
        tag = _MD5_TAG.fullmatch(version or self.stat(name).version)
        if tag is None or _md5_tag(path, bool(tag[2])) != tag[0]:
            super().verify(name, path)

    def verify_data(self, name: str, data: bytes, version: str) -> None:
        tag = _MD5_TAG.fullmatch(version)
        if tag is None or tag[1] != hashlib.md5(data, usedforsecurity=False).hexdigest():
            super().verify_data(name, data, version)

    @contextmanager
    def _translating(self, name: str) -> Iterator[None]:
        """Raise errors of obstore as ``OSError`` with the URL."""
        from obstore import exceptions

        url = str(self / name)
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", url) from None
        except exceptions.AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, "the object exists already", url) from None
        except exceptions.PreconditionError:
            raise ChangedError(errno.ESTALE, "it changed while it was read", url) from None
        except exceptions.BaseError as exc:
            if NO_BUCKET.search(str(exc)):
                problem = f"bucket {self._bucket.name} does not exist"
                raise FileNotFoundError(errno.ENOENT, problem, self.url) from None
            raise error_of(exc, url) from None


class RangeFile(io.RawIOBase):
    """An object as a file that fetches ranges instead of the whole object.

    Each request costs a round trip of tens of milliseconds, so the ranges of a sequential read
    double from `FIRST_READ_SIZE` to `MAX_READ_SIZE`; a read elsewhere begins with a small range
    again. ``size`` and ``version`` belong to the object that was opened. If it is replaced, reads
    raise `ChangedError`, so content of two objects is never mixed.
    """

    def __init__(self, place: Place, name: str, size: int, version: str) -> None:
        super().__init__()
        self.name = str(place / name)
        self._place = place
        self._object = name
        self._size = size
        self._version = version
        self._position = 0
        self._buffer = b""
        self._buffer_at = 0
        self._next_size = FIRST_READ_SIZE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, or the begin of it at the end of the object. Raises ``OSError``."""
        size = min(len(buffer), max(0, self._size - self._position))
        begin = self._position - self._buffer_at
        if not 0 <= begin <= len(self._buffer) or begin + size > len(self._buffer):
            self._fetch(begin, size)
            begin = 0
        buffer[:size] = self._buffer[begin : begin + size]
        self._position += size
        return size

    def _fetch(self, begin: int, size: int) -> None:
        """Buffer at least ``size`` bytes from the position, which is ``begin`` in the buffer."""
        is_sequential = bool(self._buffer) and 0 <= begin <= len(self._buffer)
        unread = self._buffer[begin:] if is_sequential else b""
        next_size = 2 * self._next_size if is_sequential else FIRST_READ_SIZE
        self._next_size = min(next_size, MAX_READ_SIZE)
        start = self._position + len(unread)
        length = min(max(size - len(unread), self._next_size), self._size - start)
        data = self._place.read_range(self._object, start, length, self._version)
        if len(data) != length:
            raise ChangedError(errno.ESTALE, "it is shorter than when it was opened", self.name)
        self._buffer = unread + data
        self._buffer_at = self._position


def _open_store(bucket: Bucket) -> Any:
    from obstore import store as stores
    from obstore.exceptions import BaseError

    options = dict(bucket.options)
    client = dict(CLIENT)
    try:
        if bucket.scheme in S3_SCHEMES:
            settings = s3_settings(options)
            if settings.ca_file:
                client["root_certificate"] = Path(settings.ca_file).read_bytes()
            return stores.S3Store(
                bucket.name,
                config=options | settings.for_obstore(),  # type: ignore[arg-type]
                client_options=client,  # type: ignore[arg-type]
                retry_config=RETRY,  # type: ignore[arg-type]
                credential_provider=settings.credential_provider,
            )
        kind: Any = stores.GCSStore if bucket.scheme == "gs" else stores.AzureStore
        container, _, account = bucket.name.partition("@")
        if account:
            options.setdefault("account_name", account.partition(".")[0])
        config = {"config": options} if options else {}
        return kind(container, client_options=client, retry_config=RETRY, **config)
    except (BaseError, OSError) as exc:
        raise ConfigurationError(f"cannot use {bucket.url} ({reason_of(exc)})") from None


def _part_size(size: int) -> int:
    return max(PART_SIZE, -(-size // MAX_PARTS))


def _md5_tag(path: Path, is_in_parts: bool) -> str:
    """Return the ETag of S3 for a file that `BucketPlace.put_file` wrote."""
    part_size = _part_size(path.stat().st_size)
    digests = []
    with open_to_read(path) as file:
        while data := file.read(part_size):
            digests.append(hashlib.md5(data, usedforsecurity=False).digest())
    if not is_in_parts:
        return f'"{digests[0].hex()}"' if len(digests) == 1 else ""
    joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f'"{joined}-{len(digests)}"'


_REQUEST_PREFIX = re.compile(r"Error performing \w+ \S+ in \S+?,?( after \d+ retries)?[, ].*?- ")
_XML_REASON = re.compile(r"<(?:Code|Message)>([^<]*)<")
_DENIED = re.compile("401 Unauthorized|403 Forbidden")
_NO_RANGE = "416 Range Not Satisfiable"
_NO_CONNECTION = re.compile(r"kind: Connect|client error \(Connect\)")
_TIMEOUT = re.compile("kind: Timeout|operation timed out")
MAX_REASON_CHARS = 200


def error_of(exc: BaseException, url: str, reason: str = "") -> OSError:
    """Return the ``OSError`` for an error of obstore or delta-rs, by its text.

    ``reason`` is the line for users if `reason_of` does not find it.
    """
    text, reason = str(exc), reason or reason_of(exc)
    # obstore has no exception class for a denied listing, so the text decides.
    if _DENIED.search(text):
        return DeniedError(errno.EACCES, reason, url)
    if _NO_CONNECTION.search(text) or _TIMEOUT.search(text):
        return UnreachableError(errno.EIO, reason_of(exc), url)
    return OSError(errno.EIO, reason, url)


def reason_of(exc: BaseException) -> str:
    """Return an error of obstore as one short line."""
    text = str(exc)
    line = text.partition("\n")[0].partition(": <?xml")[0]
    line = _REQUEST_PREFIX.sub("", line).strip()
    if _NO_CONNECTION.search(text):
        line = "cannot connect to the store"
    elif _TIMEOUT.search(text):
        line = "no answer from the store in time"
    # The text may quote the same code and message twice.
    line = ": ".join([line, *dict.fromkeys(_XML_REASON.findall(text))])
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_REASON_CHARS]


# -- settings of S3 -----------------------------------------------------------------------------


_KEYS = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """An ``endpoint`` of "" is Amazon's. Without ``access_key_id``, obstore finds credentials."""

    endpoint: str = ""
    region: str = DEFAULT_REGION
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    ca_file: str = ""
    credential_provider: Any = field(default=None, repr=False)

    def for_obstore(self) -> dict[str, str]:
        """Return the settings of obstore's ``S3Store``."""
        names = ("endpoint", "region", *_KEYS)
        return {name: value for name in names if (value := getattr(self, name))}


def credential_files() -> list[str]:
    """Return the files with credentials of any store, whether they exist or not.

    Files that obstore reads again when it needs to are left out.
    """
    home = Path(os.environ.get("HOME") or "/nonexistent")
    gcloud = home / ".config/gcloud/application_default_credentials.json"
    defaults = {
        "AWS_CONFIG_FILE": home / ".aws/config",
        "AWS_SHARED_CREDENTIALS_FILE": home / ".aws/credentials",
        "AWS_CA_BUNDLE": "",
        "GOOGLE_APPLICATION_CREDENTIALS": gcloud,
        "GOOGLE_SERVICE_ACCOUNT": "",
    }
    paths = (os.environ.get(variable) or str(path) for variable, path in defaults.items())
    return [path for path in paths if path]


def s3_settings(
    options: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> S3Settings:
    """Return the settings of S3. ``options`` have the short names of obstore."""
    options = options or {}
    environ = os.environ if environ is None else environ
    profile = _profile(environ)

    def find(name: str, *variables: str) -> str:
        """The first that is not empty: the option, the variables, the line of the profile."""
        option = name.removeprefix("aws_").removesuffix("_url")
        values = (options.get(option), *map(environ.get, variables), profile.get(name))
        return next(filter(None, values), "")

    settings = S3Settings(
        endpoint=find("endpoint_url", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        region=find("region", "AWS_REGION", "AWS_DEFAULT_REGION") or DEFAULT_REGION,
        ca_file=find("ca_bundle", "AWS_CA_BUNDLE"),
    )
    for keys in map(_keys_of, (options, environ, profile)):
        if keys["access_key_id"] and keys["secret_access_key"]:
            return replace(settings, **keys)
    if profile:
        return replace(settings, credential_provider=_boto3_provider(environ))
    return settings


def _keys_of(source: Mapping[str, str]) -> dict[str, str]:
    """Return id, secret and token of one source; keys of two sources never mix."""

    def find(key: str) -> str:
        names = (key, f"aws_{key}", f"AWS_{key.upper()}")
        return next((source[name] for name in names if name in source), "")

    return {key: find(key) for key in _KEYS}


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the profile in the files of ``~/.aws``; empty without files."""
    home = Path(environ.get("HOME") or "/nonexistent") / ".aws"
    name = environ.get("AWS_PROFILE") or "default"
    settings: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(environ.get(variable) or home / file, encoding="utf-8")
            settings |= dict(parser.items(section))
        except (configparser.Error, OSError, ValueError):
            # Without the file, obstore reports the missing credentials.
            continue
    return settings


def _boto3_provider(environ: Mapping[str, str]) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider(
            boto3.session.Session(profile_name=environ.get("AWS_PROFILE"))
        )
    except Exception:
        # boto3 is not installed or the profile is of no use; obstore tries its own sources.
        return None
