"""The commands of ``nsq`` as pure data, for ``nsq --help``, the typer tree and the manual.

This module imports nothing, so ``nsq --help`` costs no more than starting Python. The function of
a command is named like an entry point, ``"module:function"`` in `commands`, and is imported when
the command is chosen. The one-line help of a command is the first line of the function's docstring,
which a test compares.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would triple the time of nsq --version
if TYPE_CHECKING:
    from collections.abc import Callable


class Command:
    """A command: the path of its function, its impact, and its help in a line.

    The impact is the worst that the command can do with any options: it *reads* and prints; it
    *changes* something, for example publishes or consumes messages or writes files; or it
    *destroys* messages, topics, channels or files, which cannot be undone.

    A *raw* command gets its arguments as a list, without typer: the daemons parse Go-style flags
    (``-data-path=/var/nsq``) themselves.
    """

    def __init__(self, entry: str, help: str, *, impact: str = "changes", raw: bool = False):
        self.entry = entry
        self.impact = impact
        self.help = help
        self.raw = raw

    def load(self) -> Callable[..., int | None]:
        """Import the command's module and return its function."""
        from importlib import import_module

        module, _, name = self.entry.partition(":")
        function: Callable[..., int | None] = getattr(
            import_module(f"nsqtools.cli.commands.{module}"), name
        )
        return function


class Group:
    """A group of commands: ``nsq topic create``, ``nsq topic delete``."""

    def __init__(self, help: str, commands: dict[str, Command | Group]):
        self.help = help
        self.commands = commands
        self.examples: list[str] = []


ROOT_HELP = "One tool for NSQ: tail, publish, archive, replay and administer topics."

ROOT_OPTIONS = (
    ("--version", "Show the version and exit."),
    ("-h, --help", "Show this message and exit."),
    ("--help-llm", "Describe all commands, with their impact, in one Markdown document."),
)

ROOT_EXAMPLES = ("nsq tail -t clicks -n 10", "tail -f app.log | nsq pub -t events")

# Replacements of removed commands and options, for the error message.
REMOVED = {
    **dict.fromkeys(("nsq options", "nsq config path"), "nsq config show"),
    "nsq profile": "nsq config profiles, nsq config use NAME and nsq config show",
    "nsq config show --origin": "nsq config show, which has the origins",
    "nsq bench compare": "nsq bench pub and sub with --json, once for each",
    **dict.fromkeys(
        ("nsq bench pub --embedded", "nsq bench sub --embedded"), "nsq nsqd in another terminal"
    ),
    **dict.fromkeys(("nsq bench pub --html", "nsq bench sub --html"), "--json"),
    "nsq demo --spark": "nsq spark compact and report",
    "nsq demo --no-spark": "nsq demo",
    "nsq drain --allow-repeats": "nsq drain without --to, which moves each channel by itself",
    "nsq web --history": "Prometheus, for more than 6 hours: nsq web --print dashboard",
    "nsq peek --decode": "--format '{body:hex}\\n' or '{body:base64}\\n'",
    "nsq tail --decode": "--format '{body:hex}\\n' or '{body:base64}\\n'",
    "nsq spark compact --work-dir": "--output alone, which also contains unfinished files",
    "nsq spark report --html": "--json, or a notebook: nsq-lake(7) and nsq spark sql",
    "nsq spark doctor --shared-dir": "nsq spark compact, which names what it cannot write",
    "nsq spark doctor --nsqd-tcp-address": "nsq ping",
    "nsq spark doctor --nsqd-http-address": "nsq ping",
    "nsq spark doctor --lookupd-http-address": "nsq ping",
    "nsq stat --csv": "-o csv",
    "nsq stat --max-depth": "nsq check --max-depth",
    **dict.fromkeys(("nsq stat --max-requeue-rate", "nsq stat --min-clients"), "nsq check"),
    "nsq stat --prometheus": "/metrics of nsq web",
}

# Commands whose failures have a fixed status instead of `ExitStatus`. For monitoring plugins, 3 is
# "unknown".
FAILURE_STATUS = {"check": 3}

# Commands whose -o is a place for output. -o json asks other commands for JSON.
OUTPUT_PLACES = (
    "archive compact",
    "archive convert",
    "queue recover",
    "spark compact",
    "spark ingest",
)

# A heading, and below it a line for each command: name, entry, impact, ``raw``, help. A group has no entry,
# and below it its commands and examples (``$``).
TABLE = """\
Messages
  tail tail:tail changes Print the messages of one or more topics as they arrive.
  pub pub:pub changes Publish messages: texts, or the lines of standard input or of files.
  peek tail:peek changes Show some messages of a channel and requeue them.
  redrive replay:redrive changes Publish dead letters again, to the topics that they came from.
  to-nsq forwarding:to_nsq changes Forward topics to another nsqd or cluster, finishing each message after it is confirmed.
  to-http forwarding:to_http changes Send topics to HTTP endpoints, finishing each message when one has accepted it.
  to-exec forwarding:to_exec changes Run a command for each message, finishing the message if the command exits with status 0.
  work work:work changes Call a Python function with each message, finishing the message when it returns.
  schedule Publish messages later: serve requests, and show and cancel entries.
    serve schedule:serve changes Publish messages when they are due: nsq pub --at, --in, --every and --cron.
    list schedule:list_ reads List the entries of a scheduler on this host, the earliest first.
    show schedule:show reads Show an entry with its body, as JSON.
    cancel schedule:cancel destroys Ask the scheduler to forget an entry: a message that is not published yet.
    $ nsq schedule serve --data-path /var/lib/nsq-schedule
    $ nsq schedule cancel order-42
Archives
  to-file to_file:to_file changes Archive topics to files, each message finished after it is on disk.
  archive Check, repair and read archives.
    verify archive:verify reads Read archives and report damage.
    repair archive:repair changes Finish files that a crash left, and repair damaged archives.
    cat archive:cat reads Print the messages in archives of any format and compression.
    convert archive:convert changes Convert archives to a table.
    schema archive:schema reads Print the columns of JSON bodies as a JSON Schema.
    info archive:info reads List archives with their messages, topics and times.
    compact compact:archive_compact destroys Turn archives and tables into few Parquet files by topic and date, each message once.
    vacuum vacuum:vacuum destroys Remove old days, replaced files and old log entries of tables.
    erase erase:erase destroys Erase messages from archives and tables, and verify that they are gone.
    $ nsq archive info /var/nsq
    $ nsq archive cat /var/nsq/clicks.*.log.gz
  replay replay:replay changes Publish archived messages again, in order of time.
  queue Read the data directory of an nsqd, running or dead, and leave it as it is.
    list queue:list_ reads List the queues in a data directory, and their state.
    cat queue:cat reads Print the messages that wait in a queue.
    verify queue:verify reads Read every message and report what is damaged.
    recover queue:recover changes Bring the messages of damaged and orphaned files into an archive.
    $ nsq queue list /var/lib/nsqd
    $ nsq queue recover /var/lib/nsqd -o recovered.log.gz
Cluster
  stat stat:stat reads Show depth, rates, clients and latency of topics and channels.
  top top:top destroys Watch topics, channels, consumers and nsqd live, in full screen, and change them.
  web web:web destroys Show the cluster in the browser, with nsqadmin's API and /metrics of every queue.
  check check:check reads Diagnose a cluster: name its problems, and a remedy for each.
  topic List topics, and create, delete, empty or pause them.
    list topic:list_ reads List topics, with the number of nsqd that have them and their depth.
    info topic:info reads Show one topic and its channels, on every nsqd that has it.
    create topic:create changes Create topics: on the nsqd given, and registered with every nsqlookupd given.
    delete topic:delete destroys Delete topics, with their channels and messages, everywhere.
    empty topic:empty destroys Discard the messages in topics; with --channels, in their channels too.
    pause topic:pause changes Pause topics: messages stay in them and do not reach the channels.
    unpause topic:unpause changes Resume paused topics.
    $ nsq topic list
    $ nsq topic create clicks
  channel List channels, and create, delete, empty or pause them.
    list channel:list_ reads List channels, with the number of nsqd that have them and their depth.
    info channel:info reads Show one channel and its consumers, on every nsqd that has it.
    create channel:create changes Create channels of a topic, on every nsqd that has it and with nsqlookupd.
    delete channel:delete destroys Delete channels, with their messages, everywhere.
    empty channel:empty destroys Discard the messages in channels, in flight and deferred too.
    pause channel:pause changes Pause channels: messages stay in them and are not delivered.
    unpause channel:unpause changes Resume paused channels.
    $ nsq channel list clicks
    $ nsq channel pause clicks archive
  topology Export the topics and channels of a cluster, and create missing ones.
    export topology:export reads Print the topics and channels of a cluster, and their pauses, as TOML.
    plan topology:plan reads Show what each nsqd and nsqlookupd lacks of a topology.
    apply topology:apply destroys Create the missing topics and channels of a topology, and pause and unpause as it does.
    $ nsq topology export > topology.toml
    $ nsq topology plan topology.toml
  nodes nodes:nodes reads List every nsqd: version, topics, tombstones, and whether it answers.
  ping nodes:ping reads Check the health of every daemon.
  tombstone nodes:tombstone destroys Remove a topic from one nsqd: hide it from consumers, then delete it there.
  drain nodes:drain changes Move the remaining messages of an nsqd to another one, or to their consumers.
  bench Measure the speed and the latency of an nsqd.
    pub bench:pub changes Measure how fast messages are published, each confirmed by nsqd.
    sub bench:sub changes Measure how fast a backlog is consumed, each message finished.
    e2e bench:e2e changes Measure how long messages take from a publisher through nsqd to a consumer.
    $ nsq bench pub --size 1KiB
    $ nsq bench e2e --rate 1000
Settings
  config Show settings and choose a profile; read and change options of running nsqd.
    show config:show reads Show the effective settings, their origins, and their bounds.
    profiles config:profiles reads List the profiles of the configuration file, and which one is used.
    use config:use changes Choose the profile that commands use without --profile and NSQ_PROFILE.
    get config:get reads Show one option of every running nsqd.
    set config:set_ changes Change one option of every running nsqd, until it exits.
    $ nsq config show
    $ nsq config use staging
    $ nsq config set log_level debug
  mcp mcp:mcp destroys Serve commands to assistants, as tools of the Model Context Protocol.
  schema schema:schema reads Print the JSON Schema of what a command prints with --json.
  compat shells:compat changes Use the names and flags of NSQ's Go utilities with this program.
  completion shells:completion reads Print the completion script for bash, zsh or fish.
Spark
  spark Run archives and topics through Spark.
    ingest spark_ingest:ingest changes Stream topics or an archive into Parquet by topic and date, each message once.
    compact compact:spark_compact destroys Do what nsq archive compact does, in the tasks of Spark.
    report spark_queries:report reads Report on topics: messages, bytes, sizes, attempts, duplicates and gaps.
    replay spark_replay:replay changes Publish messages from archives and Parquet again, in parallel.
    doctor spark_queries:doctor reads Check Java, the versions of packages, a session of Spark and its executors.
    sql spark_queries:sql destroys Query archives and Parquet in SQL.
    $ nsq spark doctor
    $ nsq spark sql 'SELECT topic, count(*) FROM archive GROUP BY 1' /var/nsq
Servers
  authd Run the auth server of nsqd, and keep its users.
    serve authd:serve changes Answer nsqd which topics and channels a client may use.
    hash authd:hash_ reads Make a random token, or hash a secret that a person chose.
    check authd:check reads Check a users file, and explain what a user may do.
    convert authd:convert reads Convert permissions.csv of pynsqauthd to a users file.
    $ nsq authd serve --users users.toml
    $ nsq authd hash --new bob --token-file bob.token >> users.toml
  demo daemons:demo changes Publish, tail, archive and replay a few thousand clicks on an nsqd of its own.
  nsqd daemons:nsqd changes raw Run an nsqd in Python, with the flags, files and protocol of the real one.
  nsqlookupd daemons:nsqlookupd changes raw Run an nsqlookupd in Python, with the flags and protocol of the real one.
Deprecated
  lookup nodes:lookup reads Show which nsqd have a topic, according to nsqlookupd.
  info nodes:info reads Show version, addresses and limits of every nsqd.
"""


def _panels(table: str) -> dict[str, dict[str, Command | Group]]:
    panels: dict[str, dict[str, Command | Group]] = {}
    group = Group("", {})
    for line in table.splitlines():
        text = line.lstrip()
        name, _, definition = text.partition(" ")
        entry, _, help = definition.partition(" ")
        if text == line:
            commands = panels[text] = {}
        elif name == "$":
            group.examples.append(definition)
        elif ":" not in entry:
            group = commands[name] = Group(definition, {})
        else:
            impact, _, help = help.partition(" ")
            is_raw, help = help.startswith("raw "), help.removeprefix("raw ")
            parent = group.commands if line.startswith("    ") else commands
            parent[name] = Command(entry, help, impact=impact, raw=is_raw)
    return panels


# Commands by the heading under which they are listed.
PANELS = _panels(TABLE)

# All commands, including the deprecated ones.
COMMANDS = {name: entry for commands in PANELS.values() for name, entry in commands.items()}

# Commands that work until 0.5, but that help, completions and manual pages no longer list.
DEPRECATED = PANELS.pop("Deprecated")

LISTED = {name: entry for name, entry in COMMANDS.items() if name not in DEPRECATED}
