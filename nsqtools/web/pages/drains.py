"""Draining an nsqd from the browser: the plan, its confirmation, and a page that follows the move.

A move can take long, so it runs on a thread of its own and can be stopped; one for each nsqd at a
time. It ends with the console: what was not moved by then is still where it was.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nsqtools.cluster.drain import Drain, DrainPlan, plan_lines
from nsqtools.errors import ConfigurationError, NotFoundError, NsqError
from nsqtools.web.audit import Origin
from nsqtools.web.context import WebContext
from nsqtools.web.pages.site import Site, Values

log = logging.getLogger("nsqtools")

IN_FLIGHT = 1000


class Move:
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
        self._moves: dict[str, Move] = {}

    @property
    def _context(self) -> WebContext:
        return self._site.context

    async def answer(self, request: Request) -> Response:
        """Show the form or the plan; for a form that was sent, begin."""
        self._context.check_changes(request)
        fields = await self._context.form(request) if request.method == "POST" else None
        return await run_in_threadpool(self._answer, request, fields)

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
            if each not in nodes:  # whoever may ask us must not make us ask anybody else
                raise NotFoundError(f"no nsqd that answers is {each}")
        if not target:
            return self._page(request, source, others=[each for each in nodes if each != source])
        allow_repeats = asked.get("repeats") == "1"
        drain = self._drain(source, target)
        plan = drain.plan(allow_repeats=allow_repeats)
        if fields is None:
            return self._page(request, source, target, plan=plan, repeats=allow_repeats)
        if fields.get("confirm", "").strip() != source:
            refusal = "The address was not typed as it stands below."
            return self._page(
                request, source, target, plan=plan, repeats=allow_repeats, refusal=refusal
            )
        self._begin(Move(drain, plan, source, target), self._context.origin(request))
        return self._to_progress(source)

    def _drain(self, source: str, target: str) -> Drain:
        options = replace(
            self._context.options, max_in_flight=IN_FLIGHT, output_buffer_timeout_s=0.025
        )
        cluster = self._context.cluster
        return Drain(cluster.nsqd(source), cluster.nsqd(target), options)

    def _begin(self, move: Move, origin: Origin) -> None:
        with self._lock:
            before = self._moves.get(move.source)
            if before is not None and not before.is_over:
                raise ConfigurationError(f"{move.source} is being drained already")
            self._context.audit.drain("begun", move.source, move.target, origin)
            self._moves[move.source] = move

        def run() -> None:
            move.run()
            state = "failed" if move.error else "partly" if move.left or move.stays else "done"
            self._context.audit.drain(
                state, move.source, move.target, origin, moved=move.moved, left=move.left
            )

        threading.Thread(target=run, name="nsq-drain", daemon=True).start()

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
            lines=plan_lines(plan.moves) if plan else [],
            repeats=repeats,
            csrf_token=self._context.token(request),
            refusal=refusal,
        )
        return self._site.response(values, 400 if refusal else 200)

    def _nodes(self) -> list[str]:
        snapshot = self._site.snapshot()
        return sorted(snapshot.reports) if snapshot else []

    def _move(self, source: str) -> Move:
        move = self._moves.get(source)
        if move is None:
            raise NotFoundError(f"no drain of {source} was begun")
        return move

    def _to_progress(self, source: str) -> Response:
        return RedirectResponse(self._site.to.page("/draining", node=source), 303)
