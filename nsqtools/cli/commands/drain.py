"""``nsq drain``: empty an nsqd into another one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument, Context

from nsqtools.cli.options.connection import ClientFlags, Where, flag_statements
from nsqtools.cli.options.params import SAFETY, DryRun, Json, Yes
from nsqtools.cli.parsing.binding import From, opt, some
from nsqtools.cli.render.output import write_json, write_lines
from nsqtools.cli.running.runtime import ExitStatus, Session, stopping
from nsqtools.client.connection_settings import resolve_options, texts_of

IN_FLIGHT = 500

Node = Annotated[str, Argument(metavar="NODE", help="HTTP address of the nsqd to empty.")]
To = Annotated[str, opt("--to HOST:PORT", "HTTP address of the nsqd that takes over.")]


def client_settings(
    context: Context,
    *,
    profile: Annotated[dict[str, Any], From(some(Where, "profile", "no_profile"))],
    flags: Annotated[ClientFlags, From(ClientFlags)],
) -> dict[str, str]:
    """The options of the way to both nsqd, as text under go-nsq's names."""
    return texts_of(resolve_options(flag_statements(context, vars(flags))))


def drain(
    node: Node,
    to: To,
    allow_repeats: bool = opt(
        "", "Move topics with several channels too; each gets what was left in all.", SAFETY
    ),
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    *,
    settings: Annotated[dict[str, str], From(client_settings)],
    runtime: Session,
) -> int:
    """Move the messages that are left on one nsqd to another.

    Stop publishing to the nsqd first; the command ends when no more messages arrive. Every message
    is published to the other nsqd and finished on this one once that is confirmed; it gets a new id
    and timestamp. NSQ publishes to topics, not to channels: topics with several channels are
    skipped unless --allow-repeats is given. Messages in flight to consumers or deferred stay.

    The exit status is 6 when something is left.

    Examples:
        nsq drain nsqd-3:4151 --to nsqd-1:4151 --dry-run
        nsq drain nsqd-3:4151 --to nsqd-1:4151 --yes
    """
    from nsqtools.client.discovery import http_access
    from nsqtools.client.options import ClientOptions
    from nsqtools.cluster.directory import Cluster, ClusterAddresses, short_address
    from nsqtools.cluster.drain import Drain, plan_lines
    from nsqtools.protocol.text import counted

    defaults = ClientOptions(max_in_flight=IN_FLIGHT, output_buffer_timeout_s=0.025)
    options = defaults.with_options(settings)
    access = http_access(options, (node, to))
    with Cluster(ClusterAddresses([node, to]), access) as cluster:
        service = Drain(cluster.nsqd(node), cluster.nsqd(to), options)
        plan = service.plan(allow_repeats=allow_repeats)
        for line in plan.left:
            runtime.insist(f"nsq: stays: {line}")
        status = ExitStatus.PARTLY_DONE if plan.left else ExitStatus.DONE
        if not dry_run and plan.moves and not yes:
            for line in plan_lines(plan.moves):
                runtime.insist(line)
            if not runtime.confirm(f"Go on, to {short_address(cluster.nsqd(to).url)}?"):
                runtime.tell("nsq: nothing was changed")
                return ExitStatus.FAILED
        left = 0
        with stopping(service.stop) as signals:
            if not dry_run:
                left = service.run(plan)
    if json:
        moves = [asdict(move) for move in plan.moves]
        document = {"moves": moves, "stays": list(plan.left), "moved": service.moved, "left": left}
        write_json(runtime, document, indent=2)
    elif dry_run:
        write_lines(runtime, plan_lines(plan.moves))
    if not dry_run:
        runtime.tell(f"nsq: {counted(service.moved, 'message')} moved, {left} left")
    return signals.status(otherwise=ExitStatus.PARTLY_DONE if left else status)
