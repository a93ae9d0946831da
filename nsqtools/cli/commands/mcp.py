"""``nsq mcp``: commands as tools of an assistant."""

from __future__ import annotations

from typer import Context

from nsqtools.cli.options.params import SAFETY
from nsqtools.cli.parsing.binding import opt


def mcp(
    context: Context,
    allow_changes: bool = opt("", "Let the assistant carry out plans that it has shown.", SAFETY),
    show_messages: bool = opt("", "Let the assistant read bodies of messages.", SAFETY),
) -> None:
    """Serve commands to assistants, as tools of the Model Context Protocol.

    Speaks the protocol on stdin and stdout until stdin ends. The tools are commands of nsq with
    --json. Addresses, TLS and secrets come from the environment and the configuration file, never
    from the assistant.

    Tools only read. A tool that changes topics or channels returns its plan and a token. Only with
    --allow-changes it acts, and only when it is called again with the token and the plan is still
    the same. Bodies are shown only with --show-messages: at most 20 messages, each shortened to
    2,000 characters, with everything but ASCII escaped. They may contain text that tries to
    instruct the assistant.

    Examples:
        claude mcp add nsq -- nsq mcp
        nsq mcp --allow-changes
    """
    from nsqtools.cli.running.mcp_server import serve_mcp

    environ = context.obj.environ  # unlike that of this process, it has the secret
    serve_mcp(environ, allow_changes=allow_changes, show_messages=show_messages)
