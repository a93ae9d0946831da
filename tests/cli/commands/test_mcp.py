"""``nsq mcp`` as an assistant uses it: with the MCP client, on an embedded nsqd.

The packages of MCP are imported inside the tests, as every worker of a run imports this file.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from plugins.cli import NSQ, RunNsq, all_commands
from plugins.http_server import MakeScripted
from plugins.servers import AnyNsqd, Nsqd

if TYPE_CHECKING:
    from mcp import ClientSession

EVIL = "\u202eignore\x1b[2J" + "x" * 5000


@pytest.fixture
def nsqd(embedded_nsqd: AnyNsqd) -> Nsqd:
    nsqd = embedded_nsqd()
    nsqd.create_channel("orders", "billing")
    nsqd.publish("orders", EVIL.encode())
    return nsqd


class Assistant:
    """Calls tools: ``assistant("topic_info", topic="orders")``. A failure returns its text."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session

    async def __call__(self, name: str, **arguments: Any) -> Any:
        result = await self.session.call_tool(name, arguments)
        text = result.content[0].text  # type: ignore[union-attr]
        assert text.isascii()
        return text if result.is_error else json.loads(text)


def talk(nsqd: Nsqd, environ: dict[str, str], conversation: Any, *flags: str) -> None:
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    environ = {
        "NSQ_NSQD_HTTP_ADDRESS": nsqd.http_address,
        "NSQ_NSQD_TCP_ADDRESS": nsqd.tcp_address,
        **environ,
    }

    async def run() -> None:
        command, *args = [*NSQ, "mcp", *flags]
        server = StdioServerParameters(command=command, args=args, env=environ)
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            await conversation(Assistant(session))

    asyncio.run(run())


def test_tools_have_the_secret_of_the_environment(
    nsqd: Nsqd, nsq_env: dict[str, str], scripted_lookupd: MakeScripted
) -> None:
    lookupd = scripted_lookupd()
    lookupd.answer = {"topics": [], "producers": []}
    secret = {"NSQ_AUTH_SECRET": "hush", "NSQ_LOOKUPD_AUTHORIZATION": "true"}
    environ = {**nsq_env, **secret, "NSQ_LOOKUPD_HTTP_ADDRESS": lookupd.address}

    async def conversation(assistant: Assistant) -> None:
        await assistant("topic_list")

    talk(nsqd, environ, conversation)
    assert {request.headers["Authorization"] for request in lookupd.requests} == {"Bearer hush"}


def test_no_module_of_the_current_directory_is_run(
    nsq_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsqtools.cli.running.mcp_server import Tools

    (tmp_path / "typer.py").write_text("raise SystemExit('not typer')")
    monkeypatch.chdir(tmp_path)

    tools = Tools(nsq_env, allow_changes=False, show_messages=False)
    assert asyncio.run(tools.call("config_profiles", {}))["exit_status"] == 0


def test_without_flags_no_tool_changes_queues_or_shows_bodies(
    nsqd: Nsqd, nsq_env: dict[str, str]
) -> None:
    async def conversation(assistant: Assistant) -> None:
        tools = {tool.name: tool for tool in (await assistant.session.list_tools()).tools}
        assert {"check", "stat", "topic_info", "channel_empty"} <= tools.keys()
        assert tools.keys().isdisjoint({"peek", "tail", "pub", "archive_cat", "drain"})
        assert tools["check"].annotations.read_only_hint  # type: ignore[union-attr]
        verdict = await assistant("check", window="100ms", topic=["orders"])
        assert "no consumers" in json.dumps(verdict["output"])
        assert (await assistant("stat"))["output"]["queues"][0]["topic"] == "orders"

        answer = await assistant("channel_empty", topic="orders", channel=["billing"])
        assert (answer["plan"]["output"][0]["action"], "token" in answer) == ("empty", False)
        refused = await assistant("channel_empty", topic="orders", channel=["billing"], token="x")
        assert "changes are not allowed" in refused
        missing = await assistant("topic_info", topic="--help")  # a name, not an option
        assert "topic --help does not exist" in missing
        assert "was unexpected" in await assistant("topic_list", nsqd_http_address="elsewhere:1")
        assert "there is no tool" in await assistant("peek", topic="orders", channel="billing")

    talk(nsqd, nsq_env, conversation)
    assert nsqd.depth("orders", "billing") == 1


def test_a_plan_is_executed_once_and_only_while_it_is_unchanged(
    nsqd: Nsqd, nsq_env: dict[str, str]
) -> None:
    from nsqtools.cli.running.mcp_server import MAX_BODY

    async def conversation(assistant: Assistant) -> None:
        peeked = await assistant("peek", topic="orders", channel="billing", count=1)
        [message] = peeked["output"]
        assert message["body"] == EVIL[:MAX_BODY] + "..."
        too_many = await assistant("peek", topic="orders", channel="billing", count=99)
        assert "99 is greater than the maximum of 20" in too_many

        queue = {"topic": "orders", "channel": ["billing"]}
        token = (await assistant("channel_empty", **queue))["token"]
        nsqd.publish("orders", b"another")
        assert "not of this plan" in await assistant("channel_empty", token=token, **queue)
        token = (await assistant("channel_empty", **queue))["token"]
        assert "not of this plan" in await assistant("channel_delete", token=token, **queue)
        token = (await assistant("channel_empty", **queue))["token"]
        [step] = (await assistant("channel_empty", token=token, **queue))["output"]
        assert (step["done"], step["messages"]) == (True, 2)
        assert "not of this plan" in await assistant("channel_empty", token=token, **queue)

    talk(nsqd, nsq_env, conversation, "--allow-changes", "--show-messages")
    assert nsqd.depth("orders", "billing") == 0


def test_flags_of_tools_follow_the_impact_of_their_commands() -> None:
    from nsqtools.cli.running.mcp_server import command_tools

    impacts = {name: command.impact for name, command in all_commands().items()}
    assert set(impacts.values()) == {"reads", "changes", "destroys"}
    tools = command_tools(show_messages=True).values()
    for tool in tools:
        assert tool.is_change is (tool.impact != "reads" and tool.name != "peek")
        assert ("--yes" in tool.flags) is (tool.impact == "destroys")


def test_help_llm_describes_every_command_with_its_impact(run_nsq: RunNsq) -> None:
    text = run_nsq(["--help-llm"]).out.decode()
    for name, command in all_commands().items():
        if name not in ("lookup", "info"):
            assert f"\n## nsq {name} ({command.impact})\n" in text
    assert text.count("`--tls / --no-tls`") == 1  # options that many commands share
