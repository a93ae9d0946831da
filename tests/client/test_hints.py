"""Hints are for programs, too: what the client says names its options before nsq's flags."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import nsqtools

PACKAGE = Path(nsqtools.__file__).parent
FLAG = re.compile(r"--(tls-ca-file|auth-secret-file|tls|nsqd-tcp-address|allow-announced)(?![\w-])")


@pytest.mark.parametrize("part", ["aio", "client", "http", "protocol", "transport"])
def test_a_flag_of_nsq_is_named_as_such(part: str) -> None:
    texts = [
        node.value
        for path in (PACKAGE / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert texts
    wrong = [text for text in texts if FLAG.search(text) and "(nsq: " not in text]
    assert wrong == []
