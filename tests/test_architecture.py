"""Imports point down only, pure code touches nothing outside, and no module outgrows its reader.

The rules are the two tables below. All imports count: those inside functions and those that only a
type checker sees, because they too are knowledge of another floor.

The checker is tried on made-up trees first: one that finds nothing looks like a clean house.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsqtools

PACKAGE = Path(nsqtools.__file__).parent

MAX_LINES = 400

# A part may import parts on lower floors, and itself: never up, never sideways.
FLOORS = {
    "errors": 0,
    "protocol": 1,
    "transport": 2,
    "client": 3,
    "server": 3,
    "records": 3,
    "services": 4,
    "settings": 4,
    "spark": 5,
    "cli": 5,
    "__main__": 6,
}

# Pure: values in, values out. What these import and call must not reach the outside world.
PURE = (
    *("protocol/", "records/", "client/backoff.py", "client/rdy.py", "client/reconnect.py"),
    "server/registrations.py",
)
IMPURE_MODULES = {
    *("socket", "ssl", "select", "selectors", "http", "httpx", "urllib.request"),
    *("threading", "subprocess", "asyncio", "time", "os", "shutil", "tempfile", "pathlib"),
    *("logging", "typer", "rich"),
}
PURE_EXCEPTIONS = {"pathlib.PurePath", "pathlib.PurePosixPath"}
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today"}

# Who may import what is heavy or belongs to one place.
ONLY_IN = {"pyspark": "services/spark", "typer": "cli/", "rich": "cli/"}


def violations(package: Path) -> list[str]:
    """One line for each place in `package` that breaks a rule."""
    return [
        f"{path.relative_to(package).as_posix()}:{line}: {complaint}"
        for path in sorted(package.rglob("*.py"))
        for line, complaint in complaints(path.relative_to(package), path.read_text("utf-8"))
    ]


def complaints(path: Path, source: str) -> Iterator[tuple[int, str]]:
    if (length := len(source.splitlines())) > MAX_LINES:
        yield length, f"more than {MAX_LINES} lines"
    name, part = path.as_posix(), path.parts[0].removesuffix(".py")
    if part not in FLOORS and part != "__init__":
        yield 1, f"{part} stands on no floor"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for imported in imported_names(node, path):
                yield from ((node.lineno, text) for text in import_complaints(name, part, imported))
        elif isinstance(node, ast.Call) and name.startswith(PURE) and called(node) in IMPURE_CALLS:
            yield node.lineno, f"pure code calls {called(node)}()"


def import_complaints(name: str, part: str, imported: str) -> Iterator[str]:
    root, _, inner = imported.partition(".")
    if root == "nsqtools":
        other = inner.partition(".")[0]
        if part in FLOORS and other in FLOORS:
            if other != part and FLOORS[other] >= FLOORS[part]:
                direction = "up" if FLOORS[other] > FLOORS[part] else "sideways"
                yield f"{part} looks {direction} at {other}"
        elif part in FLOORS and inner != "__version__":
            yield f"{part} imports {imported}, which only the outside may"
    for module, home in ONLY_IN.items():
        if root == module and not name.startswith(home):
            yield f"only {home} imports {module}"
    if name.startswith(PURE) and imported not in PURE_EXCEPTIONS:
        for module in IMPURE_MODULES:
            if f"{imported}.".startswith(f"{module}."):
                yield f"pure code imports {module}"


def imported_names(node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[str]:
    """Absolute dotted names, with what is imported *from* a module as their last part."""
    base: list[str] = []
    if isinstance(node, ast.ImportFrom):
        if node.level:
            package = ["nsqtools", *path.parts[:-1]]
            base = package[: len(package) - node.level + 1]
        if node.module:
            base.append(node.module)
    yield from (".".join([*base, alias.name]) for alias in node.names)


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


CLEAN = {
    "__init__.py": "from nsqtools.client.consumer import Consumer",
    "__main__.py": "from nsqtools.cli.main import main",
    "errors.py": "import os",
    "protocol/frames.py": "import struct\nfrom nsqtools.errors import ProtocolError",
    "records/naming.py": "from pathlib import PurePath\nfrom nsqtools.protocol import names",
    "client/consumer.py": "import socket\nfrom nsqtools import __version__\nfrom . import rdy",
    "client/rdy.py": "def share(): return min(1, 2)",
    "server/nsqd.py": "import asyncio\nfrom nsqtools.transport.tls import make_context",
    "services/tail.py": "from nsqtools.records import naming\nfrom ..client import consumer",
    "services/spark/job.py": "import pyspark.sql",
    "cli/main.py": "import typer\nfrom nsqtools import settings\nimport nsqtools.services.tail",
    "settings.py": "from nsqtools.client.options import ClientOptions",
}


def make_tree(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, "utf-8")
    return root


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    assert violations(make_tree(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("protocol/frames.py", "from nsqtools.cli.main import main", "protocol looks up at cli"),
        ("protocol/frames.py", "from .. import client", "protocol looks up at client"),
        (
            "client/x.py",
            "def f():\n    import nsqtools.server.nsqd",
            "looks sideways at server",
        ),
        ("client/x.py", "from ..records.naming import name", "looks sideways at records"),
        ("services/tail.py", "from nsqtools.settings import load", "looks sideways at settings"),
        ("client/x.py", "if TYPE_CHECKING:\n    from nsqtools.services import tail", "up at"),
        ("errors.py", "from nsqtools import Consumer", "which only the outside may"),
        ("protocol/a/b.py", "from ...transport import stream", "protocol looks up at transport"),
        ("protocol/frames.py", "import socket", "pure code imports socket"),
        ("records/naming.py", "from pathlib import Path", "pure code imports pathlib"),
        ("records/naming.py", "import os.path", "pure code imports os"),
        ("records/naming.py", "from urllib import request", "pure code imports urllib.request"),
        ("client/rdy.py", "def f():\n    from time import monotonic", "pure code imports time"),
        ("records/naming.py", "open('x')", "pure code calls open()"),
        ("records/naming.py", "datetime.now(UTC)", "pure code calls now()"),
        ("services/tail.py", "from rich.table import Table", "only cli/ imports rich"),
        ("client/x.py", "import pyspark", "only services/spark imports pyspark"),
        ("helpers.py", "", "helpers stands on no floor"),
        ("client/x.py", "\n" * (MAX_LINES + 1), "more than 400 lines"),
    ],
)
def test_an_offender_is_found_alone(tmp_path: Path, name: str, source: str, complaint: str) -> None:
    [found] = violations(make_tree(tmp_path, CLEAN | {name: source}))
    assert found.startswith(f"{name}:")
    assert complaint in found


def test_the_package_keeps_the_rules() -> None:
    assert violations(PACKAGE) == []
