"""Forms for what is done to a cluster: first the plan, then its confirmation, then the result.

Whatever cannot be undone asks for the name to be typed. A plan is made again when it is confirmed:
the result says what was done, not what was planned.
"""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.errors import ConfigurationError
from nsqtools.web.pages.site import Site, Values

VERBS = {
    Action.CREATE: "Create",
    Action.DELETE: "Delete",
    Action.EMPTY: "Empty",
    Action.PAUSE: "Pause",
    Action.UNPAUSE: "Unpause",
    Action.TOMBSTONE: "Tombstone",
}


class ChangePages:
    """Answers /act. Raises ``HTTPException`` 403 for users that may not change anything."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def answer(self, request: Request) -> Response:
        """Show the form or the plan; for a form that was sent, make the change."""

        self._site.context.check_changes(request)
        if request.method == "POST":
            fields = await self._site.context.form(request)
            return await run_in_threadpool(self._confirmed, request, fields)
        return await run_in_threadpool(self._planned, request)

    def _planned(self, request: Request) -> Response:
        asked = request.query_params
        is_of_channel = asked.get("of") == "channel" or "channel" in asked
        if asked.get("action") == "create" and not asked.get(
            "channel" if is_of_channel else "topic"
        ):
            return self._form(request, asked.get("topic", ""))
        try:
            change = _change(request, with_channels=asked.get("channels") == "1")
            return self._plan(request, change)
        except ConfigurationError as error:
            if asked.get("action") != "create":
                raise
            return self._form(
                request,
                asked.get("topic", "") if is_of_channel else "",
                asked.get("channel", asked.get("topic", "")),
                f"{error}. {error.hint}",
            )

    def _form(self, request: Request, topic: str, typed: str = "", refusal: str = "") -> Response:
        values = self._frame(
            request,
            "create.html",
            f"Add a channel to {topic}" if topic else "Create a topic",
            topic,
            "",
            typed=typed,
            refusal=refusal,
        )
        return self._site.response(values, 400 if refusal else 200)

    def _plan(self, request: Request, change: TopicChange, refusal: str = "") -> Response:
        plan = self._site.context.plan(change)
        return self._site.response(
            self._frame(
                request,
                "plan.html",
                _heading(change),
                change.topic,
                change.channel,
                plan=plan,
                # how the command line says it is of no use here
                notes=[note.partition("; --")[0] for note in plan.notes],
                lost=sum(step.messages for step in plan.steps),
                kept=self._kept(change),
                offers_channels=change.action is Action.EMPTY and not change.channel,
                with_channels=change.with_channels,
                typed_name=change.word,
                verb=VERBS[change.action],
                action_address=self._address(change),
                csrf_token=self._site.context.token(request),
                refusal=refusal,
            ),
            400 if refusal else 200,
        )

    def _confirmed(self, request: Request, fields: dict[str, str]) -> Response:
        change = _change(request, with_channels=fields.get("channels") == "1")
        if change.word and fields.get("confirm", "").strip() != change.word:
            return self._plan(request, change, "The name was not typed as it is below.")
        results = self._site.context.act(request, change)
        failed = sum(result.error is not None for result in results)
        is_gone = change.action is Action.DELETE
        values = self._frame(
            request,
            "result.html",
            _heading(change),
            "" if is_gone and not change.channel else change.topic,
            "" if is_gone else change.channel,
            results=results,
            failed=failed,
        )
        return self._site.response(values, 200 if not failed else 502)

    def _kept(self, change: TopicChange) -> int:
        snapshot = self._site.snapshot()
        rows = snapshot.channels(change.topic) if snapshot else []
        return sum(row.depth + row.in_flight + row.deferred for row in rows)

    def _address(self, change: TopicChange) -> str:
        return self._site.to.page(
            "/act",
            action=change.action.value,
            topic=change.topic,
            channel=change.channel,
            node=change.node,
        )

    def _frame(
        self, request: Request, template: str, heading: str, topic: str, channel: str, **more: Any
    ) -> Values:
        return self._site.frame(
            request,
            template,
            "Queues",
            heading,
            is_live=False,
            heading=heading,
            topic=topic,
            back=self._site.to.queue(topic, channel) if topic else self._site.to.page("/"),
            back_name=f"{topic}/{channel}" if channel else topic or "Queues",
            **more,
        )


def _change(request: Request, *, with_channels: bool) -> TopicChange:
    asked = request.query_params
    try:
        action = Action(asked.get("action", ""))
    except ValueError:
        raise ConfigurationError("no such action") from None
    return TopicChange(
        action=action,
        topic=asked.get("topic", ""),
        channel=asked.get("channel", ""),
        node=asked.get("node", ""),
        with_channels=with_channels and action is Action.EMPTY and not asked.get("channel"),
    )


def _heading(change: TopicChange) -> str:
    if change.action is Action.TOMBSTONE:
        return f"Take the topic {change.topic} from {change.node}"
    where = f" on {change.node}" if change.node else ""
    return f"{VERBS[change.action]} {change.subject}{where}"
