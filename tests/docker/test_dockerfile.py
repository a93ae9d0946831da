"""The Dockerfile: its steps run, and what they make works for a user without rights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from plugins.image import Image, Stage, missing_rights, reaches_the_builder, run

import nsqtools

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    """The image, built with the usual extras: mapped to other paths where nobody lets us mount."""
    with TemporaryDirectory(prefix="nsq-image-") as scratch:
        arguments = {"EXTRAS": "standard", "VERSION": nsqtools.__version__}
        is_mapped = bool(missing_rights(Path(scratch)))
        yield Image(CHECKOUT, Path(scratch), arguments, is_mapped=is_mapped)


@pytest.fixture(scope="module")
def with_rights(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For what can only be seen in a root of one's own."""
    if reason := missing_rights(tmp_path_factory.mktemp("rights")):
        pytest.skip(reason)


@pytest.mark.slow
def test_the_steps_run_without_rights_too(tmp_path: Path) -> None:
    """As far as that goes: on other paths, and without the user."""
    image = Image(CHECKOUT, tmp_path, {"EXTRAS": "standard"}, is_mapped=True)
    stage = image.stage("nsq")

    version = run(stage, [*stage.entrypoint, "--version"])
    demo = run(stage, [*stage.entrypoint, "demo", "--no-spark"])

    assert version.stdout == f"nsq {nsqtools.__version__}\n"
    assert demo.stdout.endswith("Everything was there. Next: nsq --help\n")


@pytest.fixture(scope="module")
def command_line(image: Image) -> Stage:
    return image.stage("nsq")


def test_a_linter_finds_nothing() -> None:
    program = Path(sys.executable).with_name("hadolint")

    done = subprocess.run(
        [program, "--no-color", CHECKOUT / "Dockerfile"], capture_output=True, text=True
    )

    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_linter_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && pip install nsqtools\n")

    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), tmp_path / "Dockerfile"], capture_output=True
    )

    assert done.returncode == 1
    assert b"DL3006" in done.stdout


def test_the_builder_gets_what_the_wheel_is_made_of_and_nothing_else() -> None:
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "nsqtools"}
    there = {path.name for path in CHECKOUT.iterdir()} | {".git", ".venv", "tests", ".env"}

    reaching = {name for name in there if reaches_the_builder(CHECKOUT / ".dockerignore", name)}

    assert reaching == wanted | {"completions", "man"}


def test_the_entry_point_is_nsq(command_line: Stage) -> None:
    assert list(command_line.entrypoint) == ["nsq"]

    version = run(command_line, [*command_line.entrypoint, "--version"], is_online=False)
    usage = run(command_line, [*command_line.entrypoint, *command_line.command], is_online=False)

    assert version.stdout == f"nsq {nsqtools.__version__}\n"
    assert usage.stdout.startswith("Usage: nsq")


@pytest.mark.usefixtures("with_rights")
def test_it_runs_as_a_user_without_rights(command_line: Stage) -> None:
    user = run(command_line, ["id", "-nu"], is_online=False)

    assert (command_line.user, command_line.workdir) == ("10001:10001", "/data")
    assert user.stdout == "nsq\n"


def test_the_demonstration_runs_in_it(command_line: Stage) -> None:
    done = run(command_line, ["nsq", "demo", "--no-spark"], is_online=False)

    assert done.stdout.endswith("Everything was there. Next: nsq --help\n")


@pytest.mark.usefixtures("with_rights")
def test_the_user_may_write_to_data_and_nowhere_else(command_line: Stage) -> None:
    script = "touch /data/x && rm /data/x && ! touch /opt/nsqtools/x 2>/dev/null && ! touch /x"

    run(command_line, ["sh", "-c", script], is_online=False)


def test_all_bytecode_is_there_and_needs_no_source(command_line: Stage) -> None:
    packages = command_line.root / "opt/nsqtools/lib"
    sources = [path for path in packages.rglob("*.py") if "nsqtools" in path.parts]
    compiled = [path for path in packages.rglob("__pycache__/*.pyc") if "nsqtools" in path.parts]

    assert len(sources) > 200
    assert len(compiled) == len(sources)
    flags = {path.read_bytes()[4:8] for path in compiled}
    assert flags == {b"\1\0\0\0"}  # by hash, and not compared with the source


def test_it_is_small_and_has_no_pip(command_line: Stage) -> None:
    root = command_line.root / "opt/nsqtools"
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    assert size < 80_000_000  # textual and what it needs are 8 MB of it
    assert not list(root.rglob("pip"))
    assert not (command_line.root / "src").exists()


def test_labels_name_it(command_line: Stage) -> None:
    prefix = "org.opencontainers.image."
    labels = {name.removeprefix(prefix): value for name, value in command_line.labels.items()}

    assert set(labels) == {"title", "description", "licenses", "version"}
    assert (labels["title"], labels["licenses"]) == ("nsqtools", "MIT")
    assert labels["version"] == nsqtools.__version__


@pytest.mark.usefixtures("with_rights")
def test_an_nsqd_in_it_is_healthy_once_it_serves(image: Image) -> None:
    stage = image.stage("nsqd")
    ask = " ".join(stage.healthcheck)
    serve = " ".join([*stage.entrypoint, *stage.command])
    script = (
        f"! {ask} && {serve} & nsqd=$!; "
        f"for n in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; {ask} && break; done; "
        "status=$?; kill $nsqd; wait $nsqd; exit $status"
    )

    done = run(stage, ["sh", "-c", script], is_online=False)

    assert "OK" in done.stdout or "ok" in done.stdout
    assert (stage.root / "data/nsqd.dat").exists()


@pytest.mark.usefixtures("with_rights")
@pytest.mark.slow
def test_spark_and_its_java_come_with_their_extras(tmp_path: Path) -> None:
    """The Java of this machine is taken away, as there is none in the image of Python."""
    stage = Image(CHECKOUT, tmp_path, {"EXTRAS": "standard,spark,spark-java"}).stage("nsq")
    run(stage, ["rm", "-f", "/usr/bin/java"], user="0:0")
    query = "SELECT 40 + 2 AS answer"

    done = run(stage, ["nsq", "spark", "sql", query, "--json"], is_online=False)

    assert json.loads(done.stdout) == {"answer": 42}
