"""Build the image of a Dockerfile without an engine: its steps run, each stage in its own root.

A root is a directory that is laid over this machine's own, so steps see their real paths
and write nowhere else: COPY copies from the checkout (or from another stage's root), RUN runs with
`sh` and what ARG, ENV and WORKDIR have said. In place of the base image there are this machine's
system and Python. It takes a Linux that lets us mount: `missing_rights` says whether it does. Where
it does not, a *mapped* image runs the same steps with other paths, and without another user.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from plugins.waiting import patience_s

ENTER = str(Path(__file__).parent / "enter_image.py")
BASE_ENVIRON = {
    "PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LD_LIBRARY_PATH": "/usr/local/image-python/lib",
}
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
CACHE_MOUNT = re.compile(r"--mount=type=cache,target=(\S+)\s+")
MADE_PATH = re.compile(r"(?<![\w/.])/(?:opt/nsqtools|src|data)\b")
TIMEOUT_S = patience_s(300.0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile, continuation lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of the JSON form, else those between spaces."""
        if self.text.startswith("["):
            words: list[str] = json.loads(self.text)
            return words
        return self.text.split()


def read_dockerfile(text: str) -> list[Instruction]:
    """The instructions in their order."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    instructions = []
    for line in filter(str.strip, joined.splitlines()):
        name, _, rest = line.strip().partition(" ")
        instructions.append(Instruction(name.upper(), " ".join(rest.split())))
    return instructions


@dataclass
class Stage:
    """What a stage has come to: its root, and what a container made from it would start with."""

    root: Path
    is_mapped: bool = False
    environ: dict[str, str] = field(default_factory=lambda: dict(BASE_ENVIRON))
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    healthcheck: Sequence[str] = ()
    labels: dict[str, str] = field(default_factory=dict)


class Image:
    """The stages of a Dockerfile, built as far as they are asked for."""

    def __init__(
        self,
        context: Path,
        scratch: Path,
        arguments: Mapping[str, str],
        *,
        is_mapped: bool = False,
    ) -> None:
        self._context = context
        self._is_mapped = is_mapped
        self._scratch = scratch
        self._arguments = arguments
        self._bases: dict[str, str] = {}
        self._steps: dict[str, list[Instruction]] = {}
        self._built: dict[str, Stage] = {}
        self._global: dict[str, str] = {}
        name = ""
        for instruction in read_dockerfile((context / "Dockerfile").read_text()):
            if instruction.name == "FROM":
                base, _, name = instruction.words
                self._bases[name], self._steps[name] = base, []
            elif name:
                self._steps[name].append(instruction)
            else:
                self._declare(instruction.text, self._global)

    def stage(self, name: str) -> Stage:
        """Build a stage, and those it is made from."""
        if name not in self._built:
            base = self._bases[name]
            root = self._scratch / name
            stage = Stage(root, self._is_mapped)
            if base in self._bases:
                below = self.stage(base)
                link_tree(below.root, root)
                stage = replace(below, root=root, environ=dict(below.environ))
            else:
                root.mkdir()
            arguments: dict[str, str] = {}
            for step in self._steps[name]:
                self._take(step, stage, arguments)
            self._built[name] = stage
        return self._built[name]

    def _declare(self, text: str, arguments: dict[str, str]) -> None:
        name, _, default = text.partition("=")
        value = default.strip('"') or self._global.get(name, "")
        arguments[name] = self._arguments.get(name, value)

    def _take(self, step: Instruction, stage: Stage, arguments: dict[str, str]) -> None:
        match step.name:
            case "ARG":
                self._declare(step.text, arguments)
            case "ENV":
                for name, value in re.findall(r"(\w+)=(\S+)", step.text):
                    stage.environ[name] = value.replace("$PATH", stage.environ["PATH"])
            case "LABEL":
                for name, value in re.findall(r'(\S+)="([^"]*)"', step.text):
                    stage.labels[name] = re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], value)
            case "WORKDIR":
                stage.workdir = step.text
                (stage.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = step.text
            case "COPY":
                self._copy(step.words, stage)
            case "RUN":
                mounts = CACHE_MOUNT.findall(step.text)
                command = CACHE_MOUNT.sub("", step.text)
                run(stage, ["sh", "-c", command], environ=arguments, shared=mounts, user="0:0")
            case "ENTRYPOINT":
                stage.entrypoint = step.words
            case "CMD":
                stage.command = step.words
            case "HEALTHCHECK":
                stage.healthcheck = Instruction("CMD", step.text.partition("CMD ")[2]).words
            case "EXPOSE":
                pass
            case _:
                raise AssertionError(f"there is more in the Dockerfile now: {step}")

    def _copy(self, words: list[str], stage: Stage) -> None:
        ignored = self._context / ".dockerignore"
        if words[0].startswith("--from="):
            _, _, other = words.pop(0).partition("=")
            source, target = words
            place = stage.root / target.lstrip("/")
            path = self.stage(other).root / source.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            link_tree(path, place)
            return
        *sources, target = words
        place = stage.root / os.path.join(stage.workdir, target).lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = self._context / source
            assert reaches_the_builder(ignored, source), f"{source} is left out by .dockerignore"
            if path.is_dir():
                skip = shutil.ignore_patterns(*ignored_anywhere(ignored))
                shutil.copytree(path, place, dirs_exist_ok=True, ignore=skip)
            else:
                shutil.copy2(path, place)


def link_tree(source: Path, target: Path) -> None:
    """Copy a tree with its owners, and its files as links: no stage changes those of another."""
    subprocess.run(["cp", "-al", source, target], check=True)


def ignored_anywhere(path: Path) -> list[str]:
    """The patterns of names that a .dockerignore keeps out at any depth (``**/NAME``)."""
    lines = path.read_text().splitlines()
    return [line.removeprefix("**/") for line in lines if line.startswith("**/")]


def reaches_the_builder(path: Path, name: str) -> bool:
    """Tell whether a top-level file or directory gets past a .dockerignore."""
    is_ignored = False
    for line in path.read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(name, line.removeprefix("!")):
            is_ignored = not line.startswith("!")
    return not is_ignored


def run(
    stage: Stage,
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    shared: Sequence[str] = (),
    user: str = "",
    is_online: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a stage; one that fails is an error that shows what it said."""
    if stage.is_mapped:
        line, settings = map_paths(stage, command, environ or {})
    else:
        line = enter(stage, command, environ or {}, shared, user or stage.user, is_online)
        settings = {}
    done = subprocess.run(
        line,
        env=settings,
        cwd=stage.root / stage.workdir.lstrip("/") if stage.is_mapped else None,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def enter(
    stage: Stage,
    command: Sequence[str],
    environ: Mapping[str, str],
    shared: Sequence[str],
    user: str,
    is_online: bool,
) -> list[str]:
    """The command line that runs ``command`` in the stage, as the container's first process."""
    stage.root.mkdir(exist_ok=True)
    settings = {
        "root": str(stage.root),
        "python": sys.base_prefix,
        "program": os.path.basename(os.path.realpath(sys.executable)),
        "environ": {**index_settings(), **stage.environ, **environ},
        "workdir": stage.workdir,
        "user": user,
        "shared": {path: str(pip_cache()) for path in shared},
        "is_online": is_online,
        "command": list(command),
    }
    alone = ALONE if is_online else (*ALONE, "--net")
    program = shutil.which(alone[0]) or alone[0]
    return [program, *alone[1:], sys.executable, ENTER, json.dumps(settings)]


def map_paths(
    stage: Stage, command: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command and its environment with what the Dockerfile makes below the stage's root.

    What takes the rights of root (a user of one's own) is left out.
    """
    stubs = stage.root / "stubs"
    stubs.mkdir(exist_ok=True)
    base = f"{sys.base_prefix}/bin/{os.path.basename(os.path.realpath(sys.executable))}"
    for name, does in {"useradd": "true", "chown": "true", "python": f'exec {base} "$@"'}.items():
        (stubs / name).write_text(f"#!/bin/sh\n{does}\n")
        (stubs / name).chmod(0o755)

    def mapped(text: str) -> str:
        return MADE_PATH.sub(lambda match: f"{stage.root}{match[0]}", text)

    settings = {**index_settings(), **stage.environ, **environ, "HOME": str(stage.root)}
    settings["PIP_CACHE_DIR"] = str(pip_cache())
    settings["PATH"] = f"{mapped(stage.environ['PATH'])}".replace("/usr/local/bin", str(stubs), 1)
    settings["LD_LIBRARY_PATH"] = f"{sys.base_prefix}/lib"
    first, *rest = map(mapped, command)
    return [shutil.which(first, path=settings["PATH"]) or first, *rest], settings


def index_settings() -> dict[str, str]:
    """How pip finds packages here."""
    kept = ("PIP_", "SSL_CERT", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    return {name: value for name, value in os.environ.items() if name.upper().startswith(kept)}


@cache
def pip_cache() -> Path:
    """The user's pip cache, so that nothing is fetched twice."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False
    )
    path = Path(asked.stdout.strip() or "/root/.cache/pip")
    path.mkdir(parents=True, exist_ok=True)
    return path


def missing_rights(scratch: Path) -> str:
    """Why stages cannot be entered here, or ``""``."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    try:
        run(Stage(scratch / "trial"), ["true"], is_online=False)
    except AssertionError as error:
        return f"this user may not mount: {error}"
    return ""
