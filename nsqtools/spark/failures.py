"""Convert Spark's exceptions to an `NsqError` with the real reason.

Spark wraps errors: a failure in a Python worker arrives as a Java exception in a Java exception,
with two stack traces as its text. The reason in it is the last line of the Python traceback, and
for an `NsqError` the hint below it (`NsqError` adds its hint as a note, and Python prints notes).
Everything else is in Spark's log, whose path is part of the error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from nsqtools import errors
from nsqtools.errors import ConfigurationError, NsqError
from nsqtools.spark.pyspark_internals import java_trace
from nsqtools.spark.spark_settings import SparkSettings

TAIL_BYTES = 256 << 10
SESSION = "---- nsqtools starts Spark"
"""The first words of a session in its log, which separate it from earlier sessions."""

OURS = re.compile(r"^(?:\w+\.)*nsqtools\.(?:\w+\.)*(\w+): (.*)$(?:\nhint: (.*)$)?", re.MULTILINE)
TRACEBACK = "Traceback (most recent call last):"
PYTHON_ERROR = re.compile(r"^((?:\w+\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.M)
JAVA_RAISED = re.compile(r"^: (?:[\w$]+\.)*[\w$]+: (.*)$", re.MULTILINE)
JAVA_CAUSE = re.compile(r"^Caused by: (?:[\w$]+\.)*([\w$]+: .*)$", re.MULTILINE)
NO_REASON = ("ClassNotFoundException", "Py4J")
WRITING = re.compile(r"writing rows to \S+[^\s.]")
CONDITION = re.compile(r"^\[([A-Z0-9_.]+)\] ")
NOISE = re.compile(
    r"^(?:SparkException|IOException): |\s*SQLSTATE: \w+|; line \d+ pos \d+|\. Consider setting .*"
)
OUT_OF_MEMORY = "java.lang.OutOfMemoryError"
LATE_PYTHON = "Timed out while waiting for the Python worker to connect back"
SHUT_DOWN_TEXT = "SparkContext was shut down"
SHUT_DOWN = re.compile(f"{SHUT_DOWN_TEXT}|on a stopped SparkContext")
KILLED = re.compile(r"Application has been killed\. Reason: (.*)")
CAUSE_LINE = re.compile(r"^Caused by: .*$", re.MULTILINE)
STREAM_FAILED = "STREAM_FAILED"
SAVE_MODE = "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"
NOT_FOUND = ("PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")


@contextmanager
def spark_errors(settings: SparkSettings) -> Iterator[None]:
    """Convert Spark's exceptions inside to an `NsqError` with the path of its log."""
    try:
        yield
    except NsqError:
        raise
    except Exception as error:
        if is_sparks(error):
            raise nsq_error_of(error, settings) from error
        raise


def is_sparks(error: BaseException) -> bool:
    """Return whether ``error`` comes from pyspark, py4j or the connection to the JVM."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, ConnectionError):
        return any(module.startswith("py4j") for module in modules)
    # pyspark also raises built-in errors, such as ValueError for the year 33658.
    raising = [type(error).__module__, *modules[-1:]]
    return any(module.startswith(("pyspark.", "py4j.")) for module in raising)


def nsq_error_of(error: BaseException, settings: SparkSettings) -> NsqError:
    """Return the `NsqError` for an exception of Spark."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import AnalysisException

    log = f"Spark's log is {settings.log_path}."
    text = _text(error)
    if matches := list(OURS.finditer(text)):
        name, message, hint = matches[-1].groups()
        ours = NsqError(message, hint=hint or log)
        ours.category = getattr(errors, name, NsqError).category
        return ours
    if isinstance(error, AnalysisException):
        return _from_analysis(text, log)
    is_gone = isinstance(error, ConnectionError) or (
        isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
    )
    if is_gone or SHUT_DOWN.search(text):
        return _jvm_ended(settings, log)
    if OUT_OF_MEMORY in text:
        return _out_of_memory(settings, log)
    if LATE_PYTHON in text:  # PythonWorkerFactory has a fixed limit
        return NsqError(
            "Python did not start within the 10 s for which Spark waits",
            hint=f"The machine is too busy. Run the command again. {log}",
        )
    return NsqError(f"Spark failed: {real_reason(text)}", hint=log)


def _text(error: BaseException) -> str:
    """Return the text of an error."""
    try:
        text = str(error)
    except Exception:  # Spark fetches the text from the JVM, which may have ended.
        return SHUT_DOWN_TEXT
    # The text of a failed query may lack its cause: for a missing class it is only a path.
    if text.startswith(f"[{STREAM_FAILED}]"):
        text = "\n".join([text, *CAUSE_LINE.findall(java_trace(error))])
    return text


def _jvm_ended(settings: SparkSettings, log: str) -> NsqError:
    """Return the error for a JVM that has ended, with the reason from its log."""
    output = "\n".join(last_lines(settings.log_path))
    if OUT_OF_MEMORY in output:
        return _out_of_memory(settings, log)
    killed = KILLED.search(output)
    reason = f" ({killed[1].rstrip('.!')})" if killed else ""
    return NsqError(f"Spark's JVM ended unexpectedly{reason}", hint=log)


def _out_of_memory(settings: SparkSettings, log: str) -> NsqError:
    remedy = "Give it more with --driver-memory, or --conf spark.executor.memory=SIZE."
    if settings.is_local:
        remedy = f"Give it more than {settings.driver_memory} with --driver-memory."
    return NsqError("Spark ran out of memory", hint=f"{remedy} {log}")


def _from_analysis(text: str, log: str) -> NsqError:
    """Return the error for invalid SQL, or for missing data."""
    if TRACEBACK in text:  # A Python data source failed during planning.
        return NsqError(f"Spark failed: {real_reason(text)}", hint=log)
    match, message = CONDITION.match(text), first_line(text)
    condition = match[1] if match else ""
    if condition in NOT_FOUND:
        return errors.NotFoundError(message)
    hint = 'Write with .mode("append").' if condition == SAVE_MODE else ""
    return ConfigurationError(message, hint=hint)


def real_reason(text: str) -> str:
    """Return the last line of a Python traceback, or Java's last cause, or the first line."""
    # The first line of a traceback may be quoted again, without an error after it.
    for trace in reversed(text.split(TRACEBACK)[1:]):
        if errors_raised := PYTHON_ERROR.findall(trace):
            return str(errors_raised[-1])
    causes = [cause for cause in JAVA_CAUSE.findall(text) if not cause.startswith(NO_REASON)]
    reasons = [text, *JAVA_RAISED.findall(text)[:1], *causes]
    action = "".join(f" ({match})" for match in WRITING.findall(text)[:1])
    return f"{first_line(reasons[-1])}{action}"


def first_line(text: str) -> str:
    """Return the first line, without the bracketed condition and the codes around it."""
    line = next((line for line in text.splitlines() if line.strip()), "no reason given")
    return NOISE.sub("", CONDITION.sub("", line)).rstrip(" .;")


def last_lines(path: Path) -> list[str]:
    """Return the last lines of the last session in a log, none for a missing file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rpartition(SESSION)[2].splitlines()[1:]
