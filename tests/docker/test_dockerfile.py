"""The Dockerfile passes a linter, and the steps of its build run without an engine.

``/src`` and ``/opt/nsqtools`` are in a directory of the test; the system and Python are this one's.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.waiting import patience_s

import nsqtools

CHECKOUT = Path(__file__).parents[2]
IGNORED = (CHECKOUT / ".dockerignore").read_text().splitlines()
TEXT = re.sub(
    r"\\\n", " ", re.sub(r"^#.*\n", "", (CHECKOUT / "Dockerfile").read_text(), flags=re.M)
)
STAGES = {
    name: [tuple(line.split(None, 1)) for line in text.splitlines() if line]
    for name, text in re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", TEXT, re.M | re.S)
}


def step(stage: str, name: str) -> list[str]:
    return [" ".join(text.split()) for instruction, text in STAGES[stage] if instruction == name]


def reaches_the_builder(name: str) -> bool:
    """Whether .dockerignore, whose last match decides, lets a top-level file or directory pass."""
    is_ignored = False
    for line in IGNORED:
        if line and not line.startswith("#") and fnmatch.fnmatch(name, line.removeprefix("!")):
            is_ignored = not line.startswith("!")
    return not is_ignored


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the build stage, below a directory."""
    root = tmp_path_factory.mktemp("image")
    for text in step("build", "COPY"):
        *sources, target = text.split()
        place = root / "src" / target
        place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            assert reaches_the_builder(source), f"{source} is left out by .dockerignore"
            path = CHECKOUT / source
            if path.is_dir():
                skip = shutil.ignore_patterns(*(line[3:] for line in IGNORED if line[:3] == "**/"))
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=skip)
            else:
                shutil.copy2(path, place)
    (root / "bin").mkdir()
    (root / "bin/python").symlink_to(Path(sys.base_prefix, "bin", f"python3.{sys.version_info[1]}"))
    [command] = step("build", "RUN")
    command = re.sub(r"--mount=\S+ ", "", command)
    command = re.sub(r"(?<![\w/.])/(?=opt/nsqtools|src\b)", f"{root}/", command)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environ |= {"EXTRAS": "standard", "PATH": f"{root}/bin:{os.environ['PATH']}"}
    where = {"cwd": root / "src", "env": environ, "timeout": patience_s(300)}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, **where)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def test_the_dockerfile_passes_a_linter() -> None:
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", CHECKOUT / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_build_context_is_minimal_and_the_user_unprivileged() -> None:
    names = {path.name for path in CHECKOUT.iterdir()} | {".git", ".venv", "tests", ".env"}

    assert {name for name in names if reaches_the_builder(name)} == {
        *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"),
        *("nsqtools", "completions", "man"),
    }
    assert step("base", "USER") == ["10001:10001"]
    assert step("base", "COPY") == ["--from=build /opt/nsqtools /opt/nsqtools"]
    assert (step("nsq", "ENTRYPOINT"), step("nsq", "CMD")) == (['["nsq"]'], ['["--help"]'])
    assert step("nsqd", "ENTRYPOINT") == ['["nsq", "nsqd"]']
    assert "nsq ping" in step("nsqd", "HEALTHCHECK")[0].replace('", "', " ").replace('"', "")
    assert "HEALTHCHECK" not in dict(STAGES["base"]) | dict(STAGES["nsq"])


def test_the_built_command_runs_and_is_compiled_and_small(root: Path) -> None:
    nsq, home = root / "opt/nsqtools/bin/nsq", root / "home"
    home.mkdir()
    environ = {"PATH": f"{nsq.parent}:{os.environ['PATH']}", "HOME": str(home)}

    def run(*arguments: str) -> str:
        command = [nsq, *arguments]
        return subprocess.check_output(command, env=environ, text=True, timeout=patience_s(120))

    assert run("--version") == f"nsq {nsqtools.__version__}\n"
    assert run("demo").endswith("Everything was there. Next: nsq --help\n")
    files = [path for path in nsq.parents[1].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 80_000_000  # textual is 8 MB of it
    assert not [path for path in files if "pip" in path.parts]
    ours = [path for path in files if "nsqtools" in path.relative_to(root / "opt/nsqtools").parts]
    compiled = [path for path in ours if path.suffix == ".pyc"]
    assert len(compiled) == sum(path.suffix == ".py" for path in ours) > 200
    flags = {path.read_bytes()[4:8] for path in compiled}
    assert flags == {b"\1\0\0\0"}  # unchecked hash-based files
