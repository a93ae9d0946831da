"""An S3 on this machine: moto's server, one for each worker, with a fresh bucket for each test.

    bucket        an empty `Bucket`; its endpoint and keys are in the environment, that of `run_nsq`
                  included, as those of a user
    lake_url      an empty place in a directory or in the bucket
    s3_endpoint   the address of the server
    between_pages runs a function in the middle of the next listing that spans pages

The server's listings have pages of `PAGE` names, so that most of them span several.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

from nsqtools.archive import storage_objects
from nsqtools.archive.place import Place, StoredObject
from nsqtools.archive.place_url import parse_place

PAGE = 10

SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

_numbers = itertools.count(1)


class Bucket(NamedTuple):
    """A bucket, and the storage at its root."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def storage(self) -> Place:
        return parse_place(self.url)

    def take(self, directory: Path, prefix: str = "") -> None:
        """Upload all files below a directory."""
        for path in filter(Path.is_file, directory.rglob("*")):
            self.storage.put_file(f"{prefix}{path.relative_to(directory).as_posix()}", path)

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.storage.list())


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A server that ends with its input, which is a pipe of this process."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)},
        start_new_session=True,
        text=True,
    ) as server:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        server.kill()


@pytest.fixture
def bucket(s3_endpoint: str, nsq_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
        nsq_env[name] = value
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    urlopen(Request(f"{s3_endpoint}/{name}", method="PUT")).close()
    return Bucket(name, s3_endpoint)


@pytest.fixture(params=["directory", "bucket"])
def lake_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place in a directory or in the bucket."""
    bucket = request.param == "bucket" and request.getfixturevalue("bucket")
    return f"{bucket.url if bucket else tmp_path}/lake"


BetweenPages = Callable[[Callable[[], object]], None]


@pytest.fixture
def between_pages(monkeypatch: pytest.MonkeyPatch) -> BetweenPages:
    """Run a function after the first page of the next listing that spans pages."""
    list_all = storage_objects.BucketPlace.list
    waiting: list[Callable[[], object]] = []

    def list_slowly(
        storage: storage_objects.BucketPlace, prefix: str = ""
    ) -> Iterator[StoredObject]:
        for number, entry in enumerate(list_all(storage, prefix)):
            if number == PAGE - 1 and waiting:  # before the next page is requested
                waiting.pop()()
            yield entry

    monkeypatch.setattr(storage_objects, "LIST_PAGE_SIZE", PAGE)
    monkeypatch.setattr(storage_objects.BucketPlace, "list", list_slowly)
    return waiting.append
