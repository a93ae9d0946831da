"""A Spark session for the length of a ``with``: started quietly, ended in order.

    with spark_session(SparkSettings()) as spark:
        spark.read.format("nsq-archive").load("/var/nsq").count()

Everything that Spark needs comes together here: Java (`java`), workers that run this very Python
and not the first ``python3`` in PATH (`spark_settings`), a clean terminal, and nothing left on
disk.

The JVM is what ``pyspark`` itself would start, with two differences: its output, and that of the
Python workers below it, goes to the session's log; and it is in a session of its own, so that ^C in
the terminal reaches only this process, which then ends Spark in order. It never outlives this
process: it ends when its stdin does. A process has one session: pyspark keeps the JVM.

The log receives what the JVM, the Python workers and pyspark itself say. A stream may run for
months, so log4j bounds its size (`log4j2.properties`).

Spark removes its temporary files only when it ends in good order. So each session has a scratch
directory that is locked while the session lives, and the next session removes those that are not
locked any more: what ``kill -9`` left.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from threading import Event, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, TextIO

from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.files.opening import open_to_write
from nsqtools.files.scratch import environment, scratch_directory
from nsqtools.protocol.names import parse_address
from nsqtools.spark import register
from nsqtools.spark.failures import SESSION, last_lines, spark_errors
from nsqtools.spark.java import find_java, java_home
from nsqtools.spark.pyspark_internals import (
    OLDEST,
    QUERY_LOGGERS,
    kill_group,
    launch,
    redirect_accumulator_errors,
    version_of_pyspark,
)
from nsqtools.spark.spark_settings import (
    JARS,
    PACKAGES,
    SparkSettings,
    note_jars,
    spark_conf,
    spark_environ,
    store_credentials,
)
from nsqtools.transport.stream import Deadline, connect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # commands annotate with it

    from nsqtools.archive.compaction import RunJobs
    from nsqtools.archive.slices import Done, Job

STOP_TIMEOUT_S = 20.0
HURRIED_S = 1.5
CANCEL_S = 0.1
MASTER_PORT = 7077
MASTER_TIMEOUT_S = 10.0

COMPLAINT = re.compile(
    r'(?:Exception in thread "\w+" (?:[\w$]+\.)*[\w$]+: (.*)|Error: .*|Error occurred during .*'
    r"|Unrecognized .*|Invalid .*)"
)
"""How the JVM, or Spark's launcher in it, begins the line with the reason for not starting."""


@contextmanager
def spark_session(settings: SparkSettings) -> Iterator[SparkSession]:
    """Start Spark, with the formats of nsqtools registered, and end it at the end.

    Raises `NsqError`: the extra or Java is missing, the JVM does not start, Spark refuses its
    settings. Raises `ConfigurationError` where this process has a session already.
    """
    require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        raise ConfigurationError(
            "this process has a Spark session already",
            hint="Use that one: nsqtools.spark.register(spark) makes the formats known to it.",
        )
    reach_master(settings.master)
    java = find_java(os.environ)
    with ExitStack() as stack:
        log = stack.enter_context(session_log(settings.log_path))
        parent = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
        scratch = stack.enter_context(scratch_directory("nsq-spark-", Path(parent)))
        environ = spark_environ(settings, scratch, java_home(java, os.environ, scratch))
        stack.enter_context(environment(environ))
        gateway = start_jvm(settings, scratch, log.fileno())
        stack.callback(end_jvm, gateway.proc, HURRIED_S)
        stack.enter_context(spark_errors(settings))
        # not in the command of the JVM, which all can read
        found = {} if settings.is_local else store_credentials(settings)
        secrets = SparkConf(loadDefaults=False)
        secrets.setAll([(f"spark.executorEnv.{name}", found[name]) for name in found])
        handler = signal.getsignal(signal.SIGINT)
        context = SparkContext(conf=secrets, gateway=gateway)
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, handler)  # commands have their own, which cancels jobs
        try:
            with spark_errors(settings):  # while the JVM can still say what went wrong
                redirect_accumulator_errors(context, log.write)
                spark = SparkSession(context)
                register(spark)
                conf = context.getConf()
                if (packages := conf.get(PACKAGES)) and (jars := conf.get(JARS)):
                    note_jars(packages.split(","), jars)
                yield spark
        finally:
            is_hurried = not isinstance(sys.exception(), Exception | None)  # a signal
            disconnect(context, gateway, HURRIED_S if is_hurried else STOP_TIMEOUT_S)


def require_pyspark() -> None:
    """Raise `NsqError` where the extra ``spark`` is missing, or is too old."""
    install = "Install them with: pip install 'nsqtools[spark]'"
    try:
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError as error:
        raise NsqError(f"Spark needs the package {error.name}", hint=install) from error
    if version_of_pyspark() < OLDEST:
        needed = f"{'.'.join(map(str, OLDEST))} or newer is needed"
        raise NsqError(f"pyspark {pyspark.__version__} is too old: {needed}", hint=install)


def reach_master(master: str) -> None:
    """Check that one of the masters of a standalone cluster can be reached.

    Spark itself retries silently for a minute. Raises `ConnectionFailed`.
    """
    if not master.startswith("spark://"):
        return
    for text in master.removeprefix("spark://").split(","):
        address = parse_address(text, MASTER_PORT)
        try:
            connect(address, Deadline(MASTER_TIMEOUT_S)).close()
            return
        except NsqError as error:
            error.hint = "Is this the address in the master's log, and does the master run?"
            failure = error
    raise failure


@contextmanager
def session_log(path: Path) -> Iterator[TextIO]:
    """The log, open to be added to; inside, pyspark and py4j log there and not to stderr.

    Raises `OutputError`.
    """
    from pyspark.logger import PySparkLogger

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.fdopen(open_to_write(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
    except OSError as error:
        raise OutputError(
            f"cannot write Spark's log {path} ({error.strerror})",
            hint="Name another file with --spark-log.",
        ) from error
    log.write(f"{SESSION} at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n")
    log.flush()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger("py4j"), *map(PySparkLogger.getLogger, QUERY_LOGGERS)]

    def not_py4js(record: logging.LogRecord) -> bool:
        return "py4j" not in record.pathname or not handler.handle(record)

    logging.getLogger().addFilter(not_py4js)  # py4j logs a lost connection to the root logger
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield log
    finally:
        logging.getLogger().removeFilter(not_py4js)
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        log.close()


def start_jvm(settings: SparkSettings, scratch: Path, log: int) -> Any:
    """Return py4j's gateway to a new JVM. Raises `NsqError` with the reason when it ends."""
    from pyspark.errors import PySparkRuntimeError

    try:
        return launch(
            spark_conf(settings, scratch),
            stdout=log,
            stderr=STDOUT,
            start_new_session=True,
            pass_fds=settings.inherited,
        )
    except PySparkRuntimeError as error:
        raise NsqError(
            f"Spark's JVM did not start{reason(last_lines(settings.log_path))}",
            hint=f"Its log is {settings.log_path}.",
        ) from error


def reason(lines: Sequence[str]) -> str:
    """Why a JVM did not start, by its output, to be put after a sentence; may be ""."""
    for line in lines:
        if found := COMPLAINT.match(line):
            return f" ({found[1] or line})"
    said = [line for line in lines if line and not line.startswith(("WARNING", "NOTE", "Picked"))]
    return f" ({said[-1]})" if said else ""


def in_tasks(spark: SparkSession, settings: SparkSettings) -> RunJobs:
    """Run the jobs of a compaction, as a job of Spark: a task that is tried again makes the same
    file again."""
    from nsqtools.archive.slices import run_job

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, Done]]:
        with spark_errors(settings):
            rows = spark.sparkContext.parallelize(list(enumerate(jobs)), max(1, len(jobs)))
            found = rows.map(lambda each: (each[0], run_job(each[1]))).collect()
        yield from found

    return run


def cancel_jobs(context: SparkContext, ended: Event) -> None:
    """Cancel the jobs that run, and those that begin, until another thread says ``ended``."""
    while not ended.wait(CANCEL_S):
        with suppress(Exception):  # the JVM is gone, and its jobs with it
            context.cancelAllJobs()


def disconnect(context: SparkContext, gateway: Any, timeout_s: float) -> None:
    """Stop the session and end the JVM; what does not end in time is killed.

    The stop is asked for on a thread of its own, because py4j gives each thread a connection: that
    of ours may be in the middle of an answer, when a signal has interrupted it.
    """

    def stop() -> None:
        with suppress(Exception):  # the JVM is gone, which is what is wanted
            context.stop()
            gateway.shutdown()

    stopper = Thread(target=stop, name="spark-stop", daemon=True)
    stopper.start()
    stopper.join(timeout_s)
    end_jvm(gateway.proc, timeout_s)
    stopper.join(HURRIED_S)  # its connection has ended


def end_jvm(jvm: Popen[bytes], timeout_s: float) -> None:
    """End it in order, by ending its stdin; kill it when it does not. Idempotent."""
    assert jvm.stdin is not None
    with suppress(OSError):  # it is gone already
        jvm.stdin.close()
    try:
        jvm.wait(timeout_s)
    except TimeoutExpired:
        kill_group(jvm)
