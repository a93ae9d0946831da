"""``nsq authd``: the auth server of nsqd, and its users file."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context

from nsqtools.cli.options.connection import (
    HTTPS_FLAGS,
    AddressFlags,
    ClusterConnection,
    LookupFlags,
    refuse_flags,
)
from nsqtools.cli.options.params import Json, parse_listen
from nsqtools.cli.parsing.binding import opt
from nsqtools.cli.render.output import write_json, write_text
from nsqtools.cli.running.runtime import ExitStatus, Runtime, Session, serving
from nsqtools.errors import ConfigurationError, NotFoundError, OutputError
from nsqtools.protocol.text import counted

if TYPE_CHECKING:
    from nsqtools.authd.users import Grant

TOKEN_BYTES = 32

FILTER_FLAGS = (
    "listen_tls_client_ca",
    "consumer_opt",
    *(name for name in AddressFlags.__annotations__ if not name.endswith("profile")),
    *LookupFlags.__annotations__,
    *HTTPS_FLAGS,
)

UsersFile = Annotated[Path, Argument(metavar="FILE", help="The users file, in TOML.")]
UserName = Annotated[str | None, Argument(metavar="USER", help="Name of the user.")]
QueueArgument = Annotated[
    str | None, Argument(metavar="TOPIC[/CHANNEL]", help="Topic to publish to, or its channel.")
]


def serve(
    users: Path = opt("FILE", "The users file; read again when it changes."),
    listen: str = opt(
        "[HOST:]PORT", "Where to answer nsqd.", default="127.0.0.1:4181", parser=parse_listen
    ),
    filter_: str | None = opt(
        "--filter [HOST:]PORT",
        "Serve users the part of the cluster that they may see.",
        parser=parse_listen,
    ),
    ttl: float = opt("DURATION", "Time for which nsqd remembers an answer.", default="5m"),
    identity_url: str = opt("URL", "Page of a user, with {user} for the name.", default=""),
    audit_log: Path | None = opt("FILE", "Append a line of JSON for each decision."),
    listen_tls_cert: Path | None = opt("FILE", "Serve https with this certificate, PEM."),
    listen_tls_key: Path | None = opt("FILE", "Key of that certificate, PEM."),
    listen_tls_client_ca: Path | None = opt(
        "FILE", "CA of client certificates that name users of the filter."
    ),
    *,
    context: Context,
    cluster: ClusterConnection,
    runtime: Session,
) -> int:
    """Answer nsqd which topics and channels a client may use.

    Start each nsqd with --auth-http-address and the address of --listen. nsqd states the client's
    address and certificate, so let only nsqd reach --listen; it has /health and /metrics, too.

    --filter serves /lookup, /topics, /channels, /nodes, /stats and /metrics of the cluster to
    everyone who has a secret, limited to the topics and channels of the user.

    Examples:
        nsq authd serve --users users.toml
        nsq authd serve --users users.toml --filter :4183 --lookupd-http-address lookup:4161
    """
    from nsqtools.authd.auth_api import AnswerSettings
    from nsqtools.authd.daemon import AuthDaemon, AuthdSettings
    from nsqtools.http.listen import listen as bind
    from nsqtools.http.listen import listen_host

    if filter_ is None:
        refuse_flags(context, FILTER_FLAGS, "needs --filter")
    for address in filter(None, (listen, filter_)):
        listen_host(address)
    settings = AuthdSettings(
        users=users,
        answer=AnswerSettings(int(ttl), identity_url),
        audit_log=audit_log,
        tls_cert=listen_tls_cert,
        tls_key=listen_tls_key,
        tls_client_ca=listen_tls_client_ca,
    )
    with ExitStack() as stack:
        listener = stack.enter_context(bind(listen))
        filter_listener = opened = None
        if filter_ is not None:
            filter_listener = stack.enter_context(bind(filter_))
            opened = stack.enter_context(cluster.open())
        daemon = AuthDaemon(settings, listener, filter_listener, opened)
        turn, signals = stack.enter_context(serving(runtime, daemon.stop))
        runtime.info(f"nsq: serving {daemon.url}/auth")
        if daemon.filter_url:
            runtime.info(f"nsq: serving {daemon.filter_url} to users")
        daemon.run(turn)
    return signals.status()


def hash_(
    new: str | None = opt("USER", "Make a random token, and the entry of this user."),
    token_file: Path | None = opt("FILE", "Write the token to this new file, mode 0600."),
    *,
    runtime: Session,
) -> None:
    """Make a random token, or hash a secret that a person chose.

    With --new, the entry for the users file goes to stdout, and the token to --token-file or to
    stderr. It is shown once. Without --new, a text is asked for, or read from a pipe, and the line
    for the entry is printed. A client sends such a secret as USER:SECRET.

    Examples:
        nsq authd hash --new bob --token-file bob.token >> users.toml
        nsq authd hash < secret.txt
    """
    from nsqtools.authd.passwords import hash_password
    from nsqtools.authd.users import hash_token, parse_users, toml_text

    if new is None:
        if token_file is not None:
            raise ConfigurationError("--token-file needs --new")
        write_text(runtime, f'password = "{hash_password(_chosen_secret(runtime))}"\n')
        return
    from secrets import token_urlsafe

    token = token_urlsafe(TOKEN_BYTES)
    name = new if new.replace("-", "").isalnum() and new.isascii() else toml_text(new)
    entry = f'[users.{name}]\ntokens = ["{hash_token(token)}"]\n'
    parse_users(entry, "--new")
    if token_file is None:
        runtime.print_error(f"token of {new}: {token}")
    else:
        _write_token(token_file, token)
    write_text(runtime, entry)


def _write_token(path: Path, token: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
    except OSError as exc:
        raise OutputError(f"cannot write {path} ({exc.strerror})") from exc


def _chosen_secret(runtime: Runtime) -> str:
    secret = ""
    with suppress(EOFError, UnicodeError):
        if runtime.stdin.isatty():
            import getpass

            secret = getpass.getpass("Secret: ")
        else:
            secret = runtime.stdin.read().removesuffix("\n")
    if not secret:
        raise ConfigurationError("the secret is empty", hint="Give one line of text in UTF-8.")
    return secret


def check(
    file: UsersFile,
    user: UserName = None,
    queue: QueueArgument = None,
    json: Json = False,
    *,
    runtime: Session,
) -> int:
    """Check a users file, and explain what a user may do.

    Without USER, only the file is checked. TOPIC asks whether the user may publish to it,
    TOPIC/CHANNEL whether the user may subscribe. The exit status is 0 for yes, and 5 for no.

    Examples:
        nsq authd check users.toml
        nsq authd check users.toml bob orders/audit
    """
    from nsqtools.authd.authority import JSONTokens, load_users
    from nsqtools.protocol.names import check_channel, check_topic

    users = load_users(file)
    JSONTokens(users.issuers, str(file))
    if user is None:
        runtime.info(f"nsq: {file} is good: {counted(len(users.by_name), 'user')}")
        return ExitStatus.DONE
    if queue is None:
        raise ConfigurationError("no topic given", hint="nsq authd check FILE USER TOPIC[/CHANNEL]")
    if (entry := users.by_name.get(user)) is None:
        raise NotFoundError(f"{file} has no user {user}")
    topic, slash, channel = queue.partition("/")
    check_topic(topic)
    if slash:
        check_channel(channel)
        grant, permission = entry.grant_to_subscribe(topic, channel), "subscribe"
    else:
        grant, permission = entry.grant_to_publish(topic), "publish"
    document = {
        "user": user,
        "permission": permission,
        "topic": topic,
        "channel": channel or None,
        "allowed": grant is not None,
        "topic_pattern": grant and grant.topic.text,
        "channel_patterns": [each.text for each in grant.channels] if grant else [],
        "needs_tls": entry.needs_tls,
        "common_name": entry.common_name or None,
        "addresses": [str(network) for network in entry.addresses],
    }
    if json:
        write_json(runtime, document)
    else:
        write_text(runtime, _explained(user, permission, queue, grant))
        write_text(runtime, "".join(f"  only {each}\n" for each in entry.conditions()))
    return ExitStatus.DONE if grant else ExitStatus.REFUSED


def _explained(user: str, permission: str, queue: str, grant: Grant | None) -> str:
    verb = f"{permission} to {queue}"
    if grant is None:
        return f"no: {user} may not {verb}: no pattern of the user matches\n"
    patterns = grant.topic.text
    if grant.channels:
        patterns += f" with channels {', '.join(channel.text for channel in grant.channels)}"
    return f"yes: {user} may {verb}: {patterns}\n"


def convert(
    file: Annotated[Path, Argument(metavar="FILE", help="permissions.csv of pynsqauthd.")],
    *,
    runtime: Session,
) -> None:
    """Convert permissions.csv of pynsqauthd to a users file.

    Each login is hashed as a token, and its clients send what they sent before. Give the entries
    better names than user-1, and replace logins that someone could guess by new tokens.

    Examples:
        nsq authd convert permissions.csv > users.toml
    """
    from nsqtools.authd.authority import read_text_file
    from nsqtools.authd.users import convert_permissions, parse_users

    text = convert_permissions(read_text_file(file), str(file))
    parse_users(text, "the converted file")
    write_text(runtime, text)
