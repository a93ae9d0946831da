"""Who imports whom is decided, pure code touches nothing outside, no module outgrows its reader.

The rules are the tables below. All imports count: those inside functions and those that only a type
checker sees, because they too are knowledge of another package.

The checker is tried on made-up trees first: one that finds nothing looks like a clean house.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nsqtools

PACKAGE = Path(nsqtools.__file__).parent

# Who may import whom, besides itself: the real edges, each of them wanted. An edge that nobody uses
# any more is to be taken out, which a test sees to.
_EDGES = """
errors:
settings: errors
files: errors
protocol: errors
records: errors protocol
transport: errors files protocol
http: errors protocol transport
client: errors files http protocol transport
aio: client errors
server: errors files protocol records
cluster: client errors http protocol records
publish: client errors files protocol records
tail: client
archive: client cluster errors files protocol records tail
bench: client cluster errors protocol
one_channel: client cluster errors http protocol publish records server
replay: archive errors files protocol publish records
forward: client cluster errors files http protocol publish records tail transport
spark: archive client cluster errors files protocol publish records tail transport
web: client cluster errors files http protocol records server
demo: errors server
testing: aio client errors http server
cli: archive bench client cluster demo errors files forward http one_channel protocol publish \
records replay server settings spark tail web
__main__: cli
"""
_LINES = (line.partition(":") for line in _EDGES.strip().splitlines())
EDGES = {package: set(wanted.split()) for package, _, wanted in _LINES}

# Pure: values in, values out. What these import and call must not reach the outside world. Every
# other module whose docstring says "Pure" is held to it as well.
PURE = ("protocol/", "records/")
_IMPURE = """asyncio http httpx logging os pathlib rich select selectors shutil socket ssl
subprocess tempfile textual threading time typer urllib.request"""
IMPURE_MODULES = set(_IMPURE.split())
PURE_EXCEPTIONS = {
    "pathlib.PurePath",
    "pathlib.PurePosixPath",
    "rich.cells.cell_len",  # measures text
    "rich.cells.set_cell_size",
}
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today"}

# Who may import what is heavy or belongs to one place.
ONLY_IN = {"pyspark": "spark/", "typer": "cli/", "rich": "cli/", "textual": "cli/top/app.py"}


def violations(package: Path) -> list[str]:
    """One line for each place in `package` that breaks a rule."""
    return [
        f"{path.relative_to(package).as_posix()}:{line}: {complaint}"
        for path in sorted(package.rglob("*.py"))
        for line, complaint in complaints(path.relative_to(package), path.read_text("utf-8"))
    ]


def complaints(path: Path, source: str) -> Iterator[tuple[int, str]]:
    name, part = path.as_posix(), part_of(path)
    if part not in EDGES and part != "__init__":
        yield 1, f"{part} is not in the table of edges"
    tree = parsed(source)
    is_pure = name.startswith(PURE) or says_pure(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for imported in imported_names(node, path):
                found = import_complaints(name, part, imported, is_pure=is_pure)
                yield from ((node.lineno, text) for text in found)
        elif isinstance(node, ast.Call) and is_pure and called(node) in IMPURE_CALLS:
            yield node.lineno, f"pure code calls {called(node)}()"


parsed = lru_cache(maxsize=None)(ast.parse)


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def says_pure(tree: ast.Module) -> bool:
    """Tell whether the docstring of a module, not of a package, calls it pure."""
    return bool(re.search(r"\bPure\b", ast.get_docstring(tree) or ""))


def import_complaints(name: str, part: str, imported: str, *, is_pure: bool) -> Iterator[str]:
    root, _, inner = imported.partition(".")
    if root == "nsqtools" and part in EDGES:
        other = inner.partition(".")[0]
        if other not in EDGES:
            if inner != "__version__":
                yield f"{part} imports {imported}, which only the outside may"
        elif other != part and other not in EDGES[part]:
            yield f"{part} must not import {other}"
    for module, home in ONLY_IN.items():
        if root == module and not name.startswith(home):
            yield f"only {home} imports {module}"
    if is_pure and imported not in PURE_EXCEPTIONS:
        for module in IMPURE_MODULES:
            if f"{imported}.".startswith(f"{module}."):
                yield f"pure code imports {module}"


def used_edges(package: Path) -> set[tuple[str, str]]:
    """Which parts import which."""
    used = set()
    for path in package.rglob("*.py"):
        relative = path.relative_to(package)
        for node in ast.walk(parsed(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for imported in imported_names(node, relative):
                    if imported.startswith("nsqtools."):
                        used.add((part_of(relative), imported.split(".")[1]))
    return used


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
    "client/rdy.py": '"""Shares. Pure."""\ndef share(): return min(1, 2)',
    "server/nsqd.py": "import asyncio\nfrom nsqtools.files.durable import replace_file",
    "archive/writer.py": "from nsqtools.records import naming\nfrom ..client import consumer",
    "spark/job.py": "import pyspark.sql",
    "cli/main.py": "import typer\nfrom nsqtools import settings\nimport nsqtools.tail.tail",
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
        ("protocol/frames.py", "from .. import client", "protocol must not import client"),
        ("client/x.py", "def f():\n    import nsqtools.server.nsqd", "must not import server"),
        ("client/x.py", "if TYPE_CHECKING:\n    from nsqtools.tail import tail", "import tail"),
        ("errors.py", "from nsqtools import Consumer", "which only the outside may"),
        ("protocol/a/b.py", "from ...transport import stream", "must not import transport"),
        ("protocol/frames.py", "import socket", "pure code imports socket"),
        ("records/naming.py", "import os.path", "pure code imports os"),
        ("records/naming.py", "from urllib import request", "pure code imports urllib.request"),
        ("archive/x.py", '"""Names. Pure."""\nopen("x")', "pure code calls open()"),
        ("records/naming.py", "datetime.now(UTC)", "pure code calls now()"),
        ("client/x.py", "import pyspark", "only spark/ imports pyspark"),
        ("helpers.py", "", "helpers is not in the table of edges"),
    ],
)
def test_an_offender_is_found_alone(tmp_path: Path, name: str, source: str, complaint: str) -> None:
    [found] = violations(make_tree(tmp_path, CLEAN | {name: source}))
    assert found.startswith(f"{name}:")
    assert complaint in found


def test_the_package_keeps_the_rules() -> None:
    assert violations(PACKAGE) == []


def test_the_edges_have_no_cycle() -> None:
    # raises CycleError, which names the cycle
    assert set(TopologicalSorter(EDGES).static_order()) == set(EDGES)


def test_every_edge_of_the_table_is_used() -> None:
    wanted = {(part, other) for part, others in EDGES.items() for other in others}
    assert wanted - used_edges(PACKAGE) == set()


def test_everything_the_tables_name_exists() -> None:
    listed = {*PURE, *ONLY_IN.values()}
    assert [name for name in sorted(listed) if not (PACKAGE / name).exists()] == []
    assert [
        part
        for part in sorted(EDGES)
        if not ((PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file())
    ] == []
