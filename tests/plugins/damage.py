"""Bytes changed, cut off or put in at random, for whoever reads files that were damaged."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

Change = tuple[str, float, bytes]
"""What happens, where (a share of the length), and to which bytes."""

CHANGE = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "zero"]),
    st.floats(0, 1, exclude_max=True),
    st.binary(min_size=1, max_size=40),
)


def damaged(data: bytes, what: Sequence[Change]) -> bytes:
    """Return the data after some changes."""
    for kind, place, some in what:
        at = int(place * len(data))
        if kind == "flip":
            data = data[:at] + bytes([data[at] ^ (some[0] or 1)]) + data[at + 1 :] if data else data
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + some + data[at:]
        else:
            data = data[:at] + bytes(len(some)) + data[at + len(some) :]
    return data


def state_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file of a directory."""
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in directory.iterdir()}
