"""``nsq demo``: the tool shows itself."""

from __future__ import annotations

from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.running.runtime import ExitStatus, Session, stopping


def demo(
    spark: bool = opt(
        "--spark/--no-spark",
        "End with the part that needs Spark, or leave it out.",
        show_default="with it, where the spark extra is installed",
        default=True,
    ),
    *,
    runtime: Session,
) -> int:
    """Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.

    Needs no NSQ and removes everything afterwards. Each step shows the command line that does it,
    which you can type where nsqd and nsqlookupd have their usual ports, and checks its own numbers.
    Where the spark extra is installed the archive goes through Spark at the end, which takes longer
    than all the rest.

    Examples:
        nsq demo
        nsq demo --no-spark
    """
    from nsqtools.demo.story import DemoStage, DemoStopped, Story, missing

    stage = DemoStage(runtime.environ)
    story = Story(stage, runtime.stdout)
    with stopping(stage.stop) as signals:
        try:
            with stage:
                story.run()
                if spark and (what := missing(runtime.environ)):
                    story.write(f"The part with Spark is left out. {what}\n\n")
                elif spark:
                    story.run_spark()
        except DemoStopped:
            return signals.status(otherwise=ExitStatus.FAILED)
    story.write("Everything was there. Next: nsq --help\n")
    return signals.status()
