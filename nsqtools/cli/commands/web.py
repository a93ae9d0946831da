"""``nsq web``: the cluster in the browser."""

from __future__ import annotations

import logging
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from nsqtools.cli.options.connection import ViewedCluster
from nsqtools.cli.options.params import SAFETY, parse_listen
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_text
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, serving
from nsqtools.errors import ConfigurationError

if TYPE_CHECKING:
    from nsqtools.web.access import WebSettings

log = logging.getLogger("nsqtools")

ACCESS = "Access"
REPORTING = "Reporting"


class Printed(Enum):
    """What is printed in place of serving."""

    dashboard = "dashboard"
    alerts = "alerts"
    password = "password"


def web(
    listen: str = opt(
        "[HOST:]PORT",
        "Where to serve; port 0 takes any free one.",
        default="127.0.0.1:4171",
        parser=parse_listen,
    ),
    refresh: float = opt("DURATION", "Time between two samples.", default="2s"),
    base_path: str = opt("PATH", "Serve under this path.", default=""),
    print_: Printed | None = opt(
        "dashboard|alerts|password",
        "Print a Grafana dashboard, Prometheus alerts, or a line for --auth.",
    ),
    allow_changes: bool = opt(
        "", "Let users create, pause, empty and delete; else it is read-only.", SAFETY
    ),
    show_messages: bool = opt("", "Let users read messages.", SAFETY),
    auth: Path | None = opt("FILE", "Ask for a password; FILE has lines of USER:HASH.", ACCESS),
    users: Path | None = opt(
        "FILE", "Users of nsq authd: each sees and changes what it may.", ACCESS
    ),
    admin_user: list[str] | None = opt("USER", "Only this user may make changes.", ACCESS),
    acl_http_header: str = opt(
        "NAME", "The header in which a trusted proxy names the user.", ACCESS, "X-Forwarded-User"
    ),
    trusted_proxy: list[str] | None = opt(
        "CIDR", "Believe that header from these addresses.", ACCESS
    ),
    allowed_host: list[str] | None = opt(
        "NAME", "A name under which browsers may open it.", ACCESS
    ),
    listen_tls_cert: Path | None = opt("FILE", "Serve https with this certificate, PEM.", ACCESS),
    listen_tls_key: Path | None = opt("FILE", "Key of that certificate, PEM.", ACCESS),
    audit_log: Path | None = opt("FILE", "Append a line of JSON for each change.", REPORTING),
    notification_http_endpoint: str = opt(
        "URL", "POST a document to this URL for each change, as nsqadmin does.", REPORTING, ""
    ),
    *,
    cluster: ViewedCluster,
    runtime: Session,
) -> int:
    """Show the cluster in the browser, with nsqadmin's API and /metrics of every queue.

    Runs until it is stopped. It only looks, and only this machine can connect, unless you allow
    more: --allow-changes lets users change topics and channels, and --listen another address. On
    an address that others reach, changes need --users, --auth, or --admin-user with
    --trusted-proxy.

    --users takes the file of nsq authd serve. Users log in with their name and token or secret.
    Each sees the topics of its entry, changes topics that it may publish to and channels that it
    may subscribe to, and reads messages that it may subscribe to: see nsq-auth(7).

    Rates, depths and latency are kept for 6 hours, in memory. /metrics has every topic and channel
    of all nsqd for Prometheus, which keeps longer; --print has a dashboard and alerts for it. /api
    answers as nsqadmin's does. Without --timeout a daemon has 2 seconds to answer.

    Examples:
        nsq web --lookupd-http-address lookup:4161
        nsq web --allow-changes --audit-log /var/log/nsq-web.jsonl
        nsq web --listen :4171 --auth users --listen-tls-cert cert.pem --listen-tls-key key.pem
        nsq web --print alerts
    """
    from nsqtools.web.access import WebSettings, clean_base_path, parse_networks

    if print_ is not None:
        return _print(print_, runtime)
    settings = WebSettings(
        listen=listen,
        base_path=clean_base_path(base_path),
        allowed_hosts=tuple(allowed_host or ()),
        refresh_s=refresh,
        allow_changes=allow_changes,
        show_messages=show_messages,
        auth_file=auth,
        users_file=users,
        acl_http_header=acl_http_header,
        admin_users=tuple(admin_user or ()),
        trusted_proxies=parse_networks(trusted_proxy or ()),
        audit_log=audit_log,
        notification_http_endpoint=notification_http_endpoint,
        tls_cert=listen_tls_cert,
        tls_key=listen_tls_key,
    )
    from nsqtools.http.listen import listen as bind
    from nsqtools.web.actions import WebContext
    from nsqtools.web.app import WebServer

    with cluster.open() as opened, bind(settings.listen) as listener:
        context = WebContext(settings, opened, cluster.connection.client_options())
        server = WebServer(context, listener)
        _warn(settings)
        with serving(runtime, server.stop) as (turn, signals):
            runtime.info(f"nsq: serving {server.url}")
            if not runtime.quiet:
                logging.getLogger("nsqtools.web").setLevel(logging.INFO)
            _collect_less()
            server.run(turn)
    return signals.status()


def _warn(settings: WebSettings) -> None:
    """Name what makes it less safe than it looks."""
    is_plain = settings.tls_cert is None and not settings.is_local
    if is_plain and settings.has_login and not settings.trusted_proxies:
        log.warning(
            "passwords come to %s in plain text, and anyone on the way can read them: give"
            " --listen-tls-cert, or --trusted-proxy for one that speaks TLS",
            settings.listen,
        )
    if is_plain and settings.show_messages and not settings.has_users:
        log.warning(
            "anyone who reaches %s can read messages (--auth asks for users)", settings.listen
        )


def _collect_less() -> None:
    """Nothing but the console runs in this process. A sample of a large cluster makes objects by
    the ten thousand, all of which live until the next: looking for cycles among them is in vain."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _print(what: Printed, runtime: Runtime) -> int:
    if what is Printed.password:
        text = _password_lines(runtime)
    else:
        from importlib.resources import files

        file = "dashboard.json" if what is Printed.dashboard else "alerts.yaml"
        text = (files("nsqtools.web") / "monitoring" / file).read_text("utf-8")
    write_text(runtime, text)  # in UTF-8, as --auth reads it
    return ExitStatus.DONE


def _password_lines(runtime: Runtime) -> str:
    """Ask for one user on a terminal; on a pipe, read lines of USER:PASSWORD."""
    from nsqtools.authd.passwords import hash_password

    lines = [""]
    with suppress(EOFError, UnicodeError):
        if runtime.stdin.isatty():
            import getpass

            runtime.stderr.write("User: ")
            runtime.stderr.flush()
            text = f"{runtime.stdin.readline().strip()}:{getpass.getpass()}"
        else:
            text = runtime.stdin.read()
        lines = text.encode().decode().splitlines() or lines
    made = ""
    for line in lines:
        user, _, password = line.partition(":")
        if not (user.strip() and password):
            raise ConfigurationError("give lines of USER:PASSWORD, in UTF-8")
        made += f"{user.strip()}:{hash_password(password)}\n"
    return made
