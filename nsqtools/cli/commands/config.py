"""``nsq config get`` and ``set``: the options of running nsqd."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Argument

from nsqtools.cli.options.cluster_connection import ClusterConnection
from nsqtools.cli.options.forms import ListingForm
from nsqtools.cli.render.listing import tell_left_out
from nsqtools.cli.render.output import Form, write_json, write_listing
from nsqtools.cli.running.runtime import Runtime, Session

VALUES = ("node", "option", "value")

OptionName = Annotated[
    str, Argument(metavar="OPTION", help="Name as in nsqd's configuration file: log_level.")
]
NewValue = Annotated[str, Argument(metavar="VALUE", help="New value; commas between addresses.")]


def get(
    option: OptionName, *, form: ListingForm, cluster: ClusterConnection, runtime: Session
) -> int:
    """Show one option of every running nsqd.

    Examples:
        nsq config get max_rdy_count
        nsq config get nsqlookupd_tcp_addresses --json
    """
    from nsqtools.cluster.nsqd_config import get_option

    form.check(VALUES)
    with cluster.open() as opened:
        values, failures = get_option(opened, option)
    write_values(runtime, option, values, form)
    return tell_left_out(failures, runtime)


def set_(
    option: OptionName,
    value: NewValue,
    *,
    form: ListingForm,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Change one option of every running nsqd, until it exits.

    log_level and nsqlookupd_tcp_addresses can be changed. nsqd forgets the change when it restarts.

    Examples:
        nsq config set log_level debug
        nsq config set nsqlookupd_tcp_addresses lookup-1:4160,lookup-2:4160
    """
    from nsqtools.cluster.nsqd_config import set_option

    form.check(VALUES)
    with cluster.open() as opened:
        values, failures = set_option(opened, option, value)
    write_values(runtime, option, values, form)
    return tell_left_out(failures, runtime)


def write_values(runtime: Runtime, option: str, values: dict[str, Any], form: Form) -> None:
    """One line, or object, for each nsqd."""
    if form.is_document:
        documents = [
            {"node": node, "option": option, "value": value} for node, value in values.items()
        ]
        write_json(runtime, documents, indent=2)
        return
    rows = [
        (node, option, ",".join(map(str, value)) if isinstance(value, list) else value)
        for node, value in values.items()
    ]
    write_listing(runtime, VALUES, rows, form)
