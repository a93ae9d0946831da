"""``nsq demo``: the tool shows itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqtools.cli.runtime import Session

if TYPE_CHECKING:
    from nsqtools.services.demo import Step


def demo(*, runtime: Session) -> None:
    """Publish and consume a few thousand messages on an nsqd of its own.

    Needs no NSQ and leaves nothing behind. Each step shows the command line it stands for and
    checks its own numbers.

    Examples:
        nsq demo
    """
    from nsqtools.services.demo import demonstrate

    def show(step: Step) -> None:
        outcome = "\n".join(f"    {line}" for line in step.outcome.splitlines())
        runtime.stdout.write(f"{step.purpose}:\n  $ {step.command}\n{outcome}\n\n")
        runtime.stdout.flush()

    demonstrate(show)
    runtime.stdout.write("Everything was there. Next: nsq --help\n")
