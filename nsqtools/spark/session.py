"""A Spark session for the length of a ``with``: started quietly, ended in order.

    with spark_session(SparkSettings()) as spark:
        spark.read.format("nsq-archive").load("/var/nsq").count()

Everything that Spark needs comes together here: Java (`java`), workers that run this very Python
and not the first ``python3`` in PATH (`jvm`), a clean terminal (`jvm`, `session_files`), and
nothing left on disk (`session_files`).

The session and its JVM end with the ``with``, however it is left, so a later session has a JVM, and
a heap, of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING, Any

from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.spark import register
from nsqtools.spark.failures import spark_errors
from nsqtools.spark.java import find_java, java_home
from nsqtools.spark.jvm import (
    JVM,
    SHARED_VARIABLES,
    jvm_conf,
    jvm_environ,
    reach_master,
    secret_conf,
    submit_command,
)
from nsqtools.spark.packages import JARS, PACKAGES, note_jars
from nsqtools.spark.pyspark_internals import (
    OLDEST,
    close_gateway,
    connect_session,
    environment,
    forget_context,
    has_context,
    redirect_accumulator_errors,
)
from nsqtools.spark.session_files import SparkLog, diverted, scratch_directory
from nsqtools.spark.spark_settings import SparkSettings

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession as SparkSession  # commands annotate with it

Handler = Callable[[int, FrameType | None], Any] | int | None  # as `signal.signal` has it

STOP_TIMEOUT_S = 20.0
HURRIED_S = 1.5


@contextmanager
def spark_session(settings: SparkSettings) -> Iterator[SparkSession]:
    """Start Spark, with the formats of nsqtools registered, and end it at the end.

    Raises `NsqError`: the extra or Java is missing, the JVM does not start, Spark refuses its
    settings. Raises `ConfigurationError` where this process has a session already.
    """
    require_pyspark()
    if has_context():
        raise ConfigurationError(
            "this process has a Spark session already",
            hint="Use that one: nsqtools.spark.register(spark) makes the formats known to it.",
        )
    reach_master(settings.master)
    java = find_java(os.environ)
    log = SparkLog(settings.log_path)
    with ExitStack() as stack:
        stack.callback(log.close)
        stack.enter_context(diverted(log))
        local_dirs = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
        parent = settings.local_dir or Path(local_dirs or gettempdir())
        scratch = stack.enter_context(scratch_directory(parent))
        environ = jvm_environ(settings, scratch, java_home(java, os.environ, scratch))
        stack.enter_context(environment({name: environ.get(name) for name in SHARED_VARIABLES}))
        secrets = secret_conf(settings, scratch)
        command = submit_command(Path(environ["SPARK_HOME"]), jvm_conf(settings, scratch), secrets)
        jvm = JVM(command, environ, scratch, log, settings.inherited)
        stack.callback(jvm.close, HURRIED_S)
        stack.enter_context(spark_errors(settings))
        handler = signal.getsignal(signal.SIGINT)
        spark = connect_session(jvm.port, jvm.secret)
        if current_thread() is main_thread():
            signal.signal(signal.SIGINT, cancelling(spark.sparkContext, handler))
            stack.callback(signal.signal, signal.SIGINT, handler)
        hurried = False
        try:
            with spark_errors(settings):  # while the JVM can still say what went wrong
                redirect_accumulator_errors(spark.sparkContext, log.write)
                register(spark)
                conf = spark.sparkContext.getConf()
                if (packages := conf.get(PACKAGES)) and (jars := conf.get(JARS)):
                    note_jars(packages.split(","), jars)
                yield spark
        except BaseException as error:
            hurried = not isinstance(error, Exception)  # a signal
            raise
        finally:
            disconnect(spark, jvm, hurried=hurried)


def require_pyspark() -> None:
    """Raise `NsqError` where the extra ``spark`` is missing, or is too old."""
    install = "Install them with: pip install 'nsqtools[spark]'"
    try:
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError as error:
        raise NsqError(f"Spark needs the package {error.name}", hint=install) from error
    parts = pyspark.__version__.split(".")[:3]
    if tuple(int(part) for part in parts if part.isdigit()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NsqError(
            f"pyspark {pyspark.__version__} is too old: {oldest} or newer is needed", hint=install
        )


def cancelling(context: SparkContext, handler: Handler) -> Handler:
    """A handler for INT that also cancels the jobs that run, in place of pyspark's.

    Python's own raises, and where that happens in the middle of an answer of the JVM, py4j takes
    that answer for the one to the next question. So there the first ^C only cancels, which ends the
    call with an error; a second one raises.
    """
    if not callable(handler):
        return handler
    has_asked = False

    def cancel(number: int, frame: FrameType | None) -> Any:
        nonlocal has_asked
        Thread(target=cancel_jobs, args=(context,), name="spark-cancel", daemon=True).start()
        has_asked = not has_asked and handler is signal.default_int_handler and in_py4j(frame)
        return None if has_asked else handler(number, frame)

    return cancel


def in_py4j(frame: FrameType | None) -> bool:
    """Whether py4j called ``frame``."""
    while frame is not None:
        if "/py4j/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def cancel_jobs(context: SparkContext) -> None:
    """Cancel every job that runs; not on the thread that waits for one."""
    try:
        context.cancelAllJobs()
    except Exception:  # the JVM is gone, and its jobs with it
        pass


def disconnect(spark: SparkSession, jvm: JVM, *, hurried: bool) -> None:
    """Stop the session, end the JVM, and forget both; what does not end in time is killed.

    The stop is asked for on a thread of its own, because py4j gives each thread a connection: that
    of ours may be in the middle of an answer, when a signal has interrupted it.
    """
    stopper = Thread(target=_stop, args=(spark,), name="spark-stop", daemon=True)
    stopper.start()
    stopper.join(HURRIED_S if hurried else STOP_TIMEOUT_S)
    forget_context()
    jvm.close(HURRIED_S if hurried else STOP_TIMEOUT_S)
    stopper.join(HURRIED_S)  # its connection has ended


def _stop(spark: SparkSession) -> None:
    context = spark.sparkContext
    try:
        spark.stop()
        close_gateway(context)
    except Exception:  # the JVM is gone, which is what is wanted
        pass
