"""``nsq tombstone``: take a topic from one nsqd."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from nsqtools.cli.options.connection import ClusterConnection
from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.options.params import DryRun, Yes
from nsqtools.cli.running.administering import OneTopic, carry_out
from nsqtools.cli.running.runtime import Session

Node = Annotated[
    str, Argument(metavar="NODE", help="HTTP address of the nsqd, as nsq nodes shows it.")
]


def tombstone(
    topic: OneTopic,
    node: Node,
    yes: Yes = False,
    dry_run: DryRun = False,
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Remove a topic from one nsqd: hide it from consumers, then delete it there.

    nsqlookupd hides the nsqd for this topic for a while, so that consumers do not come back and
    create the topic again. The messages of the topic on this nsqd are lost. Asks for confirmation.

    Examples:
        nsq tombstone clicks nsqd-3:4151 --lookupd-http-address lookup:4161
    """
    from nsqtools.cluster.admin import plan_tombstone

    with cluster.open() as opened:
        plan = plan_tombstone(opened, topic, node)
        return carry_out(opened, plan, runtime, yes=yes, dry_run=dry_run, form=form)
