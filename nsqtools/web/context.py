"""What the pages, the API and /metrics are given.

    context.user(request)                who asks
    context.plan(change)                 what a change would do, to show first
    await context.form(request)          the fields of a form, after its token was checked
    context.act(request, change)         the change: checked, written down, made, notified

`plan` and `act` ask the cluster and take time: call them on a thread (a view that is a plain
function runs on one).
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nsqtools.client.options import ClientOptions
from nsqtools.cluster.admin import AdminPlan, StepResult, apply
from nsqtools.cluster.directory import Cluster
from nsqtools.cluster.history import History
from nsqtools.web.access import Identities, User, WebSettings
from nsqtools.web.actions import AuditLog, Notifier, RequestOrigin, TopicChange, plan_change
from nsqtools.web.watcher import Watcher

TOKEN_FIELD = "csrf_token"
MAX_FIELDS = 100


@dataclass(frozen=True, slots=True)
class WebContext:
    """See the module."""

    settings: WebSettings
    cluster: Cluster
    watcher: Watcher
    identities: Identities
    audit: AuditLog
    notifier: Notifier
    options: ClientOptions

    @property
    def history(self) -> History:
        """What the cluster did."""
        return self.watcher.history

    def path(self, path: str) -> str:
        """Return where a page (``/topics``) is under the base path."""
        return self.settings.base_path + path

    def user(self, request: Request) -> User:
        """Return who asks."""
        user: User = request.scope["nsq.user"]
        return user

    def token(self, request: Request) -> str:
        """Return what the field `TOKEN_FIELD` of a form that changes something has to hold."""
        return self.identities.token(self.user(request))

    async def form(self, request: Request) -> dict[str, str]:
        """Return the fields of a posted form, the last of each name.

        Raises ``HTTPException`` 403 without the right token, 400 for what is not a form.
        """
        if not request.headers.get("content-type", "").startswith(
            "application/x-www-form-urlencoded"
        ):
            raise HTTPException(400, "not a form")
        try:
            fields = dict(
                parse_qsl(
                    (await request.body()).decode("ascii"),
                    keep_blank_values=True,
                    max_num_fields=MAX_FIELDS,
                )
            )
        except ValueError:
            raise HTTPException(400, "not a form") from None
        if not self.identities.is_token(self.user(request), fields.pop(TOKEN_FIELD, "")):
            raise HTTPException(403, "the form is too old; load the page again")
        return fields

    def check_changes(self, request: Request) -> None:
        """Raise ``HTTPException`` 403 unless the user may change something."""
        if self.user(request).may_change:
            return
        if not self.settings.allow_changes:
            raise HTTPException(403, "this console is read-only (--allow-changes)")
        raise HTTPException(403, "only those named with --admin-user may do this")

    def plan(self, change: TopicChange) -> AdminPlan:
        """Plan a change. Raises `NsqError`."""
        return plan_change(self.cluster, change)

    def act(self, request: Request, change: TopicChange) -> list[StepResult]:
        """Make a change, of what is there now, and write it down.

        Raises ``HTTPException`` 403, and `NsqError` when nothing could be done.
        """
        self.check_changes(request)
        plan = self.plan(change)
        return self.carry_out(request, change, plan)

    def carry_out(self, request: Request, change: TopicChange, plan: AdminPlan) -> list[StepResult]:
        """Make the change of a plan. Raises as `act` does."""
        self.check_changes(request)
        origin = self.origin(request)
        self.audit.begun(change, origin)
        results = apply(self.cluster, plan)
        self.audit.ended(change, origin, results)
        if any(result.error is None for result in results):
            self.notifier.notify(change, origin)
        return results

    def origin(self, request: Request) -> RequestOrigin:
        """Describe where a request comes from."""
        client = request.client
        scheme = "https" if request.headers.get("x-scheme") == "https" else request.url.scheme
        url = f"{scheme}://{request.headers.get('host', '')}{request.url.path}"
        return RequestOrigin(
            self.user(request).name,
            f"{client.host}:{client.port}" if client else "",
            request.headers.get("user-agent", ""),
            url,
        )
