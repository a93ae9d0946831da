"""``--channel`` of the commands that publish: to one channel, by a temporary nsqd of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context

from nsqtools.cli.options.connection import ENV, setting_of
from nsqtools.cli.parsing.binding import From, OptionSet, opt, some
from nsqtools.cli.running.runtime import ExitStatus, Runtime
from nsqtools.errors import ConfigurationError
from nsqtools.protocol.text import counted, format_duration

if TYPE_CHECKING:
    from nsqtools.client.options import ClientOptions
    from nsqtools.one_channel.channel_publisher import ChannelPublisher

PANEL = "One channel"
WAIT_S = 300.0
MAX_DEPTH = 10_000
WITHOUT_EFFECT = ("nsqd_tcp_address", "mode", "retry_timeout", "retry_unknown")


class ChannelFlags(OptionSet):
    """Flags of the temporary nsqd. None means: not given."""

    channel: str | None = opt(
        "--channel -c NAME",
        "Deliver to this channel alone: a temporary nsqd joins the cluster, with nothing in the "
        "others.",
        PANEL,
    )
    channel_lookupd: list[str] | None = opt(
        "--lookupd-http-address HOST:PORT",
        "nsqlookupd, over HTTP, where consumers find it.",
        PANEL,
        envvar=f"{ENV}LOOKUPD_HTTP_ADDRESS",
    )
    lookupd_tcp_address: list[str] | None = opt(
        "HOST:PORT",
        "nsqlookupd, over TCP, where it registers.",
        PANEL,
        show_default="the port below that of HTTP",
    )
    broadcast_address: str | None = opt(
        "HOST",
        "Where consumers reach this machine.",
        PANEL,
        show_default="its address towards nsqlookupd",
    )
    data_path: Path | None = opt(
        "DIR",
        "Where its messages are until they are consumed; the next run goes on there.",
        PANEL,
        show_default="./nsqd-NAME",
    )
    wait: float | None = opt(
        "DURATION", "End when no consumer is connected for this long.", PANEL, show_default="5m"
    )
    max_depth: int | None = opt(
        "N", "At most N messages in it at a time.", PANEL, min=1, show_default=f"{MAX_DEPTH}"
    )
    nsqd_config: Path | None = opt(
        "FILE", "Flags for it in the file format of nsqd: TLS, auth, ports.", PANEL
    )


@dataclass(frozen=True)
class OneChannel:
    """What was asked for; ``name`` is ``""`` without ``--channel``."""

    name: str
    lookupds: tuple[str, ...]
    flags: ChannelFlags

    @contextmanager
    def open(
        self,
        options: ClientOptions,
        runtime: Runtime,
        *,
        place: Path | None = None,
        resumes: bool = True,
        defer_s: float | None = None,
        dry_run: bool = False,
    ) -> Iterator[ChannelPublisher | None]:
        """Join the cluster, and leave it at the end; None without ``--channel``.

        ``resumes`` tells that the next run would have the same messages from the beginning, and
        ``place`` is the data path of a drain.
        """
        if not (self.name or place) or dry_run:
            yield None
            return
        from nsqtools.client.connection import http_access
        from nsqtools.cluster.directory import Cluster, ClusterAddresses
        from nsqtools.one_channel.channel_publisher import ChannelPublisher
        from nsqtools.one_channel.temporary_nsqd import TemporaryNsqd

        def tell(line: str) -> None:
            runtime.tell(f"nsq: {line}")

        flags = self.flags
        access = http_access(options, self.lookupds)
        with (
            Cluster(ClusterAddresses((), self.lookupds), access) as cluster,
            TemporaryNsqd(
                place or flags.data_path or Path(f"nsqd-{self.name}"),
                cluster,
                lookupd_tcp_addresses=flags.lookupd_tcp_address or (),
                broadcast_address=flags.broadcast_address or "",
                config=flags.nsqd_config,
                tell=tell,
            ) as nsqd,
        ):
            what = f"channel {self.name}" if self.name else "each channel"
            tell(f"{nsqd.address} serves {what} until its messages are consumed")
            target = ChannelPublisher(
                nsqd,
                self.name,
                max_depth=flags.max_depth or MAX_DEPTH,
                wait_s=self.wait_s,
                resumes=resumes,
                defer_s=defer_s,
                tell=tell,
            )
            try:
                yield target
            except BaseException:
                nsqd.leave()
                self._tell_rest(runtime, target)
                raise

    @property
    def wait_s(self) -> float:
        return WAIT_S if self.flags.wait is None else self.flags.wait

    def status(self, runtime: Runtime, target: ChannelPublisher | None, otherwise: int) -> int:
        """Say how the delivery ended; return the exit status."""
        if target is None:
            return otherwise
        new = f", {target.new_ids} with a new id" if target.new_ids else ""
        runtime.tell(f"nsq: {counted(target.delivered, 'message')} consumed{new}")
        if target.lonely is not None:
            otherwise = ExitStatus.LIMIT_NOT_REACHED
            runtime.complain(
                f"no consumer of {target.lonely.topic}/{target.lonely.channel} connected within "
                f"{format_duration(self.wait_s)}; nsqlookupd {', '.join(self.lookupds)} names this "
                "nsqd, and consumers with a list of nsqd do not ask there"
            )
        self._tell_rest(runtime, target)
        return otherwise

    def _tell_rest(self, runtime: Runtime, target: ChannelPublisher) -> None:
        if rest := target.rest():
            runtime.insist(f"nsq: {rest}")


def one_channel(context: Context, flags: Annotated[ChannelFlags, From(ChannelFlags)]) -> OneChannel:
    """Read the options. Raises `ConfigurationError` for those that contradict each other."""
    if flags.channel is None:
        _refuse(context, tuple(vars(flags)), "is for --channel")
        return OneChannel("", (), flags)
    _refuse(context, WITHOUT_EFFECT, "has no effect with --channel")
    return OneChannel(flags.channel, _lookupds(context, flags), flags)


def _refuse(context: Context, names: tuple[str, ...], problem: str) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise ConfigurationError(f"{parameter.opts[0]} {problem}")


def _lookupds(context: Context, flags: ChannelFlags) -> tuple[str, ...]:
    setting = setting_of(context, "lookupd_http_address")
    if not flags.channel_lookupd and setting is not None and isinstance(setting.value, list):
        return tuple(setting.value)
    return tuple(flags.channel_lookupd or ())


DRAIN_FLAGS = [name for name in ChannelFlags.__annotations__ if name != "max_depth"]


def drained_channels(
    context: Context, flags: Annotated[dict[str, Any], From(some(ChannelFlags, *DRAIN_FLAGS))]
) -> OneChannel:
    """Read the options of a drain to consumers, which has no ``--to``."""
    given = ChannelFlags(**flags, max_depth=None)
    if context.params.get("to") is not None:
        _refuse(context, tuple(flags), "is for a drain without --to")
        return OneChannel("", (), given)
    return OneChannel(given.channel or "", _lookupds(context, given), given)


ToChannel = Annotated[OneChannel, From(one_channel)]
DrainedChannels = Annotated[OneChannel, From(drained_channels)]


def stop_both(job: Callable[[], object], target: ChannelPublisher | None) -> Callable[[], None]:
    """Return what stops a job, and the delivery of what it has stored."""

    def stop() -> None:
        job()
        if target is not None:
            target.stop()

    return stop
