"""``nsq demo``: the tool shows itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from nsqtools.cli.exit_status import ExitStatus
from nsqtools.cli.runtime import Session
from nsqtools.cli.signals import stopping

if TYPE_CHECKING:
    from nsqtools.services.demo.story import Step

WithSpark = Annotated[
    bool, Option("--spark/--no-spark", help="Run the part that needs Spark, where there is one.")
]


def demo(spark: WithSpark = True, *, runtime: Session) -> int:
    """Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.

    Needs no NSQ and leaves nothing behind. Each step shows the command line it stands for, which
    you can type where nsqd and nsqlookupd have their usual ports, and checks its own numbers. Where
    the spark extra is installed, the archive goes through Spark at the end.

    Examples:
        nsq demo
        nsq demo --no-spark
    """
    from nsqtools.services.demo.stage import DemoStopped, Stage
    from nsqtools.services.demo.story import Story

    def show(step: Step) -> None:
        commands = "".join(f"  $ {command}\n" for command in step.commands)
        outcome = "".join(f"    {line}".rstrip() + "\n" for line in step.outcome.splitlines())
        runtime.stdout.write(f"{step.purpose}:\n{commands}{outcome}\n")
        runtime.stdout.flush()

    stage = Stage(runtime.environ)
    with stopping(stage.stop) as signals:
        try:
            with stage:
                Story(stage, show).run()
        except DemoStopped:
            return signals.status(otherwise=ExitStatus.FAILED)
    runtime.stdout.write("Everything was there. Next: nsq --help\n")
    return signals.status()
