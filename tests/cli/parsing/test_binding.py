"""Without the private names of typer that binding.py uses, commands still work, only slower."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
from plugins.cli import CHECKOUT, NSQ
from plugins.servers import AnyNsqd
from plugins.waiting import patience_s

RENAMED = {"_runtime_param": "_converter", "type_descriptor": "kind", "_click": "_vendored"}


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Use a copy of typer whose private names are renamed consistently."""
    directory = tmp_path_factory.mktemp("renamed")
    package = directory / "typer"
    shutil.copytree(Path(typer.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc"))
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        for name, other in RENAMED.items():
            text = text.replace(name, other)
        path.write_text(text, "utf-8")
    if (package / "_click").exists():
        (package / "_click").rename(package / "_vendored")
    return os.environ | {"PYTHONPATH": f"{directory}:{CHECKOUT}"}


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("pub --help", 0, "--format FORMAT"),
        ("pub -t clicks --rate abc x", 2, "invalid value for '--rate'"),
        ("tail -t clicks --for 5q", 2, "invalid value for '--for'"),
        ("pub -topic clicks x", 2, "Did you mean --topic?"),
        ("pub -t clicks --defer 1h --nsqd-tcp-address {tcp} later", 0, "1 confirmed"),
        ("pub -t clicks --rate 1e3 --nsqd-tcp-address {tcp} one two", 0, "2 confirmed"),
        ("tail -t clicks -n 2 --create --nsqd-tcp-address {tcp}", 0, "two"),
    ],
)
def test_commands_work_with_a_typer_whose_private_names_changed(
    embedded_nsqd: AnyNsqd, environ: dict[str, str], words: str, status: int, text: str
) -> None:
    nsqd = embedded_nsqd()
    if words.startswith("tail"):
        nsqd.publish("clicks", b"one", b"two")
    command = [*NSQ, *words.format(tcp=nsqd.tcp_address).split()]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=patience_s(20)
    )
    assert done.returncode == status, done.stderr
    assert text.casefold() in (done.stdout + done.stderr).casefold()
