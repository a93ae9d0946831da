"""Options of the commands that publish: destination, rate, and retries.

With ``--channel`` a command publishes to one channel, by a temporary nsqd (`ChannelOptions`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Context

from nsqtools.cli.options.connection import (
    ProducerConnection,
    refuse_flags,
    setting_of,
    split_addresses,
)
from nsqtools.cli.parsing.binding import OptionSet, opt
from nsqtools.cli.render.outcomes import Progress
from nsqtools.cli.running.runtime import (
    CommandSignals,
    ExitStatus,
    Runtime,
    hangup_signals,
    stop_on_signals,
)
from nsqtools.client.connection_settings import PublishMode
from nsqtools.errors import ConfigurationError, NsqError, OutputError
from nsqtools.protocol.option_names import ENV
from nsqtools.protocol.text import counted, format_duration
from nsqtools.records.units import argument_bytes

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions
    from nsqtools.one_channel.channel_publisher import ChannelPublisher
    from nsqtools.publish.input import InputBatch, RecordSource
    from nsqtools.publish.publish_job import UnsentFiles
    from nsqtools.publish.publisher import Publisher
    from nsqtools.records.filters import Filter

DELIVERY = "Delivery"

Rate = Annotated[
    float, opt("--rate N", "At most N messages a second; 0 for no limit.", DELIVERY, min=0)
]
ModeOption = Annotated[
    PublishMode,
    opt("--mode", "Publish to all nsqd, a share to each, or the first that works.", DELIVERY),
]
RetryTimeout = Annotated[
    float | None,
    opt(
        "--retry-timeout DURATION",
        "How long to retry when nsqd cannot be reached; 0s: do not retry.",
        DELIVERY,
        show_default="1m",
    ),
]
RetryUnknown = Annotated[
    bool, opt("--retry-unknown", "Publish again what nsqd may have: it can arrive twice.", DELIVERY)
]


PROGRESS_HELP = "Record here what is confirmed, and continue from there the next time."
CheckpointFile = Annotated[Path | None, opt("--checkpoint FILE", PROGRESS_HELP, DELIVERY)]
TopicMap = Annotated[
    list[str] | None,
    opt("--topic -t [OLD=]NEW", "Where to publish, if not to the topic that a message came from."),
]
PublishDryRun = Annotated[
    bool, opt("--dry-run", "Publish nothing; print how many messages would go to which topic.")
]


class Publishing(OptionSet):
    """Destination, rate and retries of publishing, and the file of unconfirmed records."""

    rate: Rate = 0.0
    mode: ModeOption = PublishMode.ALL
    retry_timeout: RetryTimeout = None
    retry_unknown: RetryUnknown = False
    unsent_file: Path | None = opt(
        "FILE", "Append what is not confirmed (--mode all: FILE.HOST:PORT).", DELIVERY
    )
    connection: ProducerConnection
    channel: ChannelDelivery

    def publisher(self, defer_s: float | None = None) -> Publisher:
        """Return the publisher to the nsqd of the options, without ``--channel``."""
        from nsqtools.publish.publisher import RETRY_TIMEOUT_S, Publisher, PublishOptions

        options = PublishOptions(
            mode=self.mode,
            retry_timeout_s=RETRY_TIMEOUT_S if self.retry_timeout is None else self.retry_timeout,
            retry_unknown=self.retry_unknown,
            defer_s=defer_s,
        )
        connection = self.connection
        return Publisher(
            connection.nsqd_tcp_addresses, connection.client_options(), options, self.rate
        )

    @contextmanager
    def open(
        self,
        runtime: Runtime,
        delimiter: bytes,
        *,
        resumes: bool = True,
        defer_s: float | None = None,
        dry_run: bool = False,
        inputs: Iterable[str] = (),
    ) -> Iterator[PublishRun]:
        """Open the publisher, and the files of unconfirmed records.

        ``delimiter`` ends each record in those files; ``inputs`` are the files of records.
        ``resumes`` means that the next run would publish the same messages from the beginning.
        Raises as `ChannelOptions.open` and `UnsentFiles`.
        """
        from nsqtools.publish.publish_job import UnsentFiles

        publisher = self.publisher(defer_s)
        with ExitStack() as stack:
            progress, unsent = stack.enter_context(Progress(runtime)), None
            if self.unsent_file is not None and not dry_run:
                # Messages for one channel are for no nsqd of the settings.
                addresses = () if self.channel.name else publisher.counts_by_nsqd
                files = UnsentFiles(self.unsent_file, delimiter, addresses, inputs=inputs)
                unsent = stack.enter_context(files)
            if self.channel.name and not dry_run:
                target = self.channel.open(
                    publisher.client_options,
                    runtime,
                    resumes=resumes,
                    defer_s=defer_s,
                    rate=self.rate,
                )
                publisher = stack.enter_context(target)
            yield PublishRun(publisher, unsent, progress, runtime, runtime.monotonic())


class PublishRun(NamedTuple):
    """The publisher of a run, the files of unconfirmed records, and the progress line."""

    publisher: Publisher
    unsent: UnsentFiles | None
    progress: Progress
    runtime: Runtime
    began_s: float

    def progress_text(self, done: int, total: int, read: str) -> str:
        """Return the progress line: the count, and the share that is read if the total is known."""
        confirmed = f"{self.publisher.counts.confirmed:,} confirmed"
        if not (done and total):
            return confirmed
        left_s = (self.runtime.monotonic() - self.began_s) * max(0, total - done) / done
        return f"{confirmed}, {read} read, {format_duration(round(left_s))} left"

    def finish(self, publish: Callable[[], object]) -> CommandSignals:
        """Call ``publish``, and with a temporary nsqd wait until the messages are consumed."""
        with stop_on_signals(self.publisher.stop, additional=hangup_signals()) as signals:
            try:
                publish()
                show = self.progress.show
                self.publisher.wait_until_consumed(
                    lambda count: show(lambda: f"{count:,} consumed")
                )
            except NsqError:
                if any(astuple(self.publisher.counts)):
                    self.progress.tell(self.publisher.counts.summary())
                raise
        return signals


def topic_map(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NEW`` and ``OLD=NEW``. Raises `ConfigurationError`."""
    topics = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not new or old in topics:
            raise ConfigurationError(
                f"invalid --topic {text!r}", hint="Write NEW once, or OLD=NEW for each topic."
            )
        topics[old] = new
    return topics


class PublishInput(NamedTuple):
    """Files, or texts to publish. Texts that are repeated ``times`` times are templates."""

    paths: list[str]
    texts: list[bytes]
    times: int | None = None
    interval_s: float = 0.0

    def batches(
        self, source: RecordSource, is_stopped: Callable[[], bool]
    ) -> Iterable[InputBatch[bytes]]:
        """Return the batches of the texts, or of the files, which ``source`` reads."""
        from nsqtools.publish.input import InputBatch, repeat_texts

        if not self.texts:
            return source.batches()
        if self.times is None:
            return [InputBatch(self.texts)]
        return repeat_texts(self.texts, self.times, self.interval_s, is_stopped)


def parse_input(
    texts: Sequence[str],
    messages: Sequence[str],
    files: Sequence[str],
    repeat: int | None,
    interval_s: float | None,
) -> PublishInput:
    """Return the input that arguments and options name.

    Raises `ConfigurationError` and `OutputError`.
    """
    paths = list(files)
    bodies = [argument_bytes(text) for text in messages]
    for text in texts:
        if text == "-" or (text.startswith("@") and len(text) > 1):
            paths.append(text.removeprefix("@"))
        elif os.path.isfile(text):
            raise ConfigurationError(
                f"{text} is the name of a file, but an argument is a text",
                hint=f"Write @{text} to publish its lines, or -m {text} for the text.",
            )
        else:
            bodies.append(argument_bytes(text))
    if bodies and paths:
        raise ConfigurationError("give either texts or files")
    if (repeat or interval_s) and not bodies:
        raise ConfigurationError(
            "--repeat and --interval are for texts", hint="Give the text as an argument."
        )
    if interval_s is not None and repeat is None:
        raise ConfigurationError("--interval needs --repeat")
    if repeat is not None:
        from nsqtools.publish.input import check_template

        for body in bodies:
            check_template(body)
    for path in paths:
        if path != "-" and not os.path.exists(path):
            raise OutputError(
                f"cannot read {path} (No such file or directory)",
                hint=f"To publish the text itself: -m @{path}",
            )
    return PublishInput(paths if paths or bodies else ["-"], bodies, repeat, interval_s or 0.0)


def body_selector(
    where: Filter | None, pick: Callable[[bytes], bytes | None] | None
) -> Callable[[bytes], bytes | None] | None:
    """Return the function of ``--where`` and ``--pick`` on a body, None without these options.

    The function raises ``ValueError`` for a body to which ``--pick`` cannot be applied.
    """
    if where is None and pick is None:
        return None
    from nsqtools.protocol.frames import WireMessage

    def select(body: bytes) -> bytes | None:
        if where is not None and not where(WireMessage(0, 0, b"", body)):
            return None
        return body if pick is None else pick(body)

    return select


def total_size(paths: Sequence[str]) -> int:
    """Return the bytes in the files, 0 if unknown."""
    try:
        return sum(os.path.getsize(path) for path in paths if os.path.isfile(path) or path == "-")
    except OSError:
        return 0


# -- delivery to one channel ----------------------------------------------------------------------

CHANNEL = "One channel"
MAX_DEPTH = 10_000
WAIT_S = 300.0
WITHOUT_EFFECT = ("nsqd_tcp_address", "mode", "retry_timeout", "retry_unknown")


class ChannelOptions(OptionSet):
    """Delivery to one channel by a temporary nsqd. ``target`` is set by `open`.

    Raises `ConfigurationError` for options that contradict each other.
    """

    panel = CHANNEL
    max_depth = MAX_DEPTH

    context: Context
    channel: str | None = opt(
        "--channel -c NAME", "Deliver to this channel alone, by a temporary nsqd."
    )
    channel_lookupd: list[str] | None = opt(
        "--lookupd-http-address HOST:PORT",
        "nsqlookupd, over HTTP, where consumers find it.",
        envvar=f"{ENV}LOOKUPD_HTTP_ADDRESS",
    )
    lookupd_tcp_address: list[str] | None = opt(
        "HOST:PORT", "Where it registers (TCP).", show_default="the port below that of HTTP"
    )
    broadcast_address: str | None = opt(
        "HOST", "Host under which consumers reach it.", show_default="its address to nsqlookupd"
    )
    data_path: Path | None = opt(
        "DIR", "Directory of its messages, for the next run too.", show_default="./nsqd-NAME"
    )
    # A default as text would be parsed on each start of pub.
    wait: float | None = opt(
        "DURATION", "End when no consumer is connected for this long.", show_default="5m"
    )
    nsqd_config: Path | None = opt(
        "FILE", "Flags for it in the file format of nsqd: TLS, auth, ports."
    )

    @property
    def wait_s(self) -> float:
        """The longest time without a connected consumer."""
        return WAIT_S if self.wait is None else self.wait

    def __init__(self, **values: Any) -> None:
        self.target: ChannelPublisher | None = None
        self.listing_lookupds: Sequence[str] = ()
        super().__init__(**values)

    @property
    def name(self) -> str:
        """The channel, ``""`` without ``--channel``."""
        return self.channel or ""

    @property
    def lookupds(self) -> tuple[str, ...]:
        """The nsqlookupd of the options, or of the settings."""
        setting = setting_of(self.context, "lookupd_http_address")
        if not self.channel_lookupd and setting is not None and isinstance(setting.value, list):
            return split_addresses(setting.value)
        return split_addresses(self.channel_lookupd)

    @contextmanager
    def open(
        self,
        options: ClientOptions,
        runtime: Runtime,
        *,
        place: Path | None = None,
        resumes: bool = True,
        defer_s: float | None = None,
        rate: float = 0.0,
    ) -> Iterator[ChannelPublisher]:
        """Join the cluster with a temporary nsqd, and leave it at the end.

        ``resumes`` means that the next run would publish the same messages from the beginning.
        ``place`` is the data path of a drain.
        """
        from nsqtools.client.connection import http_access
        from nsqtools.cluster.directory import Cluster, ClusterAddresses
        from nsqtools.one_channel.channel_publisher import ChannelPublisher
        from nsqtools.one_channel.temporary_nsqd import TemporaryNsqd

        def report(line: str) -> None:
            runtime.info(f"nsq: {line}")

        lookupds = self.lookupds
        with (
            Cluster(ClusterAddresses((), lookupds), http_access(options, lookupds)) as cluster,
            TemporaryNsqd(
                place or self.data_path or Path(f"nsqd-{self.name}"),
                cluster,
                lookupd_tcp_addresses=self.lookupd_tcp_address or (),
                broadcast_address=self.broadcast_address or "",
                config=self.nsqd_config,
                report=report,
            ) as temporary,
        ):
            self.listing_lookupds = temporary.listing_lookupds
            channels = f"channel {self.name}" if self.name else "each channel"
            report(f"{temporary.nsqd.address} serves {channels} until its messages are consumed")
            self.target = ChannelPublisher(
                temporary,
                self.name,
                options,
                rate,
                max_depth=self.max_depth,
                wait_s=self.wait_s,
                resumes=resumes,
                defer_s=defer_s,
                report=report,
            )
            try:
                yield self.target
            except BaseException:
                temporary.leave()
                self._report_rest(runtime, self.target)
                raise

    def status(self, runtime: Runtime, otherwise: int) -> int:
        """Report the result of the delivery; return the exit status."""
        target = self.target
        if target is None:
            return otherwise
        suffix = f", {target.new_id_count} with a new id" if target.new_id_count else ""
        runtime.info(f"nsq: {counted(target.delivered_count, 'message')} consumed{suffix}")
        if target.abandoned is not None:
            otherwise = ExitStatus.LIMIT_NOT_REACHED
            queue = f"{target.abandoned.topic}/{target.abandoned.channel}"
            lookupds = ", ".join(self.listing_lookupds)
            line = (
                f"no consumer of {queue} connected within {format_duration(self.wait_s)}; "
                f"nsqlookupd {lookupds} lists this nsqd, and consumers with fixed nsqd addresses "
                "do not ask nsqlookupd"
            )
            runtime.report_failure(NsqError(line))
        self._report_rest(runtime, target)
        return otherwise

    def _report_rest(self, runtime: Runtime, target: ChannelPublisher) -> None:
        if text := target.leftovers_text():
            runtime.print_error(f"nsq: {text}")


FLAGS = (*ChannelOptions.__annotations__, "max_depth")


class ChannelDelivery(ChannelOptions):
    """Delivery to the channel of ``--channel``."""

    panel = CHANNEL
    max_depth: int = opt("N", "At most N messages in it at a time.", default=MAX_DEPTH, min=1)

    def check(self) -> None:
        if self.channel is None:
            refuse_flags(self.context, FLAGS, "is for --channel")
        else:
            refuse_flags(self.context, WITHOUT_EFFECT, "has no effect with --channel")


class DrainOptions(ChannelOptions):
    """Delivery of all channels of a drained nsqd, or of one, without ``--to``."""

    def check(self) -> None:
        if self.context.params.get("to") is not None:
            refuse_flags(self.context, FLAGS, "is for a drain without --to")
