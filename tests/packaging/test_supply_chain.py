"""What is installed can be traced: versions, hashes, and a bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
CI = CHECKOUT / ".ci"
LOCKED_EXTRAS = ("top", "server", "web", "jq", "http", "object-store")
LOCKED_EXTRAS += ("spark", "spark-java", "test")


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    """The constraints that hold for this Python: version by name."""
    here = {}
    for line in (CI / "constraints.txt").read_text().splitlines():
        if re.match(r"[\w.-]+==", line):
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate():
                here[canonicalize_name(requirement.name)] = str(requirement.specifier)[2:]
    return here


def test_every_dependency_is_locked_at_a_version_that_fits(locked: dict[str, str]) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(each for name in LOCKED_EXTRAS for each in extras[name])]

    for requirement in map(Requirement, wanted):
        if requirement.name == "nsqtools":  # extras that are made of others
            continue
        if requirement.marker is None or requirement.marker.evaluate(default_environment()):
            version = locked.get(canonicalize_name(requirement.name), "")
            assert version in requirement.specifier, f"{requirement}: run .ci/lock"


@pytest.mark.parametrize("name", ["constraints.txt", "uv.txt"])
def test_each_version_has_the_hashes_of_its_files(name: str) -> None:
    text = (CI / name).read_text().replace("\\\n", " ")

    lines = text.splitlines()
    assert lines
    assert all("--hash=sha256:" in line for line in lines)
    assert "://" not in text  # whichever index serves them


def test_one_command_prints_what_an_environment_consists_of(locked: dict[str, str]) -> None:
    document = json.loads(subprocess.check_output([sys.executable, CI / "sbom"]))

    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == "nsqtools"
    components = {each["bom-ref"]: each for each in document["components"]}
    httpx = components[f"pkg:pypi/httpx@{metadata.version('httpx')}"]
    if locked["httpx"] == metadata.version("httpx"):
        assert len(httpx["hashes"]) == 2  # a wheel and an sdist
    [ours] = [
        each for each in document["dependencies"] if each["ref"].startswith("pkg:pypi/nsqtools@")
    ]
    assert httpx["bom-ref"] in ours["dependsOn"]
    refs = {each["ref"] for each in document["dependencies"]}
    assert all(set(each["dependsOn"]) <= refs for each in document["dependencies"])
