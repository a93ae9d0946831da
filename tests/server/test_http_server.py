"""What the HTTP side relies on in uvicorn that uvicorn does not promise."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


def test_the_protocol_of_uvicorn_is_made_from_a_configuration_and_a_state() -> None:
    parameters = inspect.signature(H11Protocol).parameters
    assert list(parameters)[:3] == ["config", "server_state", "app_state"]
    assert callable(H11Protocol.shutdown)
    state = ServerState()
    assert (state.connections, state.tasks) == (set(), set())
    assert callable(uvicorn.Config.load)


def test_a_later_uvicorn_is_not_installed_untried() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    wanted = [each for each in pyproject["project"]["dependencies"] if "uvicorn" in each]
    assert [each.partition(",<")[1] for each in wanted] == [",<"]
