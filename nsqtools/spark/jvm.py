"""The JVM of a session: what it is started with, and its process.

Spark reads its settings from many places. Here is decided which of them count: ours, below those of
the user; and of the environment nothing that would make pyspark start something else.

The process is what ``pyspark`` itself would start, with two differences: its output, and that of
the Python workers below it, goes to the session's log; and it is in a session of its own, so that
^C in the terminal reaches only this process, which then ends Spark in order. It never outlives this
process: it ends when its stdin does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

from nsqtools.errors import NsqError
from nsqtools.protocol.names import parse_address
from nsqtools.spark.packages import (
    CLASS_PATH,
    DELTA_CONF,
    JARS,
    PACKAGES,
    beside_sparks_own,
    known_jars,
    needed_packages,
    store_conf,
    store_environ,
    stores,
)
from nsqtools.spark.pyspark_internals import HANDSHAKE_PATH, parse_handshake
from nsqtools.spark.session_files import SparkLog, last_lines
from nsqtools.spark.spark_settings import SparkSettings
from nsqtools.transport.stream import Deadline, connect

PUSHDOWN_CONF = "spark.sql.python.filterPushdown.enabled"
MASTER_PORT = 7077
MASTER_TIMEOUT_S = 10.0

# Variables that would make pyspark start something else than the settings ask for.
MISLEADING = (
    "PYSPARK_SUBMIT_ARGS",
    "PYSPARK_GATEWAY_PORT",
    "PYSPARK_GATEWAY_SECRET",
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_API_MODE",
    "SPARK_TESTING",
)

SHARED_VARIABLES = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP", *MISLEADING)
"""Variables that this process, too, has to have as the JVM has them, while Spark starts."""


def jvm_environ(settings: SparkSettings, scratch: Path, home: Path) -> dict[str, str]:
    """The environment of the JVM, and through it of the Python workers."""
    environ = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    environ["JAVA_HOME"] = str(home)
    environ["SPARK_HOME"] = str(spark_home())
    environ["SPARK_LOCAL_DIRS"] = str(scratch)
    environ["SPARK_CONNECT_MODE"] = "0"
    if settings.is_local or "PYSPARK_PYTHON" not in environ:
        environ["PYSPARK_PYTHON"] = sys.executable
    environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if settings.is_local:
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        environ.setdefault("NSQ_SPARK_SLOTS", str(settings.local_slots))  # a sink's rate is shared
    if (s3 := stores(os.environ, settings.all_places)) is not None:
        environ |= store_environ(s3)
    return environ


def spark_home() -> Path:
    """``SPARK_HOME`` if it is of the version of the package, else the package itself."""
    import pyspark

    own = Path(pyspark.__file__).parent
    given = Path(os.environ.get("SPARK_HOME") or own)
    if any((given / "jars").glob(f"spark-core_*-{pyspark.__version__}.jar")):
        return given
    if not (own / "bin" / "spark-submit").exists():
        raise NsqError(
            f"the pyspark in {own} comes without Spark",
            hint="Uninstall pyspark-client, then: pip install 'nsqtools[spark]'",
        )
    return own


def jvm_conf(settings: SparkSettings, scratch: Path) -> dict[str, str]:
    """Spark's settings: ours, under those of the user."""
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.warehouse.dir": (scratch / "warehouse").as_uri(),
        # A second attempt of a task that still runs would publish everything twice.
        "spark.speculation": "false",
        PUSHDOWN_CONF: "true",
    }
    if (s3 := stores(os.environ, settings.places)) is not None:
        conf |= store_conf(s3)
    if settings.delta:
        conf |= DELTA_CONF
    if settings.is_local:  # any user of this machine could reach Spark's ports
        conf["spark.authenticate"] = "true"
    conf.update(settings.conf)
    if JARS not in settings.conf:
        needed = needed_packages(settings.places, spark_home(), delta=settings.delta)
        if given := settings.conf.get(PACKAGES):
            needed.append(given)
        if settings.is_local and (jars := beside_sparks_own(known_jars(needed), spark_home())):
            conf[CLASS_PATH] = ":".join(filter(None, [conf.get(CLASS_PATH), *jars]))
        elif needed:
            conf[PACKAGES] = ",".join(needed)
    options = conf.get("spark.driver.extraJavaOptions", "")
    conf["spark.driver.extraJavaOptions"] = f'-Djava.io.tmpdir="{scratch}" {options}'.strip()
    conf["spark.master"] = settings.master
    conf["spark.app.name"] = settings.app_name
    conf["spark.driver.memory"] = settings.driver_memory
    return conf


def submit_command(home: Path, conf: Mapping[str, str], secrets: Path | None = None) -> list[str]:
    """The command that starts a JVM which waits for py4j; ``secrets`` is a file of settings."""
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    more = ["--properties-file", str(secrets), "--load-spark-defaults"] if secrets else []
    return [str(home / "bin" / "spark-submit"), *more, *settings, "pyspark-shell"]


def secret_conf(settings: SparkSettings, scratch: Path) -> Path | None:
    """Write the settings that give executors the credentials of a store; None without any.

    In local mode they are in the environment of the JVM.
    """
    s3 = stores(os.environ, settings.all_places)
    found = store_environ(s3) if s3 else {}
    if settings.is_local or not found:
        return None
    path = scratch / "secrets.conf"
    lines = [f"spark.executorEnv.{name} {text}\n" for name, text in found.items()]
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.writelines(lines)
    return path


def reach_master(master: str) -> None:
    """Check that one of the masters of a standalone cluster can be reached.

    Spark itself retries silently for a minute. Raises `ConnectionFailed`.
    """
    if not master.startswith("spark://"):
        return
    failure: NsqError | None = None
    for text in master.removeprefix("spark://").split(","):
        address = parse_address(text, MASTER_PORT)
        try:
            connect(address, Deadline(MASTER_TIMEOUT_S)).close()
        except NsqError as error:
            failure = error
        else:
            return
    if failure is not None:
        failure.hint = "Is this the address in the master's log, and does the master run?"
        raise failure


START_TIMEOUT_S = 120.0
FETCH_TIMEOUT_S = 1800.0  # Spark fetches packages before it starts: s3a's are 690 MB
END_TIMEOUT_S = 10.0
POLL_S = 0.02

COMPLAINT = re.compile(
    r'(?:Exception in thread "\w+" (?:[\w$]+\.)*[\w$]+: (.*)|Error: .*|Error occurred during .*'
    r"|Unrecognized .*|Invalid .*)"
)
"""How the JVM, or Spark's launcher in it, begins the line with the reason for not starting."""


class JVM:
    """A running JVM; `close` ends it. ``port`` and ``secret`` are for py4j.

    It inherits the descriptors in ``inherited``.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        scratch: Path,
        log: SparkLog,
        inherited: tuple[int, ...] = (),
    ):
        self.log = log
        handshake = scratch / "gateway"
        fetches = any(part.startswith(PACKAGES) for part in command)
        self._start_timeout_s = FETCH_TIMEOUT_S if fetches else START_TIMEOUT_S
        with ThreadPoolExecutor(1) as starter:  # a signal here would lose what is half started
            starting = starter.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**environ, HANDSHAKE_PATH: str(handshake)},
                start_new_session=True,
                pass_fds=inherited,
            )
            try:
                self._process = starting.result()
                assert self._process.stdout is not None
                self._copier = Thread(
                    target=log.copy, args=(self._process.stdout,), name="spark-log", daemon=True
                )
                self._copier.start()
                self._wait_for(handshake)
            except BaseException:
                self._process = starting.result()
                self.kill()
                raise
        self.port, self.secret = parse_handshake(handshake.read_bytes())

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _wait_for(self, handshake: Path) -> None:
        """Wait for the file, which appears whole, or for the end of the process."""
        deadline_s = time.monotonic() + self._start_timeout_s
        while not handshake.exists():
            if not self.is_running:
                self._copier.join(END_TIMEOUT_S)
                raise NsqError(
                    f"Spark's JVM did not start{reason(last_lines(self.log.path))}",
                    hint=f"Its log is {self.log.path}.",
                )
            if time.monotonic() > deadline_s:
                raise NsqError(
                    f"Spark's JVM was not ready after {self._start_timeout_s:.0f} s",
                    hint=f"Its log is {self.log.path}.",
                )
            time.sleep(POLL_S)

    def close(self, timeout_s: float) -> None:
        """End it in order, by ending its stdin; kill it when it does not. Idempotent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._copier.join(END_TIMEOUT_S)

    def kill(self) -> None:
        """End it at once, with what it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            pass
        self._process.wait()


def reason(lines: Sequence[str]) -> str:
    """Why a JVM did not start, by its output, to be put after a sentence; may be ""."""
    for line in lines:
        if found := COMPLAINT.match(line):
            return f" ({found[1] or line})"
    said = [line for line in lines if line and not line.startswith(("WARNING", "NOTE", "Picked"))]
    return f" ({said[-1]})" if said else ""
