"""The published wheel and sdist are complete, and work after their installation.

They are installed into an empty environment of this Python; with ``-m slow``, of every other
supported Python on this machine.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from datetime import date
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pexpect
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from plugins.examples import slow
from plugins.waiting import patience_s

import nsqtools
from nsqtools.server.embedded import EmbeddedNsqd

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = patience_s(120)
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
SUPPORTED = sorted(map(int, re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))))

SMOKE = """
import importlib, pkgutil, sys
import nsqtools
from nsqtools.server.embedded import EmbeddedNsqd

OTHER_EXTRAS = ("celery", "pyarrow", "pycurl", "jsonschema", "mcp", "mcp_types", "taskiq")
assert nsqtools.__file__.startswith(sys.prefix), nsqtools.__file__
for module in pkgutil.walk_packages(nsqtools.__path__, "nsqtools.", lambda name: None):
    # these need pyspark, run the program, or need pytest
    if not module.name.startswith(("nsqtools.spark", "nsqtools.__main__", "nsqtools.testing.p")):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as missing:
            assert missing.name in OTHER_EXTRAS, missing
with EmbeddedNsqd() as nsqd:
    with nsqtools.Producer(nsqd.tcp_address) as producer:
        producer.publish_many("clicks", [b"one", b"two"])
    with nsqtools.Consumer("clicks", "c", nsqd_tcp_addresses=nsqd.tcp_address) as consumer:
        bodies = []
        for message in consumer:
            bodies.append(message.body)
            message.finish()
            if len(bodies) == 2:
                break
assert sorted(bodies) == [b"one", b"two"]
print("fine")
"""

RELEASED_AT = 1_790_000_000  # SOURCE_DATE_EPOCH: the time of all built files
MOST_PACKAGES = 22  # dependencies that the base installation may have


class Distributions(NamedTuple):
    sdist: Path
    wheel: Path
    sdist_of_sdist: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    directory = tmp_path_factory.mktemp("dist")
    first = build(CHECKOUT, directory)
    with tarfile.open(first[0]) as archive:
        archive.extractall(directory / "source", filter="data")
    [source] = (directory / "source").iterdir()
    for path in source.rglob("*"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    umask = os.umask(0o077)
    try:
        return Distributions(*first, *build(source, directory / "again"))
    finally:
        os.umask(umask)


def build(source: Path, into: Path) -> tuple[Path, Path]:
    flags = ("--no-isolation", "--sdist", "--wheel")
    run([sys.executable, "-m", "build", *flags, source, "--outdir", into])
    [sdist], [wheel] = into.glob("*.tar.gz"), into.glob("*.whl")
    return sdist, wheel


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """Run a command as a user would, without the settings of the tests; return its output."""
    testing = ("PYTHON", "COVERAGE", "PYTEST")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(testing)}
    environ["SOURCE_DATE_EPOCH"] = str(RELEASED_AT)
    done = subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_builds_are_reproducible_and_pass_the_checks_of_twine(built: Distributions) -> None:
    """The second build has another directory, other file times and another umask."""
    output = run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built])
    assert output.count("PASSED") == 4
    with zipfile.ZipFile(built.wheel) as ours, zipfile.ZipFile(built.wheel_of_sdist) as again:
        assert ours.namelist() == again.namelist()
        different = [name for name in ours.namelist() if ours.read(name) != again.read(name)]
    assert different == []
    assert built.wheel.read_bytes() == built.wheel_of_sdist.read_bytes()
    assert built.sdist.read_bytes() == built.sdist_of_sdist.read_bytes()
    with tarfile.open(built.sdist) as archive:
        assert {member.mtime for member in archive} == {RELEASED_AT}


def test_wheel_and_sdist_have_every_file_of_the_package(built: Distributions) -> None:
    files = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "nsqtools").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(files) > 200
    with tarfile.open(built.sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(built.wheel) as wheel:
        names = "\n".join(wheel.namelist())
    # modules that Spark needs at the top level have another place
    in_wheel = set(re.sub("^(?=pyspark_)", "nsqtools/spark/top_level/", names, flags=re.M).split())

    assert (files - in_sdist, files - in_wheel) == (set(), set())
    documents = {"CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Dockerfile", "tests/conftest.py"}
    assert documents <= in_sdist
    assert [name for name in in_sdist if name.startswith("tests/go/bin")] == []


def test_the_wheel_has_metadata_entry_points_and_shared_files(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
        [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        core = message_from_bytes(wheel.read(f"{info}/METADATA"))
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    shared = {name.partition(".data/data/")[2] for name in names}
    manual = {path.relative_to(CHECKOUT) for path in CHECKOUT.glob("man/man?/*")}

    assert (core["Name"], core["Version"]) == ("nsqtools", nsqtools.__version__)
    assert core["License-Expression"] == "MIT"
    assert core["Requires-Python"] == ">=3.11"
    extras = set(core.get_all("Provides-Extra", []))
    assert {"auth-regex", "http", "object-store", "spark", "spark-java", "test", "top"} <= extras
    assert "Typing :: Typed" in core.get_all("Classifier", [])
    assert core["Description-Content-Type"] == "text/markdown"
    assert {"nsqtools/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert "[pytest11]\nnsqtools = nsqtools.testing.pytest_plugin\n" in f"{entry_points}\n"
    assert len(manual) > 30
    assert {f"share/{path.as_posix()}" for path in manual} <= shared
    shells = ("bash-completion/completions/nsq", "zsh/site-functions/_nsq")
    assert {f"share/{path}" for path in (*shells, "fish/vendor_completions.d/nsq.fish")} <= shared


KINDS = {"Highlights", "Upgrading", "Added", "Changed", "Removed", "Fixed", "Security"}


def test_the_version_the_changelog_and_the_supported_pythons_agree() -> None:
    assert PROJECT["dynamic"] == ["version"]
    declared = re.compile(rf"""version\s*[=:]\s*["']?{re.escape(nsqtools.__version__)}""", re.I)
    modules = set((CHECKOUT / "nsqtools").rglob("*.py")) - {Path(nsqtools.__file__)}
    settings = [*CHECKOUT.glob("*.toml"), CHECKOUT / "Dockerfile"]

    assert [
        path for path in (*modules, *settings) if declared.search(path.read_text("utf-8"))
    ] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+", nsqtools.__version__)
    text = (CHECKOUT / "CHANGELOG.md").read_text("utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.M)
    (version, _), *earlier = [section for section in sections if section[0] != "Unreleased"]

    assert version == nsqtools.__version__
    released = [when for _, when in earlier]
    assert released == sorted(map(str, map(date.fromisoformat, released)), reverse=True)
    kinds = set(re.findall(r"^### (.+)$", text, re.M))
    assert kinds <= KINDS
    assert PROJECT["requires-python"] == f">=3.{SUPPORTED[0]}"
    assert list(range(SUPPORTED[0], SUPPORTED[-1] + 1)) == SUPPORTED
    assert sys.version_info.minor in SUPPORTED


NEEDS = {"nsqd": "server", "demo": "server", "bench e2e": "server", "web": "web", "mcp": "mcp"}
OTHERS = {*SUPPORTED} - {sys.version_info.minor}


@pytest.mark.parametrize("minor", [slow(n) if n in OTHERS else n for n in SUPPORTED])
def test_the_wheel_works_in_an_empty_environment(
    built: Distributions, tmp_path: Path, minor: int
) -> None:
    home, work = tmp_path / "venv", tmp_path / "elsewhere"
    work.mkdir()
    uv = [sys.executable, "-m", "uv"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    other_python = next(pyenv.glob(f"versions/3.{minor}.*/bin/python"), f"3.{minor}")
    version = other_python if minor in OTHERS else sys.executable
    create = [*uv, "venv", "--quiet", "--no-python-downloads", "--python", version, home]
    if subprocess.run(create).returncode and minor in OTHERS:
        pytest.skip(f"there is no Python 3.{minor} here")
    python, nsq = home / "bin/python", home / "bin/nsq"
    install = [*uv, "pip", "install", "--quiet", "--python", python]
    run([*install, built.wheel])

    assert run([nsq, "--version"], cwd=work) == f"nsq {nsqtools.__version__}\n"
    listed = subprocess.check_output([*uv, "pip", "list", "-q", "--python", python], text=True)
    assert len(listed.splitlines()) - 2 <= 1 + MOST_PACKAGES, listed  # a heading, and ours
    for command, extra in NEEDS.items():
        failed = subprocess.run([nsq, *command.split()], cwd=work, capture_output=True, text=True)
        assert failed.returncode == 1
        assert re.fullmatch(
            r"nsq: error: the package \w+ is not installed, which this command needs\n"
            rf"hint: Install it with: pip install 'nsqtools\[{extra}\]'\n",
            failed.stderr,
        )
    output, status = pexpect.run(
        f"{nsq} top", cwd=work, env={**os.environ, "TERM": "xterm"}, withexitstatus=True
    )
    assert (status, b"pip install 'nsqtools[top]'" in output) == (1, True)
    run([*install, f"nsqtools[standard] @ {built.wheel.as_uri()}"])
    assert run([python, "-W", "error", "-c", SMOKE], cwd=work) == "fine\n"
    with EmbeddedNsqd() as nsqd:
        address = f"--nsqd-tcp-address={nsqd.tcp_address}"
        measured = run([nsq, "bench", "e2e", address, "-n", "200", "--warm-up=0s"], cwd=work)
    assert measured.splitlines()[1].split("\t")[0] == "e2e"
    assert (home / "share/man/man1/nsq-tail.1").exists()
    assert list(work.iterdir()) == []


CI = CHECKOUT / ".ci"
LOCKED_EXTRAS = ["top", "server", "web", "jq", "http", "auth-regex", "mcp", "object-store"]
LOCKED_EXTRAS += ["spark", "spark-java", "test"]


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    """The constraints for this Python: version by name."""
    here = {}
    for line in (CI / "constraints.txt").read_text().splitlines():
        if re.match(r"[\w.-]+==", line):
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate():
                here[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    return here


def test_each_dependency_is_locked_with_hashes_at_a_matching_version(
    locked: dict[str, str],
) -> None:
    extras = PROJECT["optional-dependencies"]
    requirements = [
        *PROJECT["dependencies"],
        *(requirement for name in LOCKED_EXTRAS for requirement in extras[name]),
    ]

    for requirement in map(Requirement, requirements):
        is_here = requirement.marker is None or requirement.marker.evaluate(default_environment())
        if is_here and requirement.name != "nsqtools":  # nsqtools: an extra that consists of others
            version = locked.get(canonicalize_name(requirement.name), "")
            assert version in requirement.specifier, f"{requirement}: run .ci/lock"
    for name in ("constraints.txt", "uv.txt"):
        lines = (CI / name).read_text().replace("\\\n", " ").splitlines()
        assert len(lines) > 0
        assert all("--hash=sha256:" in line for line in lines)
        assert not any("://" in line for line in lines)  # any index may serve them


def test_the_sbom_lists_the_packages_of_an_environment(locked: dict[str, str]) -> None:
    document = json.loads(subprocess.check_output([sys.executable, CI / "sbom"]))

    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == "nsqtools"
    components = {component["bom-ref"]: component for component in document["components"]}
    httpx = components[f"pkg:pypi/httpx@{metadata.version('httpx')}"]
    if locked["httpx"] == metadata.version("httpx"):
        assert len(httpx["hashes"]) == 2  # a wheel and an sdist
    needs = {dependency["ref"]: dependency["dependsOn"] for dependency in document["dependencies"]}
    [ours] = [ref for ref in needs if ref.startswith("pkg:pypi/nsqtools@")]
    assert httpx["bom-ref"] in needs[ours]
    assert all(needs.keys() >= set(required) for required in needs.values())


def test_nsqtools_can_be_installed_with_an_older_typer() -> None:
    """faststream[cli] excludes the newest typer."""
    environ = {name: value for name, value in os.environ.items() if name != "UV_CONSTRAINT"}
    command = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        "--quiet",
        "pyproject.toml",
        "-",
    ]
    done = subprocess.run(
        command,
        input="faststream[cli]",
        cwd=CHECKOUT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if re.search("error sending request|Failed to fetch|network", done.stderr):
        pytest.skip("no network")
    assert done.returncode == 0, done.stderr
    assert "\nfaststream==" in done.stdout
