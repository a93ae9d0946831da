"""Packages import only the packages that a table allows, and pure code has no side effects.

The rules are the tables below. All imports count, also inside functions and for type checkers,
because each of them depends on another package.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import nsqtools

PACKAGE = Path(nsqtools.__file__).parent

# A package and the packages that it imports. Each edge exists and is intended.
_EDGES = """
errors:
settings: errors
files: errors
protocol: errors
records: errors protocol
transport: errors files protocol
http: errors files protocol records transport
client: errors files http protocol transport
aio: client errors protocol
server: errors files http protocol records
cluster: client errors files http protocol records
publish: client errors files protocol records
tail: client protocol
archive: client cluster errors files protocol records tail
bench: client cluster errors protocol
one_channel: client cluster errors http protocol publish records server
schedule: client errors files protocol records
celery: client cluster errors http protocol
taskiq: aio client errors protocol
replay: archive errors protocol publish records
forward: client cluster errors files http protocol records tail transport
work: aio client errors files forward http protocol records
spark: archive client cluster errors files protocol publish records settings tail transport
authd: cluster errors files http protocol records
web: authd client cluster errors files http protocol records tail
demo: errors server
testing: aio client errors http protocol server
cli: archive authd bench client cluster demo errors files forward http one_channel protocol \
publish records replay schedule server settings spark tail web work
__main__: cli
"""
_LINES = (line.partition(":") for line in _EDGES.strip().splitlines())
EDGES = {package: set(wanted.split()) for package, _, wanted in _LINES}

# Pure packages: values in, values out. Their imports and calls must not reach the outside world.
# Every other module with "Pure" in its docstring has the same rule.
PURE = ("protocol/", "records/")
_IMPURE = """asyncio http httpx logging os pathlib rich select selectors shutil socket ssl
subprocess tempfile textual threading time typer urllib.request"""
IMPURE_MODULES = set(_IMPURE.split())
PURE_EXCEPTIONS = {"pathlib.PurePath", "pathlib.PurePosixPath"}
PURE_EXCEPTIONS |= {"rich.cells.cell_len", "rich.cells.set_cell_size"}  # they measure text
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today"}

# The only place that may import a package, because it is heavy or belongs there.
ONLY_IN = {"pyspark": "spark/", "typer": "cli/", "rich": "cli/", "textual": "cli/top/app.py"}
ONLY_IN |= {"celery": "celery.py", "kombu": "celery.py", "taskiq": "taskiq.py"}

# The longest chain of imports inside a package. A longer chain reveals a module at the wrong level:
# dead letters, which need a producer, were once below the consumer.
MAX_LEVELS = {"client": 9}


@cache
def sources() -> dict[Path, ast.Module]:
    """The parsed modules; not parsed on import, because every worker imports this file."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): ast.parse(path.read_text("utf-8")) for path in paths}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of imports, including names imported *from* a module.

    ruff bans relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_pure(tree: ast.Module, path: Path) -> bool:
    """Whether a module is in a pure package, or its own docstring calls it pure."""
    says_so = re.search(r"\bPure\b", ast.get_docstring(tree) or "")
    return bool(says_so) or path.as_posix().startswith(PURE)


def impurities(tree: ast.Module) -> list[str]:
    """The imports and calls of a module that reach the outside world."""
    used = [name for name in imports(tree) if name not in PURE_EXCEPTIONS]
    impure = [name for name in used for m in IMPURE_MODULES if f"{name}.".startswith(f"{m}.")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = getattr(function, "attr", getattr(function, "id", ""))
            impure += [f"{name}()"] if name in IMPURE_CALLS else []
    return impure


def test_packages_import_exactly_the_packages_in_the_table() -> None:
    used: dict[str, set[str]] = {part: set() for part in EDGES}
    for path, tree in sources().items():
        part = path.parts[0].removesuffix(".py")
        if part != "__init__":  # it imports the public names
            named = [name.split(".")[1] for name in imports(tree) if "nsqtools." in name]
            used.setdefault(part, set()).update(set(named) - {part, "__version__"})

    assert used == EDGES
    # raises CycleError with the cycle
    assert set(TopologicalSorter(EDGES).static_order()) == set(EDGES)


def test_chains_of_imports_inside_a_package_do_not_grow() -> None:
    for package, max_levels in MAX_LEVELS.items():
        prefix = f"nsqtools.{package}."
        below = {
            f"{prefix}{path.stem}": {
                module for name in imports(tree) for module in (name, name.rpartition(".")[0])
            }
            for path, tree in sources().items()
            if path.parent.as_posix() == package and path.stem != "__init__"
        }
        levels: dict[str, int] = {}
        graph = {module: names & below.keys() for module, names in below.items()}
        for module in TopologicalSorter(graph).static_order():
            levels[module] = 1 + max((levels[name] for name in graph[module]), default=0)
        assert max(levels.values()) == max_levels, levels


def test_pure_modules_have_no_side_effects() -> None:
    pure = {path: tree for path, tree in sources().items() if is_pure(tree, path)}
    assert len(pure) > 20
    assert {path: impure for path, tree in pure.items() if (impure := impurities(tree))} == {}
    source = "import os.path\nfrom urllib import request\nopen('x')\ndatetime.now(UTC)"
    assert impurities(ast.parse(source)) == ["os.path", "urllib.request", "open()", "now()"]


def test_packages_that_belong_to_one_place_are_imported_only_there() -> None:
    places: dict[str, set[str]] = {module: set() for module in ONLY_IN}
    for path, tree in sources().items():
        for name in imports(tree):
            if (module := name.partition(".")[0]) in ONLY_IN:
                places[module].add(path.as_posix())
    for module, home in ONLY_IN.items():
        assert places[module], module
        assert all(place.startswith(home) for place in places[module]), module
