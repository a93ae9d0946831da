"""Handlers that are loaded by name: refusals and reloads."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.testing import fake_message
from nsqtools.work import Decoding
from nsqtools.work.handler import NamedHandler, make_handler, user_traceback

SHOP = """
from functools import partial
import json
import shop_rates

def bill(message): return shop_rates.RATE
async def bill_later(message): return 2
def both(order, customer): ...
def keywords(*, order): ...
def rows(message): yield 1
class Biller:
    def __call__(self, message): return 3
class LaterBiller:
    async def __call__(self, message): return 4
biller, later = Biller(), LaterBiller()
bill_with = partial(bill_later)
number = 7
def unknown(order: "Order"): ...
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules to the current directory, and remove them from sys.modules after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    modules = set(sys.modules)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    write("shop.py", SHOP)
    write("shop_rates.py", "RATE = 1")
    yield write
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "is_async"),
    [
        ("bill", False),
        ("biller", False),
        ("biller.__call__", False),
        ("bill_later", True),
        ("later", True),
        ("bill_with", True),
    ],
)
def test_a_function_or_callable_object_is_loaded(write: Write, name: str, is_async: bool) -> None:
    handler = NamedHandler(f"shop:{name}", None).load()
    assert (handler.is_async, handler.decode) == (is_async, None)
    if not is_async:
        assert handler.function(fake_message(b"")) in (1, 3)


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("shop", "'shop' does not name a function", "Write MODULE:FUNCTION"),
        ("shop:", "'shop:' does not name a function", "Write MODULE:FUNCTION"),
        ("./shop.py:bill", r"\./shop\.py is a file, not a module", "Write shop:bill."),
        ("shops:bill", "no module named shops", "Modules are looked for in /"),
        ("shop.no:bill", r"no module named shop\.no", "Modules are looked for in /"),
        ("shop:bil", r"there is no bil in /.*/shop\.py", "Did you mean bill?"),
        ("shop:Biller", "shop:Biller is a class", "Name a function, or an object"),
        ("shop:number", "shop:number is no function, but of type int", "Write MODULE"),
        ("shop:json", "shop:json is no function, but of type module", "Write MODULE"),
        ("shop:rows", "shop:rows is a generator", ""),
        ("shop:both", r"shop:both\(order, customer\) cannot be called with one argument", ""),
        ("shop:keywords", r"shop:keywords\(\*, order\) cannot be called with one", ""),
    ],
)
def test_an_object_that_cannot_handle_messages_is_refused(
    write: Write, name: str, text: str, hint: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{text}") as refused:
        NamedHandler(name, None).load()
    assert hint in refused.value.hint


def test_an_annotation_for_type_checkers_matters_only_if_needed(write: Write) -> None:
    assert NamedHandler("shop:unknown", None).load().decode is None
    with pytest.raises(ConfigurationError, match="annotation of shop:unknown cannot be evaluated"):
        NamedHandler("shop:unknown", Decoding.json).load()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import json\nimport no_such", r"broken.py:2: ModuleNotFoundError: No module named 'no"),
        ("def bill(:", r"broken.py:1: invalid syntax"),
        ("1 / 0", r"broken.py:1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('usage: shop')", r"broken.py:2: SystemExit: usage: shop"),
    ],
)
def test_a_failed_import_names_the_line_and_shows_only_user_code(
    write: Write, text: str, reason: str
) -> None:
    write("broken.py", text)
    with pytest.raises(ConfigurationError, match=reason) as refused:
        NamedHandler("broken:bill", None).load()
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is not None
    trace = user_traceback(refused.value.__cause__)
    assert "nsqtools" not in trace
    assert "importlib" not in trace
    assert text.splitlines()[-1] in trace


def test_a_reload_imports_only_changed_modules_of_the_directory(write: Write) -> None:
    named = NamedHandler("shop:bill", None)
    first, json = named.load(), sys.modules["json"]
    write("shop_rates.py", "RATE = 22")
    second = named.reload()
    assert (first.function(None), second.function(None)) == (1, 22)
    assert sys.modules["json"] is json


def test_a_module_that_blocks_an_import_is_reloaded(write: Write) -> None:
    write("shop_rates.py", "import sys; RATE = 1; sys.modules['absent'] = None")
    named = NamedHandler("shop:bill", None)
    named.load()
    named.watch()
    write("shop_rates.py", "RATE = 22")
    assert [named.has_changed() for _ in range(2)] == [False, True]
    assert named.reload().function(None) == 22


def test_a_built_in_function_has_no_file_to_watch() -> None:
    named = NamedHandler("builtins:print", None)
    named.load()
    named.watch()
    assert not named.has_changed()


@pytest.mark.parametrize("mistake", ["RATE = (", "import no_such", "raise SystemExit"])
def test_a_failed_reload_changes_nothing(write: Write, mistake: str) -> None:
    named = NamedHandler("shop:bill", None)
    handler = named.load()
    modules = dict(sys.modules)
    write("shop_rates.py", mistake)
    with pytest.raises(ConfigurationError):
        named.reload()
    assert dict(sys.modules) == modules
    assert handler.function(None) == 1
    write("shop_rates.py", "RATE = 333")
    assert named.reload().function(None) == 333


@pytest.fixture
def watched(write: Write) -> NamedHandler:
    named = NamedHandler("shop:bill", None)
    named.load()
    named.watch()
    return named


def test_files_next_to_the_handler_are_watched_before_their_import(
    watched: NamedHandler, write: Write
) -> None:
    write("notes.txt", "no source")
    assert [watched.has_changed() for _ in range(2)] == [False, False]
    write("shop_new.py", "(")
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]


def test_a_file_is_not_imported_during_a_write(watched: NamedHandler, write: Write) -> None:
    for piece in ("", "RATE", "RATE = 22"):
        write("shop_rates.py", piece)
        assert not watched.has_changed()
    assert watched.has_changed()
    assert watched.reload().function(None) == 22


def test_a_function_in_c_has_no_signature_to_check() -> None:
    function: Any = vars
    assert not make_handler(function, "vars", None).is_async
