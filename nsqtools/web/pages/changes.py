"""Forms for changes of a cluster: the plan, its confirmation and the result.

The user confirms an irreversible change by typing the name. After the confirmation the plan is made
again, and the result lists the steps that were executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.cluster.texts import waiting_text
from nsqtools.errors import ConfigurationError
from nsqtools.web.actions import plan_change
from nsqtools.web.pages.site import Site


async def act(site: Site, request: Request) -> Response:
    """Show the form or the plan; for a form that was sent, make the change.

    Raises ``HTTPException`` 403 for users that may not change anything.
    """
    site.context.check_changes(request)
    if request.method == "POST":
        fields = await site.context.form(request)
        return await run_in_threadpool(_confirmed, site, request, fields)
    return await run_in_threadpool(_planned, site, request)


def _planned(site: Site, request: Request) -> Response:
    parameters = request.query_params
    topic, channel = parameters.get("topic", ""), parameters.get("channel", "")
    is_create = parameters.get("action") == Action.CREATE.value
    is_of_channel = parameters.get("of") == "channel" or "channel" in parameters
    if is_create and not (channel if is_of_channel else topic):
        return _form(site, request, topic)
    try:
        return _plan(site, request, _change(request, parameters))
    except ConfigurationError as error:
        if not is_create:
            raise
        of, typed = (topic, channel) if is_of_channel else ("", topic)
        return _form(site, request, of, typed, f"{error}. {error.hint}")


def _form(site: Site, request: Request, topic: str, typed: str = "", refusal: str = "") -> Response:
    title = f"Add a channel to {topic}" if topic else "Create a topic"
    return _page(site, request, "create.html", title, topic, typed=typed, refusal=refusal)


def _plan(site: Site, request: Request, change: TopicChange, refusal: str = "") -> Response:
    site.context.check_change(request, change)
    plan = plan_change(site.context.cluster, change)
    snapshot = site.snapshot()
    failed = {failure.address for failure in plan.failures}
    silent = snapshot.left_out(change.topic, change.channel) if not change.node else []
    plan = plan._replace(
        notes=(
            *plan.notes,
            *(
                f"{node.address} does not respond and is not changed: {waiting_text(waiting or 0)}"
                " there when last seen, which it has when it returns"
                for node, waiting in silent
                if node.address not in failed
            ),
        )
    )
    rows = snapshot.of_node(change.node) if change.node else snapshot.totals
    channels = [row for row in rows if row.topic == change.topic and row.channel]
    return _page(
        site,
        request,
        "plan.html",
        _title(change),
        change.topic,
        change.channel,
        change=change,
        plan=plan,
        kept=sum(row.kept for row in channels),
        refusal=refusal,
    )


def _confirmed(site: Site, request: Request, fields: dict[str, str]) -> Response:
    change = _change(request, fields)
    if change.word and fields.get("confirm", "").strip() != change.word:
        return _plan(site, request, change, "The name was not typed as it is below.")
    results = site.context.act(request, change)
    failed = sum(result.error is not None for result in results)
    back = change.topic, change.channel
    if change.action is Action.DELETE:  # there is nothing to go back to
        back = change.topic if change.channel else "", ""
    return _page(
        site, request, "result.html", _title(change), *back, results=results, failed=failed
    )


def _change(request: Request, fields: Mapping[str, str]) -> TopicChange:
    parameters = request.query_params
    try:
        action = Action(parameters.get("action", ""))
    except ValueError:
        raise ConfigurationError("no such action") from None
    names = {name: parameters.get(name, "") for name in ("topic", "channel", "node")}
    is_of_all = action is Action.EMPTY and not names["channel"]
    with_channels = is_of_all and fields.get("channels") == "1"
    return TopicChange(action=action, with_channels=with_channels, **names)


def _title(change: TopicChange) -> str:
    if change.action is Action.TOMBSTONE:
        return f"Take the topic {change.topic} from {change.node}"
    where = f" on {change.node}" if change.node else ""
    return f"{change.action.value.capitalize()} {change.subject}{where}"


def _page(
    site: Site,
    request: Request,
    template: str,
    title: str,
    topic: str,
    channel: str = "",
    **values: Any,
) -> Response:
    """Return a page with the way back to a queue, of status 400 or 502 where something failed."""
    back = site.to.queue(topic, channel) if topic else site.to.page("/")
    back_name = f"{topic}/{channel}" if channel else topic or "Queues"
    values |= {"topic": topic, "back": back, "back_name": back_name}
    status = 400 if values.get("refusal") else 502 if values.get("failed") else 200
    return site.page(request, template, title, status, **values)
