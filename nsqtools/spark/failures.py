"""Turn what Spark raises into one error of ours with the real reason.

Spark wraps: a failure in a Python worker arrives as a Java exception in a Java exception, with two
stack traces as its text. What a user needs is in there: the last line of the Python traceback, and
below it the hint when the error is one of ours (`NsqError` adds its hint as a note, and Python
prints notes). The rest is in Spark's log, which the error names.
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
"""How the lines of a session begin in its log: what is quoted is never of an earlier one."""

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
SHUT_DOWN_TEXT = "SparkContext was shut down"
SHUT_DOWN = re.compile(f"{SHUT_DOWN_TEXT}|on a stopped SparkContext")
KILLED = re.compile(r"Application has been killed\. Reason: (.*)")
CAUSE_LINE = re.compile(r"^Caused by: .*$", re.MULTILINE)
STREAM_FAILED = "STREAM_FAILED"
SAVE_MODE = "UNSUPPORTED_DATA_SOURCE_SAVE_MODE"
NOT_FOUND = ("PATH_NOT_FOUND", "TABLE_OR_VIEW_NOT_FOUND")


@contextmanager
def spark_errors(settings: SparkSettings) -> Iterator[None]:
    """Inside, whatever Spark raises becomes an `NsqError` that names its log."""
    try:
        yield
    except NsqError:
        raise
    except Exception as error:
        if is_sparks(error):
            raise explain(error, settings) from error
        raise


def is_sparks(error: BaseException) -> bool:
    """Whether ``error`` is from pyspark, py4j or the connection to the JVM."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, ConnectionError):
        return any(module.startswith("py4j") for module in modules)
    raised_by = [type(error).__module__, *modules[-1:]]  # it has a ValueError for the year 33658
    return any(module.startswith(("pyspark.", "py4j.")) for module in raised_by)


def explain(error: BaseException, settings: SparkSettings) -> NsqError:
    """Return the error of ours for one of Spark's."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import AnalysisException

    log = f"Spark's log is {settings.log_path}."
    text = _text(error)
    if found := list(OURS.finditer(text)):
        name, message, hint = found[-1].groups()
        ours = NsqError(message, hint=hint or log)
        ours.category = getattr(errors, name, NsqError).category
        return ours
    if isinstance(error, AnalysisException):
        return _from_analysis(text, log)
    is_gone = isinstance(error, ConnectionError) or (
        isinstance(error, Py4JError) and not isinstance(error, Py4JJavaError)
    )
    if is_gone or SHUT_DOWN.search(text):
        return _ended(settings, log)
    if OUT_OF_MEMORY in text:
        return _out_of_memory(settings, log)
    return NsqError(f"Spark failed: {real_reason(text)}", hint=log)


def _text(error: BaseException) -> str:
    """The text of an error: of most of Spark's the JVM has it, which may have ended.

    That of a query's error does not name what ended it: for a missing class it is only a path.
    """
    try:
        text = str(error)
    except Exception:
        return SHUT_DOWN_TEXT
    if text.startswith(f"[{STREAM_FAILED}]"):
        text = "\n".join([text, *CAUSE_LINE.findall(java_trace(error))])
    return text


def _ended(settings: SparkSettings, log: str) -> NsqError:
    """Spark has ended, and only its log has the reason."""
    said = "\n".join(last_lines(settings.log_path))
    if OUT_OF_MEMORY in said:
        return _out_of_memory(settings, log)
    killed = KILLED.search(said)
    reason = f" ({killed[1].rstrip('.!')})" if killed else ""
    return NsqError(f"Spark's JVM ended unexpectedly{reason}", hint=log)


def _out_of_memory(settings: SparkSettings, log: str) -> NsqError:
    more = "Give it more with --driver-memory, or --conf spark.executor.memory=SIZE."
    if settings.is_local:
        more = f"Give it more than {settings.driver_memory} with --driver-memory."
    return NsqError("Spark ran out of memory", hint=f"{more} {log}")


def _from_analysis(text: str, log: str) -> NsqError:
    """SQL that Spark does not understand, or data that is not there."""
    if TRACEBACK in text:  # a data source that failed while it was planned
        return NsqError(f"Spark failed: {real_reason(text)}", hint=log)
    found, message = CONDITION.match(text), first_line(text)
    condition = found[1] if found else ""
    if condition in NOT_FOUND:
        return errors.NotFoundError(message)
    hint = 'Write with .mode("append").' if condition == SAVE_MODE else ""
    return ConfigurationError(message, hint=hint)


def real_reason(text: str) -> str:
    """The last line of a Python traceback, else Java's last cause, else the first line."""
    for trace in reversed(text.split(TRACEBACK)[1:]):  # the first line of one may be quoted again
        if raised := PYTHON_ERROR.findall(trace):
            return str(raised[-1])
    causes = [cause for cause in JAVA_CAUSE.findall(text) if not cause.startswith(NO_REASON)]
    said = [text, *JAVA_RAISED.findall(text)[:1], *causes]
    doing = "".join(f" ({each})" for each in WRITING.findall(text)[:1])
    return f"{first_line(said[-1])}{doing}"


def first_line(text: str) -> str:
    """The first line, without the bracketed condition and the codes around it."""
    line = next((line for line in text.splitlines() if line.strip()), "no reason given")
    return NOISE.sub("", CONDITION.sub("", line)).rstrip(" .;")


def last_lines(path: Path) -> list[str]:
    """What the last session wrote, or the end of it; nothing if the file is missing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rpartition(SESSION)[2].splitlines()[1:]
