"""What the options of ``readStream.format("nsq")`` say. Values only.

    topic, channel, spoolDir     must be there
    maxSpoolBytes, maxSpoolRows  pause above, go on below half (default: 1 GiB)
    flushInterval                how long a message waits for others before it is durable (50ms)
    idleTimeout                  a channel that is quiet for so long is empty: availableNow (2s)
    pollInterval, maxRowsPerTrigger, maxBytesPerTrigger, maxFilesPerTrigger, failOnDataLoss,
    partitionBytes, minPartitions    as of nsq-archive

and those of the connection, see `connection_options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nsqtools.client.connection_settings import ConnectionSettings
from nsqtools.errors import ConfigurationError
from nsqtools.spark.archives.settings import (
    ReadSettings,
    StreamSettings,
    local_path,
    read_limits,
    size_option,
    split_settings,
)
from nsqtools.spark.connection_options import consumer_connection, subscription
from nsqtools.spark.options import Options
from nsqtools.spark.spool import SpoolSettings

DEFAULT_POLL_S = 0.05
EPHEMERAL = "#ephemeral"


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """All of it. Executors need no connection."""

    spool: SpoolSettings
    read: ReadSettings
    stream: StreamSettings
    connection: ConnectionSettings | None

    def for_executors(self) -> TopicSettings:
        """Return what may travel to executors."""
        return replace(self, connection=None)


def topic_settings(given: Mapping[str, str], environ: Mapping[str, str]) -> TopicSettings:
    """Read all options. Raises `ConfigurationError`."""
    options = Options("nsq", given)
    subscribed = subscription(options)
    if subscribed.channel.endswith(EPHEMERAL):
        raise ConfigurationError(
            f"channel {subscribed.channel} is deleted, with its messages, when a query ends",
            hint="A stream needs a channel that stays.",
        )
    folder = Path(local_path(options.required("spoolDir", "/shared/spool")))
    flush_s, idle_s = options.duration_s("flushInterval"), options.duration_s("idleTimeout")
    poll_s = options.duration_s("pollInterval")
    spool = SpoolSettings(folder, subscribed.topics, subscribed.channel)
    spool = replace(
        spool,
        max_bytes=size_option(options, "maxSpoolBytes") or spool.max_bytes,
        max_rows=options.integer("maxSpoolRows"),
        flush_s=spool.flush_s if flush_s is None else flush_s,
        idle_s=spool.idle_s if idle_s is None else idle_s,
    )
    read = split_settings(options, ReadSettings(paths=(str(folder),)))
    stream = StreamSettings(
        fail_on_data_loss=options.flag("failOnDataLoss", default=True),
        limits=read_limits(options),
        poll_s=DEFAULT_POLL_S if poll_s is None else poll_s,
    )
    connection = consumer_connection(options, environ)
    options.end()
    return TopicSettings(spool, read, stream, connection)
