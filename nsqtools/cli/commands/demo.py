"""``nsq demo``: the tool shows itself."""

from __future__ import annotations

from nsqtools.cli.running.runtime import Session, exit_on_signals


def demo(*, runtime: Session) -> None:
    """Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.

    Needs no NSQ and removes everything afterwards. Each step shows the command line that does it,
    which you can type where nsqd and nsqlookupd have their usual ports, and checks its own numbers.

    Examples:
        nsq demo
    """
    from nsqtools.demo.story import StopRequest, Story, demo_stage

    stop_request = StopRequest()
    with (
        exit_on_signals(stop_request.on_signal),
        demo_stage(runtime.environ, stop_request) as stage,
    ):
        story = Story(stage, runtime.stdout)
        story.run()
        story.write("Everything was there. Next: nsq --help\n")
