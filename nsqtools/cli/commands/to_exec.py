"""``nsq to-exec``: a command for each message, or commands that are given one after the other."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.commands.forwarding import ForwardOptions
from nsqtools.cli.options.params import ChannelName
from nsqtools.cli.options.publishing import DELIVERY
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import CLEAR_LINE
from nsqtools.cli.running.runtime import Runtime, write_whole
from nsqtools.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from nsqtools.forward.exec_sink import ExecSettings, Write

MAX_RDY = 2500  # what an nsqd allows


class CommandOptions(OptionSet):
    """How commands are run. Raises `ConfigurationError`."""

    panel = "Commands"
    arg: bool = opt("", "Put the body in place of {} in the arguments, but in no script.")
    workers: int = opt("N", "Commands side by side.", default=1, min=1, max=1000)
    batch: int = opt(
        "N", "Give up to N messages, as lines, to one command.", default=1, min=1, max=10_000
    )
    batch_wait: float = opt(
        "DURATION", "How long a message waits for others of its batch.", default="1s"
    )
    persistent: bool = opt(
        "",
        "Keep the command running: it reads JSON lines, and answers each with a line: ok, "
        "requeue [DURATION], or dead [REASON].",
    )
    command_timeout: float = opt(
        "DURATION", "End what takes longer (TERM, after 5s KILL); 0: never.", default="10m"
    )
    fatal_status: list[int] | None = opt(
        "STATUS", "Exit status that makes a dead letter at once.", DELIVERY, min=1, max=255
    )

    def check(self) -> None:
        ways = {"--arg": self.arg, "--batch": self.batch > 1, "--persistent": self.persistent}
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise ConfigurationError(f"give either {given[0]} or {given[1]}")

    def settings(self, words: list[str], channel: str) -> ExecSettings:
        """Return the settings. Raises `ConfigurationError`, and `NotFoundError` for no program."""
        from nsqtools.forward.exec_sink import ExecSettings
        from nsqtools.forward.program_text import find_program_text

        program = shutil.which(words[0])
        if program is None:
            raise NotFoundError(f"no program {words[0]}", hint="It is run without a shell.")
        if self.arg and not any("{}" in word for word in words[1:]):
            raise ConfigurationError("--arg needs {} among the arguments of the command")
        if self.arg and (text := find_program_text(words)) is not None:
            raise ConfigurationError(
                f"whoever publishes messages could run commands: {words[0]} would run the body in "
                f"place of {{}} in {text!r}",
                hint="Give it to a script as an argument, for example "
                "sh -c 'echo \"$1\"' sh {}, or without --arg on standard input.",
            )
        how = self.workers, self.batch, self.batch_wait, self.persistent, self.arg
        ends = self.command_timeout, frozenset(self.fatal_status or ())
        return ExecSettings(program, tuple(words), channel, *how, *ends)

    @property
    def max_in_flight(self) -> int:
        """Enough for the next run of each worker: what waits here, no other consumer can take."""
        each = 500 if self.persistent else 2 * self.batch
        return min(self.workers * each, MAX_RDY)


def to_exec(
    command: Annotated[list[str], Argument(metavar="COMMAND", help="The command, after --.")],
    channel: ChannelName = "nsq_to_exec",
    *,
    commands: CommandOptions,
    forwarding: ForwardOptions,
) -> int:
    """Run a command for each message, which is finished when the command ends with status 0.

    The body is on standard input; NSQ_TOPIC, NSQ_CHANNEL, NSQ_MESSAGE_ID, NSQ_TIMESTAMP (in
    nanoseconds) and NSQ_ATTEMPTS are in the environment. There is no shell; with --arg, a script
    gets the body as an argument (sh -c 'echo "$1"' sh {}), never as a part of it. Status 75
    requeues the message and slows down, any other requeues it until --max-attempts. Of a batch that
    fails, halves are run until the message to blame is alone. A message is touched while its
    command runs, and a command does not outlive this program. What a filter leaves out is finished.
    A body to which --where or --pick cannot be applied, because it is not JSON, makes a dead
    letter, or is requeued.

    The exit status is 6 when there are dead letters, and when a limit ended it while messages that
    failed were back in their queue.

    Examples:
        nsq to-exec -t clicks -c import --workers 4 -- /usr/local/bin/import-click
        nsq to-exec -t users -c mail --pick .email --arg -- sendmail-template welcome {}
        nsq to-exec -t clicks -c load --batch 1000 -- psql -c 'COPY clicks FROM STDIN'
        nsq to-exec -t orders -c bill --persistent --max-attempts 5 --dead-letter-file dead.jsonl \\
            -- python3 bill.py
    """
    from nsqtools.forward.exec_sink import ExecSink

    settings = commands.settings(command, channel)
    if settings.fatal:
        forwarding.need_letters("--fatal-status")
    usual = {"max_in_flight": commands.max_in_flight}
    way = forwarding.settings(channel, usual, batch=commands.batch)
    # for more than are in flight it would wait in vain
    settings = settings._replace(batch=min(settings.batch, way.options.max_in_flight))
    return forwarding.run(way, ExecSink(settings, printing(forwarding.runtime)))


def printing(runtime: Runtime) -> Write:
    """Write to our streams what commands print; on a terminal, harmlessly, and over the line that
    says how far it is."""
    from nsqtools.protocol.text import escape_text

    streams = {1: (runtime.stdout, "stdout"), 2: (runtime.stderr, "stderr")}

    def write(number: int, data: bytes) -> None:
        stream, name = streams[number]
        if stream.isatty():
            data = CLEAR_LINE.encode() + escape_text(data)
        write_whole(stream.fileno(), data, name)

    return write
