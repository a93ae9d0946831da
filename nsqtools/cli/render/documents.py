"""What the commands print with ``--json``, as types: ``nsq schema`` shows them as JSON Schema.

An annotation is the description of a field, or more of its schema. Numbers are never negative.
"""

from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict


class Rule(NamedTuple):
    """A keyword of JSON Schema, with its value."""

    keyword: str
    value: str | float


Time = Annotated[str, Rule("pattern", "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z$")]
Date = Annotated[str, Rule("pattern", "^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
AtLeastOne = Annotated[int, Rule("minimum", 1)]
Positive = Annotated[float, Rule("exclusiveMinimum", 0)]

Node = Annotated[str, "HTTP address of the nsqd, host:port."]
TcpAddress = Annotated[str, "TCP address of the nsqd, host:port."]
Nodes = Annotated[int, "The nsqd that have it; 0 when it is only registered with nsqlookupd."]
Depth = Annotated[int, "Messages that wait in the queue."]
InMemory = Annotated[int, "Those of them in memory."]
OnDisk = Annotated[int, "Those of them on disk."]
InFlight = Annotated[int, "Messages that consumers have and have not finished."]
Deferred = Annotated[int, "Messages that wait until their delay is over."]
Requeued = Annotated[int, "Messages requeued so far."]
TimedOut = Annotated[int, "Messages that timed out so far."]
Messages = Annotated[int, "Messages received so far."]
Clients = Annotated[int, "Connected consumers."]
Paused = Annotated[bool, "Whether the queue is paused."]
Latency = Annotated[
    dict[str, float],
    "Time from publishing to finishing in ms, by quantile, where nsqd measures it.",
]
Failure = Annotated[str | None, "What went wrong, or null."]

# topics and channels


class TopicRow(TypedDict):
    topic: str
    nodes: Nodes
    channels: int
    depth: Depth
    waiting: Annotated[int, "Messages that wait in the topic and in its channels."]
    messages: Messages
    paused: bool


class ChannelRow(TypedDict):
    topic: str
    channel: str
    nodes: Nodes
    depth: Depth
    in_flight: InFlight
    deferred: Deferred
    clients: Clients
    paused: Paused


class ConsumerDocument(TypedDict):
    client_id: str
    hostname: str
    remote_address: str
    user_agent: str
    version: str
    tls: bool
    snappy: bool
    deflate: bool
    sample_rate: int
    authed: bool
    auth_identity: str
    ready: Annotated[int, "Its RDY count."]
    in_flight: int
    messages: int
    finished: int
    requeued: int
    connect_time: Time | None


class _Counts(TypedDict):
    depth: Depth
    memory: InMemory
    disk: OnDisk
    messages: Messages
    paused: Paused
    e2e_latency_ms: Latency


class _ChannelCounts(_Counts):
    in_flight: InFlight
    deferred: Deferred
    requeued: Requeued
    timed_out: TimedOut
    clients: Clients
    consumers: list[ConsumerDocument]


class ChannelOfTopic(_ChannelCounts):
    channel: str


class TopicOnNode(_Counts):
    node: Node
    channels: list[ChannelOfTopic]


class TopicInfo(TypedDict):
    topic: str
    nodes: list[TopicOnNode]
    lookupds: Annotated[list[str], "The nsqlookupd with which it is registered."]


class ChannelOnNode(_ChannelCounts):
    node: Node


class ChannelInfo(TypedDict):
    topic: str
    channel: str
    nodes: list[ChannelOnNode]


class ChangeDocument(TypedDict):
    daemon: Literal["nsqd", "nsqlookupd"]
    address: Annotated[str, "Its HTTP address."]
    action: Literal["create", "delete", "empty", "pause", "unpause", "tombstone"]
    topic: str
    channel: str | None
    messages: Annotated[int, "Messages that are lost."]
    clients: Annotated[int, "Consumers that are connected, and may create it again."]
    consumers: list[str]
    done: NotRequired[Annotated[bool, "Not with --dry-run."]]
    error: NotRequired[Failure]


# the cluster


class NodeRow(TypedDict):
    node: Node
    nsqd: Annotated[str | None, "TCP address of the nsqd."]
    hostname: str
    version: str
    topics: Annotated[int | None, "Topics registered with nsqlookupd; null where none was asked."]
    tombstoned: Annotated[list[str], "Topics for which an nsqlookupd hides it."]
    lookupds: Annotated[list[str], "The nsqlookupd that know it."]
    error: Annotated[str | None, "Why it does not answer, or null."]


class LookupNode(TypedDict):
    nsqd: TcpAddress
    node: Node
    lookupds: list[str]


class LookupDocument(TypedDict):
    topic: str
    channels: list[str]
    nodes: list[LookupNode]


class Ping(TypedDict):
    daemon: Literal["nsqd", "nsqlookupd"]
    address: Annotated[str, "Its HTTP address."]
    latency_ms: Annotated[float | None, "How long the answer took; null without one."]
    error: Failure


class NodeInfo(TypedDict):
    node: Node
    version: str
    hostname: str
    broadcast_address: str
    tcp_port: int
    http_port: int
    start_time: Time | None


class NodeOption(TypedDict):
    node: Node
    option: str
    value: Any


class MoveDocument(TypedDict):
    topic: str
    channels: list[str]
    messages: int
    repeats: bool


class Drained(TypedDict):
    moves: list[MoveDocument]
    stays: list[str]
    moved: int
    left: int


class Queue(TypedDict):
    topic: str
    channel: Annotated[str | None, "null for the topic itself."]
    node: Annotated[str | None, "HTTP address of the nsqd; null for all nsqd together."]
    depth: Depth
    memory: InMemory
    disk: OnDisk
    in_flight: InFlight
    deferred: Deferred
    ingress: Annotated[float | None, "Messages received a second; null where that is not known."]
    egress: Annotated[
        float | None, "Messages sent to consumers a second; null where that is not known."
    ]
    finish: Annotated[float | None, "Messages finished a second; null where that is not known."]
    requeue: Annotated[
        float | None, "Messages requeued or timed out a second; null where that is not known."
    ]
    requeued: Requeued
    timed_out: TimedOut
    messages: Messages
    clients: Clients
    paused: Paused
    e2e_ms: Annotated[float | None, "The highest quantile of e2e_latency_ms."]
    e2e_latency_ms: Latency


class NodeOfSample(TypedDict):
    node: Node
    version: str
    health: str
    start_time: Time | None
    memory: NotRequired[Annotated[dict[str, int], "With --show memory."]]


class FailedNode(TypedDict):
    node: str
    error: str


class ConsumerOfChannel(ConsumerDocument):
    topic: str
    channel: str
    node: Node


class Stat(TypedDict):
    time: Time | None
    queues: list[Queue]
    nodes: list[NodeOfSample]
    failed: Annotated[list[FailedNode], "The daemons that did not answer."]
    consumers: NotRequired[Annotated[list[ConsumerOfChannel], "With --show clients."]]


# messages


class MessageDocument(TypedDict):
    topic: str
    nsqd: Annotated[str, "TCP address of the nsqd that delivered it."]
    id: Annotated[str, Rule("pattern", "^[0-9a-f]{16}$"), "Unique together with topic and nsqd."]
    ts: Annotated[int, "When it was published, in ns since 1970."]
    attempts: Annotated[int, "How often nsqd has delivered it; 0 where that is not known."]
    body: NotRequired[Annotated[str, "The body, if it is UTF-8."]]
    body64: NotRequired[Annotated[str, "The body in base64, if it is not UTF-8."]]


class _PublishCounts(TypedDict):
    confirmed: Annotated[int, "nsqd has them."]
    rejected: Annotated[int, "Above the size limit, or refused by nsqd."]
    unknown: Annotated[int, "The connection broke before the answer."]
    unsent: Annotated[int, "nsqd does not have them."]
    skipped: Annotated[int, "Empty ones, which NSQ cannot carry."]
    filtered: Annotated[int, "Not selected by --where or --pick."]


class CountsOfNode(_PublishCounts):
    nsqd: TcpAddress


class PublishedDocument(_PublishCounts):
    repeated: Annotated[int, "Published again although nsqd may have had them."]
    destinations: Annotated[
        list[CountsOfNode], "The counts of each nsqd, where every message goes to several."
    ]


class PlannedDocument(TypedDict):
    topics: Annotated[dict[str, int], "Messages by topic."]


class Forwarded(TypedDict):
    received: Annotated[int, "Messages received."]
    filtered: Annotated[int, "Left out by a filter, and finished."]
    delivered: Annotated[int, "Confirmed by the destination, and finished."]
    dead_lettered: Annotated[int, "Written to the dead letters, and finished."]
    dropped: Annotated[int, "Refused by the destination, dropped as asked, and finished."]
    requeued: Annotated[int, "Requeued, to be delivered later."]
    repeated: Annotated[int, "Sent again although the destination may have had them."]
    failures: Annotated[int, "Tries that failed."]
    bytes: Annotated[int, "Bytes of the bodies delivered."]


# archives


class ArchiveRow(TypedDict):
    file: str
    messages: int
    topics: Annotated[str, "Names, with commas between them."]
    first: Time | None
    last: Time | None
    bytes: int
    format: str
    state: str


class RepairedFile(TypedDict):
    file: str
    messages: int


class Repaired(TypedDict):
    finished: Annotated[list[str], "Files that a crash had left in progress."]
    repaired: list[RepairedFile]


class DamagedFile(TypedDict):
    file: str
    problems: list[str]


class StoredQueueRow(TypedDict):
    topic: str
    channel: Annotated[str | None, "Null for what waits in the topic itself."]
    messages: Annotated[int, "Whole messages in files, deferred ones included."]
    deferred: Annotated[int | None, "Those of them that are deferred; null where files do not say."]
    bytes: Annotated[int, "Of these messages, as in the files."]
    oldest: Time | None
    newest: Time | None
    files: int
    state: Literal["good", "damaged", "orphaned", "set aside", "read"]
    memory: Annotated[int | None, "Messages that are not in files, by --nsqd-http-address."]


class RecoveredDocument(TypedDict):
    archive: Annotated[str | None, "Null when there was nothing to recover."]
    messages: int
    damaged: list[DamagedFile]


class Verified(TypedDict):
    files: int
    messages: int
    damaged: list[DamagedFile]


class ArchivedDocument(TypedDict):
    messages: int
    bytes: Annotated[int, "As on disk."]
    files: Annotated[int, "Files finished."]
    already_written: Annotated[int, "Messages that came again and had been written."]
    failures: Annotated[int, "Writes that failed and were tried again."]
    ambiguous: Annotated[int, "Bodies in raw files that contain the delimiter."]
    on_file_failures: Annotated[int, "Times that the command of --on-file failed."]
    uploaded: NotRequired[Annotated[int, "Files uploaded or landed; only where some are."]]
    not_uploaded: NotRequired[
        Annotated[int, "Files left for the next run to upload; only where some are."]
    ]
    misfits: NotRequired[Annotated[int, "Bodies that did not fit their columns; of tables only."]]


class ConvertedDocument(TypedDict):
    archives: Annotated[int, "Archives that were brought into the table now."]
    files: Annotated[int, "Files that they became."]
    messages: int
    misfits: Annotated[int, "Bodies that did not fit their columns."]


# Spark


class PlannedPartitionDocument(TypedDict):
    topic: str | None
    date: Date | None
    state: Annotated[
        Literal["new", "late", "open", "small"],
        "What there is to do: all of it, what is new, nothing yet, or to replace small files.",
    ]
    files: int
    messages: Annotated[int, "About how many; of a file that spans days by the time it spans."]


class CompactionPlan(TypedDict):
    partitions: list[PlannedPartitionDocument]


class MadePartition(TypedDict):
    topic: str | None
    date: Date | None
    state: Literal["new", "late", "small"]
    files: Annotated[int, "Files written; none when all messages were there."]
    read: int
    duplicates: int
    rows: int
    bytes: int


class Compacted(TypedDict):
    partitions: list[MadePartition]
    deleted: list[str]
    misfits: Annotated[int, "Bodies that did not fit their columns."]


class Checked(TypedDict):
    check: str
    state: str
    found: str
    hint: str


class Ingested(TypedDict):
    rows: Annotated[int, "Messages ingested."]
    batches: Annotated[int, "Batches that ended."]
    body_bytes: Annotated[int, "Bytes of the bodies ingested."]
    misfits: Annotated[int, "Bodies that did not fit their columns."]
    rows_behind: Annotated[int, "Messages that wait in the archive or the spool."]
    damages: Annotated[int, "Places in archives that could not be read, reported in this run."]


class SparkReplayed(TypedDict):
    topics: Annotated[dict[str, int], "Messages confirmed, by topic."]
    confirmed: int
    rejected: int
    unknown: int
    dead_lettered: int
    retried: int
    repeated: int
    before: int
    seconds: float
    reasons: list[str]
    is_complete: bool


class MessagesOfTopic(TypedDict):
    topic: str
    messages: int


class FiguresDocument(TypedDict):
    topic: str | None
    messages: int
    bytes: int
    size_p50: int
    size_p95: int
    size_p99: int
    size_max: int
    attempts_p50: int | None
    attempts_p95: int | None
    attempts_max: int | None
    redeliveries: int
    duplicates: int
    nsqd: list[str]
    first: Time | None
    last: Time | None


class FiguresOfInterval(FiguresDocument):
    begin: Time | None


class GapDocument(TypedDict):
    topic: str
    begin: Time
    end: Time
    seconds: Positive


class SparkReport(TypedDict):
    sources: Annotated[list[str], Rule("minItems", 1)]
    by_s: Annotated[float, Rule("minimum", 1)]
    gap_s: Positive
    topics: list[FiguresDocument]
    intervals: list[FiguresOfInterval]
    gaps: Annotated[list[GapDocument], Rule("maxItems", 1000)]
    gaps_in_all: int


# bench


class Size(TypedDict):
    min: int
    max: int


BenchLatency = TypedDict(
    "BenchLatency",
    {
        "of": Literal["batch", "message"],
        "count": int,
        "min": float,
        "mean": float,
        "p50": float,
        "p90": float,
        "p99": float,
        "p99.9": float,
        "max": float,
    },
)


class Measured(TypedDict):
    mode: Literal["pub", "sub", "e2e"]
    nsqds: Annotated[list[str], Rule("minItems", 1)]
    topic: str
    connections: AtLeastOne
    size: Size
    batch: int
    window: int
    max_in_flight: int
    rate: Positive | None
    warm_up_s: float
    transport: list[Literal["tls", "snappy", "deflate"]]
    seconds: float
    messages: int
    bytes: int
    messages_per_s: float
    bytes_per_s: float
    latency_ms: BenchLatency | None
    published: int
    consumed: int | None
    redelivered: int
    missing: int
    repeated: int
    intact: bool
    cpu_us_per_message: float
    client_cpu: float
    machine_cpu: Annotated[float, Rule("maximum", 1)] | None
    limits: list[str]
    interrupted: bool


# settings, and what belongs to no command


class SettingDocument(TypedDict):
    setting: str
    value: str | bool | list[str] | None
    origin: Literal["default", "file", "profile", "environment", "flag"]
    place: Annotated[str, "The flag, variable or key that says so, or why it is not in force."]
    bounds: Annotated[str, "What it can be, where that is not any text."]
    help: str


class ProfileRow(TypedDict):
    profile: str
    selected: bool
    settings: Annotated[int, "How many it has."]


class SchemaRow(TypedDict):
    command: str
    schema: str
    prints: str


class Error(TypedDict):
    code: Annotated[
        Literal["failed", "usage", "not_found", "connect", "refused", "system", "bug"],
        "The kind of error.",
    ]
    message: str
    hint: Annotated[str | None, "What to do about it."]
    address: Annotated[str | None, "Whom it concerns, where it is about a daemon."]
    status: Annotated[int, "The exit status that it leads to."]


# check


class ProblemRow(TypedDict):
    severity: Literal["critical", "warning", "note"]
    kind: str
    topic: str | None
    channel: str | None
    node: Annotated[str | None, "HTTP address of the daemon."]
    text: str
    remedy: Annotated[str, "What to do about it."]
    since: Annotated[Time, "When it was seen first; with --state that may be an earlier run."]


class CheckDocument(TypedDict):
    status: Annotated[int, "The exit status.", Rule("maximum", 3)]
    problems: list[ProblemRow]
    not_judged: Annotated[list[str], "What could not be judged, and why."]
    nodes: Annotated[int, "The nsqd that answered."]
    queues: Annotated[int, "Topics and channels, each counted once."]


DOCUMENTS: dict[str, tuple[str, Any]] = {
    "topic-list": ("Topics", list[TopicRow]),
    "topic-info": ("A topic on every nsqd that has it", TopicInfo),
    "channel-list": ("Channels", list[ChannelRow]),
    "channel-info": ("A channel on every nsqd that has it", ChannelInfo),
    "changes": (
        "What was changed, step by step; with --dry-run what would be",
        list[ChangeDocument],
    ),
    "check": ("The verdict on a cluster", CheckDocument),
    "nodes": ("Every nsqd", list[NodeRow]),
    "lookup": ("The nsqd that have a topic", LookupDocument),
    "ping": ("The health of every daemon", list[Ping]),
    "info": (
        "Version, addresses and limits of every nsqd",
        Annotated[
            list[Annotated[NodeInfo, Rule("additionalProperties", True)]],
            "What an nsqd answers to /info under its own names, beside node; start_time is written "
            "as a time.",
        ],
    ),
    "node-options": ("An option of running nsqd", list[NodeOption]),
    "drain": ("What was moved from one nsqd to another", Drained),
    "stat": ("One sample of the queues; with --interval one object a line", Stat),
    "message": (
        "A message: one object a line",
        Annotated[
            MessageDocument,
            "What nsq tail, peek and archive cat print, archives hold, and nsq pub --format jsonl "
            "reads.",
        ],
    ),
    "pub": ("What became of the messages", PublishedDocument),
    "replay": (
        "What became of the messages; with --dry-run what would be published",
        PublishedDocument | PlannedDocument,
    ),
    "to-nsq": ("What became of the messages", Forwarded),
    "to-file": ("What was archived", ArchivedDocument),
    "archive-info": ("Archives", list[ArchiveRow]),
    "archive-repair": ("What was finished and repaired", Repaired),
    "archive-convert": ("What was brought into a table", ConvertedDocument),
    "archive-verify": ("What is damaged", Verified),
    "queue-list": ("The queues in a data directory", list[StoredQueueRow]),
    "queue-verify": ("What is damaged", Verified),
    "queue-recover": ("What was recovered, and what cannot be read", RecoveredDocument),
    "archive-compact": ("What a compaction did", Compacted),
    "archive-compact-plan": ("What a compaction would do (--dry-run)", CompactionPlan),
    "spark-compact": ("What a compaction did", Compacted),
    "spark-doctor": ("What was checked", list[Checked]),
    "spark-ingest": ("What a run of ingestion has taken", Ingested),
    "spark-replay": (
        "What became of the messages; with --dry-run messages by topic",
        SparkReplayed | list[MessagesOfTopic],
    ),
    "spark-report": ("What went through topics", SparkReport),
    "bench": ("The report of a measurement", Measured),
    "config-show": ("The settings in force", Annotated[list[SettingDocument], Rule("minItems", 1)]),
    "config-profiles": ("The profiles of the configuration file", list[ProfileRow]),
    "schema": ("The commands that print JSON", list[SchemaRow]),
    "error": (
        "An error: one line on stderr",
        Annotated[Error, "What a command that was asked for JSON writes to stderr for each error."],
    ),
}
"""Title and type, by the name of a command with dashes, or of what several commands print."""
