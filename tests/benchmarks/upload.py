"""How fast finished files are uploaded, beside a plain copy of the same bytes to the same store.

    python tests/benchmarks/upload.py [--files 200] [--large 4] [--mb 64]

The store is moto's server on this machine, which is slow and shares the processors: what counts is
the ratio. The copy is obstore's ``put`` of each file, one after the other and four at a time,
without index, manifest, verification and record. A directory shows what the rest costs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent.parent))

from plugins.archives import Writer
from plugins.object_store import SERVER

from nsqtools.archive.storage_objects import open_storage
from nsqtools.archive.upload import UploadPlan, Uploads
from nsqtools.protocol.frames import WireMessage


def make_files(directory: Path, count: int, size: int) -> list[Path]:
    """Finished archives of about ``size`` bytes that do not compress."""
    directory.mkdir()
    writer, files = Writer(directory), []
    for number in range(count):
        for part in range(max(1, size >> 20)):
            body = os.urandom(min(size, 1 << 20))
            writer.write([WireMessage(1, 1, b"%08d%08d" % (number, part), body)])
        files.append(writer.finish())
    return files


def rate(what: str, files: list[Path], run: Callable[[], object]) -> None:
    size = sum(path.stat().st_size for path in files)
    began = time.perf_counter()
    run()
    took = time.perf_counter() - began
    print(f"  {what:28} {size / took / 1e6:8.1f} MB/s {len(files) / took:8.1f} files/s")


def compare(files: list[Path], url: str, elsewhere: Path) -> None:
    copy = open_storage(f"{url}/copy")
    rate("put", files, lambda: [copy.put_file(path.name, path) for path in files])
    with ThreadPoolExecutor(4) as pool:
        rate(
            "put, four at a time",
            files,
            lambda: list(pool.map(lambda path: copy.put_file(f"4/{path.name}", path), files)),
        )
    for what, place in (("--upload", f"{url}/lake"), ("--upload to a directory", str(elsewhere))):
        for hidden in files[0].parent.glob(".*.uploaded"):
            hidden.unlink()
        uploads = Uploads(UploadPlan(files[0].parent, open_storage(place), "host"))
        rate(what, files, uploads.close)
        assert uploads.totals.files == len(files), uploads.last_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--large", type=int, default=4)
    parser.add_argument("--mb", type=int, default=64)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER, str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    port = next(line for line in server.stdout if line.strip().isdigit()).strip()
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    os.environ |= {**keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    urlopen(Request(f"http://127.0.0.1:{port}/bench", method="PUT")).close()
    try:
        with TemporaryDirectory(prefix="upload-") as name:
            for what, count, size in (
                ("small", options.files, 20_000),
                ("large", options.large, options.mb << 20),
            ):
                files = make_files(Path(name, what), count, size)
                print(f"{count} {what} files of {files[0].stat().st_size} bytes")
                compare(files, f"s3://bench/{what}", Path(name, f"{what}-copy"))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
