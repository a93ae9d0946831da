"""--where and --pick: programs of jq over bodies, with every digit of a number kept."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nsqtools.errors import ConfigurationError
from nsqtools.records.filters import compile_pick, compile_where


@pytest.mark.parametrize(
    ("program", "body", "is_wanted"),
    [
        (".status >= 500", b'{"status": 503}', True),
        (".status >= 500", b'{"status": 200}', False),
        (".status >= 500 # only errors", b'{"status": 503}', True),
        ("select(.a)", b'{"a": 1}', True),
        ("select(.a)", b'{"b": 1}', False),
        (".tags[] == 3", b'{"tags": [1, 3]}', True),
        ("{a: .b}", b"{}", True),
        (".a", b'{"a": 0}', True),
        (".a", b'{"a": null}', False),
        (".a.b", b"[1]", False),
        (".a", b"no JSON", False),
        (".a", b"\xff", False),
        (".a", b"", False),
    ],
)
def test_where_wants_what_any_result_is_true_for(
    program: str, body: bytes, is_wanted: bool
) -> None:
    assert compile_where(program)(body) is is_wanted


@pytest.mark.parametrize(
    ("program", "picked"),
    [
        (".name", b"caf\xc3\xa9"),
        (".id", b"12345678901234567890"),
        ("{id, price}", b'{"id":12345678901234567890,"price":1.10}'),
        (".tags[]", b"a\nb"),
        (".nothing", b"null"),
        ("empty", None),
        ("def f: .name; f # of the user", b"caf\xc3\xa9"),
    ],
)
def test_pick_gives_text_as_it_is_and_the_rest_as_compact_json(
    program: str, picked: bytes | None
) -> None:
    body = '{"name": "café", "id": 12345678901234567890, "price": 1.10, "tags": ["a", "b"]}'
    assert compile_pick(program)(body.encode()) == picked


@pytest.mark.parametrize("body", [b"no JSON", b"\xff", b"[1]", b'"\\ud800"'])
def test_pick_says_that_it_cannot(body: bytes) -> None:
    with pytest.raises(ValueError):
        compile_pick(".a.b")(body)


@pytest.mark.parametrize("compile", [compile_where, compile_pick])
@pytest.mark.parametrize("program", [".a[", ") | (", "nonsense"])
def test_a_wrong_program_is_refused_in_a_line(compile: object, program: str) -> None:
    assert callable(compile)
    with pytest.raises(ConfigurationError, match="is not a program of jq: ") as refused:
        compile(program)
    assert "\n" not in str(refused.value)


def test_jq_is_imported_only_for_a_program() -> None:
    modules = "nsqtools.records.filters, nsqtools.records.template"
    code = f"import sys, {modules}; print('jq' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"False\n"
