"""What ``nsq`` can do, as pure data: ``nsq --help``, the typer tree and the documents read it.

Nothing else is imported here, so that ``nsq --help`` costs no more than starting Python. The code
of a command is named the way entry points name it, ``"package.module:function"``, and is imported
when the command is chosen. The one-line help of a command is the first line of its function's
docstring, which a test compares.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Callable


class Command:
    """One command: where its function is, what it does in a line, under which heading it is listed.

    A *raw* command gets the list of its arguments untouched and does not pass through typer:
    the daemons parse Go-style flags (``-data-path=/var/nsq``) themselves. A *hidden* one is for
    programs, and no list of commands shows it.
    """

    __slots__ = ("entry", "help", "hidden", "panel", "raw")

    def __init__(
        self,
        entry: str,
        help: str,
        *,
        panel: str = "Commands",
        raw: bool = False,
        hidden: bool = False,
    ):
        self.entry = entry
        self.help = help
        self.panel = panel
        self.raw = raw
        self.hidden = hidden

    def load(self) -> Callable[..., int | None]:
        """Import the command's module and return its function."""
        from importlib import import_module

        module, _, function = self.entry.partition(":")
        loaded: Callable[..., int | None] = getattr(import_module(module), function)
        return loaded


class Group:
    """A family of commands: ``nsq topic create``, ``nsq topic delete``."""

    __slots__ = ("commands", "examples", "help", "panel")

    def __init__(
        self,
        help: str,
        commands: dict[str, Command | Group],
        *,
        panel: str,
        examples: tuple[str, ...] = (),
    ):
        self.help = help
        self.commands = commands
        self.panel = panel
        self.examples = examples


__all__ = ["COMMANDS", "GONE", "ROOT_EXAMPLES", "ROOT_HELP", "ROOT_OPTIONS", "Command", "Group"]

ROOT_HELP = "One tool for NSQ: tail, publish, archive, replay and administer topics."

ROOT_OPTIONS = (
    ("--version", "Show the version and exit."),
    ("-h, --help", "Show this message and exit."),
)

ROOT_EXAMPLES = ("nsq tail -t clicks -n 10", "tail -f app.log | nsq pub -t events")

GONE = {
    "nsq options": "nsq config show",
    "nsq profile": "nsq config profiles, nsq config use NAME and nsq config show",
    "nsq config path": "nsq config show",
    "nsq bench compare": "nsq bench pub and sub with --json, once for each",
}
"""What to use in place of commands that there were."""

COMMANDS: dict[str, Command | Group] = {
    "tail": Command(
        "nsqtools.cli.commands.tail:tail",
        "Print the messages of one or more topics as they arrive.",
        panel="Messages",
    ),
    "pub": Command(
        "nsqtools.cli.commands.pub:pub",
        "Publish messages: texts, or the lines of standard input or of files.",
        panel="Messages",
    ),
    "peek": Command(
        "nsqtools.cli.commands.peek:peek",
        "Show some messages of a channel and requeue them.",
        panel="Messages",
    ),
    "redrive": Command(
        "nsqtools.cli.commands.redrive:redrive",
        "Publish dead letters again, to the topics that they came from.",
        panel="Messages",
    ),
    "to-nsq": Command(
        "nsqtools.cli.commands.to_nsq:to_nsq",
        "Forward topics to another nsqd or cluster, each message finished once it is there.",
        panel="Messages",
    ),
    "to-http": Command(
        "nsqtools.cli.commands.to_http:to_http",
        "Send topics to HTTP endpoints, each message finished when an endpoint has accepted it.",
        panel="Messages",
    ),
    "to-file": Command(
        "nsqtools.cli.commands.to_file:to_file",
        "Archive topics to files, each message finished once it is on disk.",
        panel="Archives",
    ),
    "stat": Command(
        "nsqtools.cli.commands.stat:stat",
        "Show depth, rates, clients and latency of topics and channels.",
        panel="Cluster",
    ),
    "archive": Group(
        "Check, repair and read archives.",
        {
            "verify": Command(
                "nsqtools.cli.commands.archive:verify", "Read archives and report what is damaged."
            ),
            "repair": Command(
                "nsqtools.cli.commands.archive:repair",
                "Finish files that a crash left, and repair damaged archives.",
            ),
            "cat": Command(
                "nsqtools.cli.commands.archive:cat",
                "Print the messages in archives of any format and compression.",
            ),
            "info": Command(
                "nsqtools.cli.commands.archive:info",
                "List archives with their messages, topics and times.",
            ),
        },
        panel="Archives",
        examples=("nsq archive info /var/nsq", "nsq archive cat /var/nsq/clicks.*.log.gz"),
    ),
    "replay": Command(
        "nsqtools.cli.commands.replay:replay",
        "Publish archived messages again, in order of time.",
        panel="Archives",
    ),
    "top": Command(
        "nsqtools.cli.commands.top:top",
        "Watch topics, channels, consumers and nsqd live, in full screen, and change them.",
        panel="Cluster",
    ),
    "web": Command(
        "nsqtools.cli.commands.web:web",
        "Show the cluster in the browser, with nsqadmin's API and /metrics of every queue.",
        panel="Cluster",
    ),
    "topic": Group(
        "List topics, and create, delete, empty or pause them.",
        {
            "list": Command(
                "nsqtools.cli.commands.topic:list_",
                "List topics, with the number of nsqd that have them and their depth.",
            ),
            "info": Command(
                "nsqtools.cli.commands.topic:info",
                "Show one topic and its channels, on every nsqd that has it.",
            ),
            "create": Command(
                "nsqtools.cli.commands.topic:create",
                "Create topics: on the nsqd given, and registered with every nsqlookupd given.",
            ),
            "delete": Command(
                "nsqtools.cli.commands.topic:delete",
                "Delete topics, with their channels and messages, everywhere.",
            ),
            "empty": Command(
                "nsqtools.cli.commands.topic:empty",
                "Discard the messages in topics; with --channels, in their channels too.",
            ),
            "pause": Command(
                "nsqtools.cli.commands.topic:pause",
                "Pause topics: messages stay in them and do not reach the channels.",
            ),
            "unpause": Command("nsqtools.cli.commands.topic:unpause", "Resume paused topics."),
        },
        panel="Cluster",
        examples=("nsq topic list", "nsq topic create clicks"),
    ),
    "channel": Group(
        "List channels, and create, delete, empty or pause them.",
        {
            "list": Command(
                "nsqtools.cli.commands.channel:list_",
                "List channels, with the number of nsqd that have them and their depth.",
            ),
            "info": Command(
                "nsqtools.cli.commands.channel:info",
                "Show one channel and its consumers, on every nsqd that has it.",
            ),
            "create": Command(
                "nsqtools.cli.commands.channel:create",
                "Create channels of a topic, on every nsqd that has it and with nsqlookupd.",
            ),
            "delete": Command(
                "nsqtools.cli.commands.channel:delete",
                "Delete channels, with their messages, everywhere.",
            ),
            "empty": Command(
                "nsqtools.cli.commands.channel:empty",
                "Discard the messages in channels, in flight and deferred too.",
            ),
            "pause": Command(
                "nsqtools.cli.commands.channel:pause",
                "Pause channels: messages stay in them and are not delivered.",
            ),
            "unpause": Command("nsqtools.cli.commands.channel:unpause", "Resume paused channels."),
        },
        panel="Cluster",
        examples=("nsq channel list clicks", "nsq channel pause clicks archive"),
    ),
    "nodes": Command(
        "nsqtools.cli.commands.nodes:nodes",
        "List every nsqd: version, topics, tombstones, and whether it answers.",
        panel="Cluster",
    ),
    "lookup": Command(
        "nsqtools.cli.commands.nodes:lookup",
        "Show which nsqd have a topic, as nsqlookupd tells consumers.",
        panel="Cluster",
    ),
    "ping": Command(
        "nsqtools.cli.commands.nodes:ping", "Check the health of every daemon.", panel="Cluster"
    ),
    "info": Command(
        "nsqtools.cli.commands.nodes:info",
        "Show version, addresses and limits of every nsqd.",
        panel="Cluster",
    ),
    "tombstone": Command(
        "nsqtools.cli.commands.nodes:tombstone",
        "Remove a topic from one nsqd: hide it from consumers, then delete it there.",
        panel="Cluster",
    ),
    "drain": Command(
        "nsqtools.cli.commands.drain:drain",
        "Move the messages that are left on one nsqd to another.",
        panel="Cluster",
    ),
    "config": Group(
        "Show settings and choose a profile; read and change options of running nsqd.",
        {
            "show": Command(
                "nsqtools.cli.commands.config:show",
                "Show the settings in force, where each comes from, and its bounds.",
            ),
            "profiles": Command(
                "nsqtools.cli.commands.config:profiles",
                "List the profiles of the configuration file, and which one is used.",
            ),
            "use": Command(
                "nsqtools.cli.commands.config:use",
                "Choose the profile that commands use when neither --profile nor NSQ_PROFILE "
                "names one.",
            ),
            "get": Command(
                "nsqtools.cli.commands.config:get", "Show one option of every running nsqd."
            ),
            "set": Command(
                "nsqtools.cli.commands.config:set_",
                "Change one option of every running nsqd, until it exits.",
            ),
        },
        panel="Settings",
        examples=("nsq config show", "nsq config use staging", "nsq config set log_level debug"),
    ),
    "spark": Group(
        "Run archives and topics through Spark.",
        {
            "ingest": Command(
                "nsqtools.cli.commands.spark_ingest:ingest",
                "Stream a topic or an archive into Parquet by topic and date, each message once.",
            ),
            "compact": Command(
                "nsqtools.cli.commands.spark_compact:compact",
                "Turn archives into Parquet by topic and date, with each message once.",
            ),
            "report": Command(
                "nsqtools.cli.commands.spark_report:report",
                "Report what went through topics: messages, bytes, sizes, attempts, duplicates and "
                "gaps.",
            ),
            "replay": Command(
                "nsqtools.cli.commands.spark_replay:replay",
                "Publish messages from archives and Parquet again, in parallel.",
            ),
            "doctor": Command(
                "nsqtools.cli.commands.spark_doctor:doctor",
                "Check Java, versions, executors, the shared directory and nsqd.",
            ),
            "sql": Command(
                "nsqtools.cli.commands.spark_sql:sql", "Query archives and Parquet in SQL."
            ),
        },
        panel="Spark",
        examples=(
            "nsq spark doctor",
            "nsq spark sql 'SELECT topic, count(*) FROM archive GROUP BY 1' /var/nsq",
        ),
    ),
    "bench": Group(
        "Measure the speed and the latency of an nsqd.",
        {
            "pub": Command(
                "nsqtools.cli.commands.bench:pub",
                "Measure how fast messages are published, each confirmed by nsqd.",
            ),
            "sub": Command(
                "nsqtools.cli.commands.bench:sub",
                "Measure how fast a backlog is consumed, each message finished.",
            ),
            "e2e": Command(
                "nsqtools.cli.commands.bench:e2e",
                "Measure how long messages take from a publisher through nsqd to a consumer.",
            ),
        },
        panel="Cluster",
        examples=("nsq bench pub --size 1KiB", "nsq bench e2e --rate 1000"),
    ),
    "demo": Command(
        "nsqtools.cli.commands.demo:demo",
        "Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.",
        panel="Servers",
    ),
    "nsqd": Command(
        "nsqtools.cli.commands.daemons:nsqd",
        "Run an nsqd in Python, with the flags, files and protocol of the real one.",
        panel="Servers",
        raw=True,
    ),
    "nsqlookupd": Command(
        "nsqtools.cli.commands.daemons:nsqlookupd",
        "Run an nsqlookupd in Python, with the flags and protocol of the real one.",
        panel="Servers",
        raw=True,
    ),
    "schema": Command(
        "nsqtools.cli.commands.schema:schema",
        "Print the JSON Schema of what a command prints with --json.",
        panel="Settings",
    ),
    "compat": Command(
        "nsqtools.cli.compat.go_programs:compat",
        "Use the names and flags of NSQ's Go utilities with this program.",
        panel="Settings",
        raw=True,
    ),
    "completion": Command(
        "nsqtools.cli.commands.completion:completion",
        "Print the completion script for bash, zsh or fish.",
        panel="Settings",
        raw=True,
    ),
    "__complete": Command(
        "nsqtools.cli.commands.complete:complete",
        "Print the names of topics, channels, nodes or profiles, one a line.",
        hidden=True,
    ),
    "__complete_line": Command(
        "nsqtools.cli.commands.complete_line:complete_line",
        "Print what can follow a command line, for the completion of shells.",
        hidden=True,
        raw=True,
    ),
}
