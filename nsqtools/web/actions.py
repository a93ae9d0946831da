"""Changes from the browser: plans, execution, the audit log and notifications.

The plans are those of `nsq topic`, `nsq channel` and `nsq tombstone` (`plan_change`).

A change has a line of ``--audit-log`` before it is made ("begun") and one after it ("done",
"partly", "failed"), so that a crash in between leaves a trace. A line that cannot be written stops
the change. The file is opened for each line: it may be renamed while the console runs.

Notifications have the format of nsqadmin. A separate thread sends them once, without retries, and
logs a failure.

The pages, the API and /metrics share a `WebContext`.

    context.user(request)                the user of a request
    await context.form(request)          the fields of a form, after its token was checked
    context.act(request, change)         checks, logs, executes and announces a change

`act` and `plan_change` ask the cluster and take time: call them on a thread (a view that is a plain
function runs on one).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from typing import Any, NamedTuple
from urllib.parse import parse_qsl
from weakref import WeakSet

from starlette.exceptions import HTTPException
from starlette.requests import Request

from nsqtools.authd.authority import AuditFile
from nsqtools.authd.passwords import TooManyFailures
from nsqtools.client.consumer import Consumer
from nsqtools.client.options import ClientOptions
from nsqtools.cluster.admin import Action, AdminPlan, Step, StepResult, TopicChange, apply
from nsqtools.cluster.directory import Cluster
from nsqtools.errors import NsqError, OutputError
from nsqtools.http.http_api import HTTPAPI, HTTPAccess
from nsqtools.protocol.names import Address, shown_url
from nsqtools.protocol.text import counted, escape_line, go_json
from nsqtools.web.access import ConsoleUser, Identities, WebSettings
from nsqtools.web.watcher import Watcher


def name_of(change: TopicChange) -> str:
    """Return the name of a change in notifications of nsqadmin."""
    if change.action is Action.TOMBSTONE:
        return "tombstone_topic_producer"
    return f"{change.action.value}_{'channel' if change.channel else 'topic'}"


def plan_change(cluster: Cluster, change: TopicChange) -> AdminPlan:
    """Plan a change, with notes on clients that would recreate a deleted queue.

    Raises as `TopicChange.plan`.
    """
    plan = change.plan(cluster)
    if change.action in (Action.DELETE, Action.TOMBSTONE):
        return plan._replace(notes=(*plan.notes, *recreators(cluster, change, plan)))
    return plan


def recreators(cluster: Cluster, change: TopicChange, plan: AdminPlan) -> Iterable[str]:
    """Yield a line for the connected clients that would recreate the deleted queue."""
    consumers = sum(len(step.clients) for step in plan.steps)
    if consumers:
        yield f"{counted(consumers, 'connected consumer')} will recreate it after a reconnect"
    if change.channel:
        return
    clients = {at: cluster.nsqd(at) for daemon, at, *_ in plan.steps if daemon == "nsqd"}
    answers, _ = cluster.ask(clients, lambda client: client.stats(clients=True))
    for address, stats in answers.items():
        publishing = sum(
            change.topic in dict(producer.pub_counts) for producer in stats.producers or ()
        )
        if publishing:
            yield (
                f"{counted(publishing, 'connected producer')} published to it on {address}, and"
                " will recreate it with the next message"
            )


log = logging.getLogger("nsqtools.web")

# Further notifications are dropped, so that a hanging endpoint does not use up memory.
MAX_PENDING = 1000
# The end waits for one request, which has a timeout of 5 s.
STOP_S = 6.0
MAX_ANSWER_BYTES = 1 << 20


class RequestOrigin(NamedTuple):
    """The origin of a request for a change: user, address, user agent and URL."""

    user: str
    remote: str
    user_agent: str
    url: str


class Notifier:
    """Send notifications to an endpoint ("" for none) until `stop`."""

    def __init__(self, endpoint: str) -> None:
        # As with all addresses, the default scheme is http.
        self._endpoint = f"http://{endpoint}" if endpoint and "://" not in endpoint else endpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nsq-notifier")
        # Includes the notification that is being sent.
        self._pending: set[Future[None]] = set()

    def stop(self) -> None:
        """Send pending notifications for at most `STOP_S`, and log the number of the others."""
        _, unsent = wait(list(self._pending), STOP_S)
        self._thread.shutdown(wait=False, cancel_futures=True)
        if unsent:
            self._log_failure(f"{counted(len(unsent), 'notification')} not sent")

    def notify(self, change: TopicChange, origin: RequestOrigin) -> None:
        """Queue nsqadmin's document about a change for sending."""
        if not self._endpoint:
            return
        if len(self._pending) > MAX_PENDING:
            self._log_failure("a notification is dropped, too many are pending")
            return
        document = {
            "action": name_of(change),
            "topic": change.topic,
            "channel": change.channel,
            "node": change.node,
            "timestamp": int(time.time()),
            "user": origin.user,
            "remote_ip": origin.remote,
            "user_agent": origin.user_agent,
            "url": origin.url,
            "via": socket.gethostname(),
        }
        for optional in ("channel", "node", "user"):
            if not document[optional]:
                del document[optional]
        future = self._thread.submit(self._send, go_json(document))
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def _log_failure(self, problem: str) -> None:
        log.warning("cannot notify %s (%s)", shown_url(self._endpoint), problem)

    def _send(self, body: bytes) -> None:
        import ssl

        tls = ssl.create_default_context() if self._endpoint.startswith("https:") else None
        access = HTTPAccess(max_body_bytes=MAX_ANSWER_BYTES, tls=tls)
        with HTTPAPI(self._endpoint, access) as api:
            try:
                api.send(body)
            except NsqError as exc:
                self._log_failure(escape_line(str(exc)[:200]))


TOKEN_FIELD = "csrf_token"
MAX_FIELDS = 100


class WebContext:
    """The state that pages, API and /metrics share; see the module.

    ``options`` are for connections to nsqd that show messages. Raises `ConfigurationError` for an
    invalid password file, and `OutputError` for an audit log that is not writable.
    """

    def __init__(self, settings: WebSettings, cluster: Cluster, options: ClientOptions) -> None:
        self.settings = settings
        self.cluster = cluster
        self.options = options
        self.identities = Identities(settings)
        self._audit_file = AuditFile(settings.audit_log)
        self.notifier = Notifier(settings.notification_http_endpoint)
        self.watcher = Watcher(cluster, settings.refresh_s)
        self.listening = WeakSet[Consumer]()

    def limited_to(self, cluster: Cluster) -> WebContext:
        """Return the context of a user who sees only ``cluster``; identities and logs are shared.

        The caller starts its watcher, and stops it.
        """
        context = copy(self)
        context.cluster = cluster
        context.watcher = Watcher(cluster, self.settings.refresh_s)
        context.listening = WeakSet[Consumer]()
        return context

    def listen(self, consumer: Consumer) -> None:
        """Register a consumer, so that `stop` stops it: the server waits for its page."""
        self.listening.add(consumer)
        if self.watcher.is_stopped:
            consumer.begin_stop()

    def stop(self) -> None:
        """End sampling, and the consumers that show messages."""
        self.watcher.stop()
        for consumer in list(self.listening):
            consumer.begin_stop()

    def user(self, request: Request) -> ConsoleUser:
        """Return the user of a request."""
        user: ConsoleUser = request.scope["nsq.user"]
        return user

    async def is_still_authorized(self, request: Request) -> bool:
        """Return whether the user still has access. Users are removed while pages are open."""
        try:
            return self.user(request) == await self.identities.authenticate(request)
        except TooManyFailures:
            return False

    def audit(self, state: str, action: str, origin: RequestOrigin, **fields: Any) -> None:
        """Write a line of ``--audit-log`` about a change, or about the reading of messages.

        Raises `OutputError`.
        """
        self._audit_file.write(
            state=state,
            action=action,
            user=origin.user or None,
            remote=origin.remote,
            user_agent=origin.user_agent,
            **fields,
        )

    def audit_result(self, state: str, action: str, origin: RequestOrigin, **fields: Any) -> None:
        """Write a line about a change that has been made; an error must not fail the request."""
        try:
            self.audit(state, action, origin, **fields)
        except OutputError as exc:
            log.error("%s", exc)

    def log_reading(self, request: Request, topic: str, channel: str) -> None:
        """Log that a user reads messages, in the audit log too. Raises `OutputError`."""
        origin = self.origin(request)
        subject = {"topic": topic, "channel": channel or None}
        self.audit("begun", "read_messages", origin, **subject)
        log.info("%r at %s reads messages of %s", origin.user, origin.remote, topic)

    def token(self, request: Request) -> str:
        """Return the token for the field `TOKEN_FIELD` of a form that changes something."""
        return self.identities.token(self.user(request))

    async def form(self, request: Request) -> dict[str, str]:
        """Return the fields of a posted form, the last of each name.

        Raises ``HTTPException`` 403 without the right token, and 400 for an invalid form.
        """
        kind = request.headers.get("content-type", "")
        if not kind.startswith("application/x-www-form-urlencoded"):
            raise HTTPException(400, "not a form")
        try:
            body = (await request.body()).decode("ascii")
            fields = dict(parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FIELDS))
        except ValueError:
            raise HTTPException(400, "not a form") from None
        if not self.identities.is_token(self.user(request), fields.pop(TOKEN_FIELD, "")):
            raise HTTPException(403, "the form is too old; load the page again")
        return fields

    def check_changes(self, request: Request) -> None:
        """Raise ``HTTPException`` 403 unless the user may make changes."""
        if self.user(request).may_change:
            return
        if not self.settings.allow_changes:
            raise HTTPException(403, "this console is read-only (--allow-changes)")
        raise HTTPException(403, "only users of --admin-user may do this")

    def check_change(self, request: Request, change: TopicChange) -> None:
        """Raise ``HTTPException`` 403 unless the user may make this change."""
        self.check_changes(request)
        if not self.user(request).may_change_queue(change.topic, change.channel):
            raise HTTPException(403, "the users file does not let you change this")

    def act(self, request: Request, change: TopicChange) -> list[StepResult]:
        """Plan a change for the current state, carry it out, and log it.

        A daemon that did not answer the plan counts as failed. Raises ``HTTPException`` 403, and
        `NsqError` if nothing could be done.
        """
        self.check_change(request, change)
        plan = plan_change(self.cluster, change)
        name, origin = name_of(change), self.origin(request)
        names = {name: getattr(change, name) or None for name in ("topic", "channel", "node")}
        self.audit("begun", name, origin, **names)
        results = apply(self.cluster, plan)
        for address, error in plan.failures:
            queue = change.action, change.topic, change.channel
            step = Step(
                "nsqlookupd" if address in self.cluster.lookupds else "nsqd", address, *queue
            )
            results.append(StepResult(step, error))
        failed = sum(result.error is not None for result in results)
        state = "done" if not failed else "partly" if failed < len(results) else "failed"
        steps = [
            {
                "daemon": step.daemon,
                "address": step.address,
                "action": step.action.value,
                "error": error and str(error),
            }
            for step, error in results
        ]
        self.audit_result(state, name, origin, **names, steps=steps)
        if state != "failed":
            self.notifier.notify(change, origin)
        return results

    def origin(self, request: Request) -> RequestOrigin:
        """Return the origin of a request."""
        client = request.client
        # The address from a proxy's header has no port.
        host = client.host if client else ""
        scheme = "https" if request.headers.get("x-scheme") == "https" else request.url.scheme
        url = f"{scheme}://{request.headers.get('host', '')}{request.url.path}"
        return RequestOrigin(
            self.user(request).name,
            str(Address(*client)) if client and client.port else host,
            request.headers.get("user-agent", ""),
            url,
        )
