"""Forms for what is done to a cluster: first the plan, then its confirmation, then the result.

Whatever cannot be undone asks for the name to be typed. A plan is made again when it is confirmed:
the result says what was done, not what was planned.

Draining an nsqd can take long, so it runs on a thread of its own and can be stopped; one for each
nsqd at a time. When the console ends it is stopped as by its button, and its end written down: what
was not moved by then is still where it was.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nsqtools.cluster.admin import Action, TopicChange
from nsqtools.cluster.drain import Drain, DrainPlan
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError, OutputError
from nsqtools.web.actions import RequestOrigin, WebContext
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


log = logging.getLogger("nsqtools")

IN_FLIGHT = 1000
LONGEST_END_S = 60.0


class RunningDrain:
    """One drain that was begun. ``left`` is None while it runs; ``error`` is why it failed."""

    def __init__(self, drain: Drain, plan: DrainPlan, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self.planned = sum(move.messages for move in plan.moves)
        self.stays = plan.left
        self.left: int | None = None
        self.error = ""
        self.is_stopping = False
        self._drain = drain
        self._plan = plan

    @property
    def moved(self) -> int:
        return self._drain.moved

    @property
    def is_over(self) -> bool:
        return self.left is not None or bool(self.error)

    def run(self) -> None:
        """Move everything; never raises."""
        try:
            self.left = self._drain.run(self._plan)
        except NsqError as error:
            self.error = str(error)
        except Exception:
            log.exception("a drain failed")
            self.error = "it failed: see the log of nsq web"

    def stop(self) -> None:
        """End after the present batch."""
        self.is_stopping = True
        self._drain.stop()


class DrainPages:
    """Answers /drain, and makes the values of /draining."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._moves: dict[str, RunningDrain] = {}
        self._threads: list[threading.Thread] = []
        self._has_ended = False
        site.context.at_end.callback(self._end)

    @property
    def _context(self) -> WebContext:
        return self._site.context

    async def answer(self, request: Request) -> Response:
        """Show the form or the plan; for a form that was sent, begin."""
        self._context.check_changes(request)
        fields = await self._context.form(request) if request.method == "POST" else None
        return await run_in_threadpool(self._answer, request, fields)

    def _end(self) -> None:
        """Stop all moves, and wait until what they have taken is published and finished."""
        with self._lock:
            self._has_ended = True
        for move in self._moves.values():
            move.stop()
        for thread in self._threads:
            thread.join(LONGEST_END_S)
            if thread.is_alive():
                log.error("a drain did not end in time: messages may be on both nsqd")

    async def stop(self, request: Request) -> Response:
        """Stop a move."""
        self._context.check_changes(request)
        await self._context.form(request)
        source = request.query_params.get("node", "")
        self._move(source).stop()
        return self._to_progress(source)

    def progress(self, request: Request) -> Values:
        """Return the values of the page that follows a move. Raises `NotFoundError`."""
        source = request.query_params.get("node", "")
        return self._site.frame(
            request,
            "draining.html",
            "Nodes",
            f"Drain {source}",
            move=self._move(source),
            csrf_token=self._context.token(request),
        )

    def _answer(self, request: Request, fields: dict[str, str] | None) -> Response:
        asked = request.query_params
        source, target = asked.get("node", ""), asked.get("to", "")
        nodes = self._nodes()
        for each in (source, *([target] if target else [])):
            if each not in nodes:  # a request must not make us ask other hosts
                raise NotFoundError(f"no nsqd that answers is {each}")
        if not target:
            return self._page(request, source, others=[each for each in nodes if each != source])
        allow_repeats = asked.get("repeats") == "1"
        drain = self._drain(source, target)
        plan = drain.plan(allow_repeats=allow_repeats)
        if fields is None:
            return self._page(request, source, target, plan=plan, repeats=allow_repeats)
        if fields.get("confirm", "").strip() != source:
            refusal = "The address was not typed as it is below."
            return self._page(
                request, source, target, plan=plan, repeats=allow_repeats, refusal=refusal
            )
        self._begin(RunningDrain(drain, plan, source, target), self._context.origin(request))
        return self._to_progress(source)

    def _drain(self, source: str, target: str) -> Drain:
        options = replace(
            self._context.options, max_in_flight=IN_FLIGHT, output_buffer_timeout_s=0.025
        )
        cluster = self._context.cluster
        return Drain(cluster.nsqd(source), cluster.nsqd(target), options)

    def _begin(self, move: RunningDrain, origin: RequestOrigin) -> None:
        with self._lock:
            if self._has_ended:
                raise ConfigurationError("this console ends just now")
            before = self._moves.get(move.source)
            if before is not None and not before.is_over:
                raise ConfigurationError(f"{move.source} is being drained already")
            subject = {"node": move.source, "to": move.target}
            self._context.audit.note("begun", "drain_node", origin, **subject)
            self._moves[move.source] = move

        def run() -> None:
            move.run()
            state = "failed" if move.error else "stopped" if move.is_stopping else "done"
            if state == "done" and (move.left or move.stays):
                state = "partly"
            try:
                self._context.audit.note(
                    state, "drain_node", origin, **subject, moved=move.moved, left=move.left
                )
            except OutputError as error:  # the messages are moved
                log.error("%s", error)

        thread = threading.Thread(target=run, name="nsq-drain", daemon=True)
        thread.start()
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _page(
        self,
        request: Request,
        source: str,
        target: str = "",
        *,
        others: list[str] | None = None,
        plan: DrainPlan | None = None,
        repeats: bool = False,
        refusal: str = "",
    ) -> Response:
        values = self._site.frame(
            request,
            "drain.html",
            "Nodes",
            f"Drain {source}",
            is_live=False,
            source=source,
            target=target,
            others=others or [],
            plan=plan,
            lines=[move.line() for move in plan.moves] if plan else [],
            repeats=repeats,
            csrf_token=self._context.token(request),
            refusal=refusal,
        )
        return self._site.response(values, 400 if refusal else 200)

    def _nodes(self) -> list[str]:
        snapshot = self._site.snapshot()
        return sorted(snapshot.reports) if snapshot else []

    def _move(self, source: str) -> RunningDrain:
        move = self._moves.get(source)
        if move is None:
            raise NotFoundError(f"no drain of {source} was begun")
        return move

    def _to_progress(self, source: str) -> Response:
        return RedirectResponse(self._site.to.page("/draining", node=source), 303)
