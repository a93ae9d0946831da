"""A Spark session as a context manager, which starts quietly and ends in order.

    with spark_session(SparkSettings()) as spark:
        spark.read.format("nsq-archive").load("/var/nsq").count()

A session needs Java (`java`), workers that run this Python and not the first ``python3`` in PATH
(`spark_settings`), a clean terminal, and a disk without leftovers.

The JVM is started as by ``pyspark`` itself, with two differences. Its output, and that of its
Python workers, goes to the session's log. And it has its own process group, so that ^C in the
terminal reaches only this process, which then ends Spark in order. The JVM never outlives this
process, because it ends with its stdin. A process has one session, because pyspark keeps the JVM.

The log receives the output of the JVM, the Python workers and pyspark itself. A stream may run for
months, so log4j bounds its size (`log4j2.properties`).

Spark removes its temporary files only at an orderly end. So each session locks a scratch directory,
and the next session removes the directories without a lock, which ``kill -9`` left.
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
from nsqtools.files.scratch import environment_variables, scratch_directory
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
    cache_jars,
    spark_conf,
    spark_environ,
    store_credentials,
)
from nsqtools.transport.stream import Deadline, connect

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # commands annotate with it

    from nsqtools.archive.compaction_jobs import RunJobs
    from nsqtools.archive.slices import Job, JobResult

STOP_TIMEOUT_S = 20.0
HURRIED_S = 1.5  # After a signal, the user waits for the end.
CANCEL_S = 0.1
MASTER_PORT = 7077
MASTER_TIMEOUT_S = 10.0

COMPLAINT = re.compile(
    r'(?:Exception in thread "\w+" (?:[\w$]+\.)*[\w$]+: (.*)|Error: .*|Error occurred during .*'
    r"|Unrecognized .*|Invalid .*)"
)
"""The line with which the JVM, or Spark's launcher in it, explains why it does not start."""


@contextmanager
def spark_session(settings: SparkSettings) -> Iterator[SparkSession]:
    """Start Spark, with the formats of nsqtools registered, and stop it at the end.

    Raises `NsqError` if the extra or Java is missing, the JVM does not start, or Spark refuses its
    settings, and `ConfigurationError` if this process already has a session.
    """
    require_pyspark()
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        raise ConfigurationError(
            "this process has a Spark session already",
            hint="Use that session: nsqtools.spark.register(spark) adds the formats to it.",
        )
    reach_master(settings.master)
    java = find_java(os.environ)
    with ExitStack() as stack:
        log = stack.enter_context(session_log(settings.log_path))
        parent = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
        scratch = stack.enter_context(scratch_directory("nsq-spark-", Path(parent)))
        environ = spark_environ(settings, scratch, java_home(java, os.environ, scratch))
        stack.enter_context(environment_variables(environ))
        gateway = start_jvm(settings, scratch, log.fileno())
        stack.callback(end_jvm, gateway.proc, HURRIED_S)
        stack.enter_context(spark_errors(settings))
        # Secrets must not be in the command line of the JVM, which every user can read.
        credentials = {} if settings.is_local else store_credentials(settings)
        secrets = SparkConf(loadDefaults=False)
        secrets.setAll([(f"spark.executorEnv.{name}", credentials[name]) for name in credentials])
        handler = signal.getsignal(signal.SIGINT)
        context = SparkContext(conf=secrets, gateway=gateway)
        if current_thread() is main_thread():
            # Spark has replaced the handler of the command, which cancels jobs.
            signal.signal(signal.SIGINT, handler)
        try:
            with spark_errors(settings):  # The text of an error is fetched from the living JVM.
                redirect_accumulator_errors(context, log.write)
                spark = SparkSession(context)
                register(spark)
                conf = context.getConf()
                if (packages := conf.get(PACKAGES)) and (jars := conf.get(JARS)):
                    cache_jars(packages.split(","), jars)
                yield spark
        finally:
            # An exception such as SystemExit comes from a signal.
            is_hurried = not isinstance(sys.exception(), Exception | None)
            disconnect(context, gateway, HURRIED_S if is_hurried else STOP_TIMEOUT_S)


def require_pyspark() -> None:
    """Raise `NsqError` if the extra ``spark`` is missing or too old."""
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
    """Check that a master of a standalone cluster is reachable. Raises `ConnectionFailed`.

    Spark itself would retry silently for a minute.
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
    """Open the log for appending, and let pyspark and py4j log to it instead of stderr.

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

    logging.getLogger().addFilter(not_py4js)  # py4j logs a lost connection to the root logger.
    states = [(logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        yield log
    finally:
        logging.getLogger().removeFilter(not_py4js)
        for logger, (handlers, propagate) in zip(loggers, states, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        log.close()


def start_jvm(settings: SparkSettings, scratch: Path, log: int) -> Any:
    """Return py4j's gateway to a new JVM. Raises `NsqError` with the reason if it ends."""
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
            f"Spark's JVM did not start{start_failure(last_lines(settings.log_path))}",
            hint=f"Its log is {settings.log_path}.",
        ) from error


def start_failure(lines: Sequence[str]) -> str:
    """Return the reason in the output of a JVM that did not start, in brackets, or ""."""
    for line in lines:
        if match := COMPLAINT.match(line):
            return f" ({match[1] or line})"
    output = [line for line in lines if line and not line.startswith(("WARNING", "NOTE", "Picked"))]
    return f" ({output[-1]})" if output else ""


def in_tasks(spark: SparkSession, settings: SparkSettings) -> RunJobs:
    """Return a function that runs the jobs of a compaction as a Spark job.

    A retried task writes the same file again.
    """
    from nsqtools.archive.slices import run_job

    def run(jobs: Sequence[Job]) -> Iterator[tuple[int, JobResult]]:
        with spark_errors(settings):
            rows = spark.sparkContext.parallelize(list(enumerate(jobs)), max(1, len(jobs)))
            results = rows.map(lambda row: (row[0], run_job(row[1]))).collect()
        yield from results

    return run


def cancel_jobs(context: SparkContext, ended: Event) -> None:
    """Cancel running and new jobs until another thread sets ``ended``."""
    while not ended.wait(CANCEL_S):
        with suppress(Exception):  # The JVM, and its jobs, may have ended.
            context.cancelAllJobs()


def disconnect(context: SparkContext, gateway: Any, timeout_s: float) -> None:
    """Stop the session and end the JVM, which is killed if it does not end in time."""

    def stop() -> None:
        with suppress(Exception):  # The JVM may have ended already.
            context.stop()
            gateway.shutdown()

    # py4j has a connection for each thread. That of this thread may be in the middle of an answer
    # that a signal has interrupted, so another thread stops the session.

    stopper = Thread(target=stop, name="spark-stop", daemon=True)
    stopper.start()
    stopper.join(timeout_s)
    end_jvm(gateway.proc, timeout_s)
    stopper.join(HURRIED_S)  # Its connection ended with the JVM.


def end_jvm(jvm: Popen[bytes], timeout_s: float) -> None:
    """End a JVM by closing its stdin, and kill it if it does not end in time. Idempotent."""
    assert jvm.stdin is not None
    with suppress(OSError):  # The JVM has ended already.
        jvm.stdin.close()
    try:
        jvm.wait(timeout_s)
    except TimeoutExpired:
        kill_group(jvm)
