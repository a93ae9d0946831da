"""A terminal whose screen can be read: pexpect runs the program, pyte shows what a person sees.

nsq_on_a_screen   ``screen = nsq_on_a_screen(["top", ...])``; then ``screen.wait_for("clicks")``;
                  ``columns=``, ``lines=`` and variables of the environment
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pexpect
import pyte
import pytest
from plugins.cli import TerminalNsq
from plugins.waiting import patience_s


class TerminalScreen:
    """A program on a terminal of some columns and lines."""

    def __init__(self, child: pexpect.spawn[bytes], columns: int, lines: int) -> None:
        self.child = child
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""  # all that was written

    @property
    def lines(self) -> list[str]:
        """The screen as it is, without the blanks at the ends."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def selected(self) -> str:
        """The last of the lines that are shown in reverse."""
        cells = self._screen.buffer
        return [line for n, line in enumerate(self.lines) if cells[n][0].reverse][-1]

    def press(self, *keys: str) -> None:
        """Type something; the program sees it as one read."""
        self.child.send("".join(keys))

    def see(self, keys: str | Sequence[str], *texts: str, gone: str = "") -> list[str]:
        """Press keys, then `wait_for`."""
        self.press(*([keys] if isinstance(keys, str) else keys))
        return self.wait_for(*texts, gone=gone)

    def wait_for(self, *texts: str, gone: str = "") -> list[str]:
        """Wait until all texts are on the screen, and ``gone`` is not; return its lines."""
        return self.wait_until(
            lambda lines: (
                all(any(text in line for line in lines) for text in texts)
                and not (gone and any(gone in line for line in lines))
            ),
            what=f"{texts} on the screen",
        )

    def wait_until(self, condition: Callable[[list[str]], bool], *, what: str) -> list[str]:
        """Wait until the condition holds for the lines of the screen; return these."""
        deadline = time.monotonic() + patience_s(15)
        while not condition(self.lines):
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time: {what}\n" + "\n".join(self.lines))
            self.go_on()
        return self.lines

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size, as dragging its corner does."""
        self._screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def wait_for_end(self) -> int | None:
        """Read until the program has ended; return its exit status."""
        while self.go_on():
            pass
        self.child.close()
        status: int | None = self.child.exitstatus
        return status

    def go_on(self) -> bool:
        """Read what it writes in a moment; whether it may write more."""
        try:
            data = self.child.read_nonblocking(65536, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True


NsqOnAScreen = Callable[..., TerminalScreen]


@pytest.fixture
def nsq_on_a_screen(nsq_on_a_terminal: TerminalNsq) -> NsqOnAScreen:
    def spawn(
        arguments: Sequence[str], *, columns: int = 80, lines: int = 24, **env: str
    ) -> TerminalScreen:
        env = {"LC_ALL": "C.UTF-8", "TERM": "xterm", **env}
        child = nsq_on_a_terminal(arguments, env, columns, lines=lines, encoding=None)
        return TerminalScreen(child, columns, lines)

    return spawn
