"""``nsq to-exec``: one command per message or batch, or commands that keep running."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from nsqtools.cli.options.params import ChannelName
from nsqtools.cli.options.publishing import DELIVERY
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import CLEAR_LINE
from nsqtools.cli.running.forward_options import ForwardOptions
from nsqtools.cli.running.runtime import Runtime, write_whole
from nsqtools.errors import ConfigurationError, NotFoundError

if TYPE_CHECKING:
    from nsqtools.forward.exec_sink import ExecSettings, Write

MAX_RDY = 2500  # nsqd's default of -max-rdy-count


class CommandOptions(OptionSet):
    """Options of commands. Raises `ConfigurationError` if they contradict each other."""

    panel = "Commands"
    arg: bool = opt("", "Replace {} in the arguments with the body, except in scripts.")
    workers: int = opt("N", "Concurrent commands.", default=1, min=1, max=1000)
    batch: int = opt(
        "N", "Give up to N messages, as lines, to one command.", default=1, min=1, max=10_000
    )
    batch_wait: float = opt(
        "DURATION", "Longest wait of a message for its batch to fill.", default="1s"
    )
    persistent: bool = opt(
        "",
        "Keep the command running: it reads JSON lines, and answers each with a line: ok, "
        "requeue [DURATION], or dead [REASON].",
    )
    command_timeout: float = opt(
        "DURATION", "Timeout of a command (TERM, KILL after 5s); 0: none.", default="10m"
    )
    fatal_status: list[int] | None = opt(
        "STATUS", "Exit status that makes a dead letter.", DELIVERY, min=1, max=255
    )

    def check(self) -> None:
        modes = {"--arg": self.arg, "--batch": self.batch > 1, "--persistent": self.persistent}
        names = [name for name, is_set in modes.items() if is_set]
        if len(names) > 1:
            raise ConfigurationError(f"give either {names[0]} or {names[1]}")

    def settings(self, words: list[str], channel: str) -> ExecSettings:
        """Return the settings. Raises `ConfigurationError`, and `NotFoundError` for no program."""
        from nsqtools.forward.exec_sink import ExecSettings
        from nsqtools.forward.program_text import find_program_text

        program = shutil.which(words[0])
        if program is None:
            raise NotFoundError(f"no program {words[0]}", hint="Commands run without a shell.")
        if self.arg and not any("{}" in word for word in words[1:]):
            raise ConfigurationError("--arg needs {} among the arguments of the command")
        if self.arg and (text := find_program_text(words)) is not None:
            raise ConfigurationError(
                f"publishers could run commands: {words[0]} would run the body in place of {{}} in "
                f"{text!r}",
                hint="Give it to a script as an argument, for example "
                "sh -c 'echo \"$1\"' sh {}, or without --arg on standard input.",
            )
        return ExecSettings(
            program,
            tuple(words),
            channel,
            workers=self.workers,
            batch=self.batch,
            batch_wait_s=self.batch_wait,
            is_persistent=self.persistent,
            takes_argument=self.arg,
            timeout_s=self.command_timeout,
            fatal=frozenset(self.fatal_status or ()),
        )

    @property
    def max_in_flight(self) -> int:
        """Enough for the current and the next run of each worker.

        More would keep messages from other consumers. A persistent command answers a few hundred
        messages per round trip of nsqd.
        """
        return min(self.workers * (500 if self.persistent else 2 * self.batch), MAX_RDY)


def to_exec(
    command: Annotated[list[str], Argument(metavar="COMMAND", help="The command, after --.")],
    channel: ChannelName = "nsq_to_exec",
    *,
    commands: CommandOptions,
    forwarding: ForwardOptions,
) -> int:
    """Run a command for each message, finishing the message if the command exits with status 0.

    The body is on standard input; NSQ_TOPIC, NSQ_CHANNEL, NSQ_MESSAGE_ID, NSQ_TIMESTAMP (in
    nanoseconds) and NSQ_ATTEMPTS are in the environment. There is no shell; with --arg, a script
    gets the body as an argument (sh -c 'echo "$1"' sh {}), never as a part of it. A body that
    begins with - may be an option of the command unless -- precedes {}. Status 75 requeues the
    message and slows down, any other requeues it until --max-attempts. If a batch fails, it is run
    again in halves until the bad message is alone. A message is touched while its command runs, and
    no command outlives this program. Filtered messages are finished. A body that is not JSON where
    --where or --pick needs JSON becomes a dead letter, or is requeued.

    The exit status is 6 if there are dead letters, or if a limit ended the run while failed
    messages were back in their queue.

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
        forwarding.dead_letters.require("--fatal-status")
    forward_settings = forwarding.settings(
        channel, batch=commands.batch, max_in_flight=commands.max_in_flight
    )
    # A batch larger than max_in_flight would never be complete.
    batch = min(settings.batch, forward_settings.options.max_in_flight)
    sink = ExecSink(settings._replace(batch=batch), output_writer(forwarding.runtime))
    return forwarding.run(forward_settings, sink)


def output_writer(runtime: Runtime) -> Write:
    """Return the writer of command output to our streams.

    On a terminal it escapes control characters and clears the progress line first.
    """
    from nsqtools.protocol.text import escape_text

    streams = {1: (runtime.stdout, "stdout"), 2: (runtime.stderr, "stderr")}

    def write(number: int, data: bytes) -> None:
        stream, name = streams[number]
        if stream.isatty():
            data = CLEAR_LINE.encode() + escape_text(data)
        write_whole(stream.fileno(), data, name)

    return write
