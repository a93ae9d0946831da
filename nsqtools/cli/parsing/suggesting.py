"""What a mistyped name was meant to be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

AS_CLOSE = 0.05


def closest(word: str, names: Sequence[str]) -> list[str]:
    """Of ``names`` that are somewhat like ``word`` the one most like it, and what is as close."""
    likeness = {name: SequenceMatcher(None, word, name).ratio() for name in names}
    most = max(likeness.values(), default=0.0)
    return sorted(name for name, value in likeness.items() if value >= most - AS_CLOSE)
