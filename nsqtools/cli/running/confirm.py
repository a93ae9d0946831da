"""Asking before something is done that cannot be taken back. No is the default."""

from __future__ import annotations

from nsqtools.cli.running.runtime import Runtime
from nsqtools.errors import ConfigurationError


def require_terminal(runtime: Runtime) -> None:
    """Raise `ConfigurationError` where nobody can be asked."""
    if not (runtime.stdin.isatty() and runtime.stderr_is_tty):
        raise ConfigurationError(
            "this cannot be taken back, and there is no terminal to ask on",
            hint="Give --yes to go on, or --dry-run to see what would be done.",
        )


def confirm(runtime: Runtime, question: str) -> bool:
    """Ask on the terminal; whatever is not yes is no.

    Raises `ConfigurationError` where nobody can be asked.
    """
    require_terminal(runtime)
    runtime.stderr.write(f"{question} [y/N] ")
    runtime.stderr.flush()
    return runtime.stdin.readline().strip().lower() in ("y", "yes")
