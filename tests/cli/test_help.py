"""Help: the front door's and each command's, from one layout, within 100 columns."""

from __future__ import annotations

import pytest
from plugins.cli import RunNsq, TerminalNsq

from nsqtools.cli import registry
from nsqtools.cli.help import HelpPage, render

COMMANDS = [
    name for name, entry in registry.COMMANDS.items() if isinstance(entry, registry.Command)
]
PARSED = [name for name in COMMANDS if not registry.COMMANDS[name].raw]

PAGE = HelpPage(
    "nsq tail [OPTIONS]",
    "Print messages as they arrive, one after the other.\n\n    kept  as it is",
    {"Options": [("-t, --topic TOPIC", "Topic to read. [required]"), ("--" + "x" * 40, "Long.")]},
    ["nsq tail -t clicks"],
)


def test_a_page_has_usage_description_sections_and_examples() -> None:
    assert render(PAGE, colour=False, width=60) == (
        "Usage: nsq tail [OPTIONS]\n"
        "\n"
        "Print messages as they arrive, one after the other.\n"
        "\n"
        "    kept  as it is\n"
        "\n"
        "Options:\n"
        "  -t, --topic TOPIC                 Topic to read.\n"
        "                                    [required]\n"
        "  --xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n"
        "                                    Long.\n"
        "\n"
        "Examples:\n"
        "  nsq tail -t clicks\n"
    )


def test_colour_changes_nothing_but_the_colour() -> None:
    import re

    coloured = render(PAGE, colour=True, width=80)

    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == render(PAGE, colour=False, width=80)


@pytest.mark.parametrize("width", [20, 40, 80, 500])
def test_text_is_wrapped_and_never_wider_than_100(width: int) -> None:
    page = HelpPage("nsq", "word " * 100, {"Options": [("--option", "word " * 100)]})

    lines = render(page, colour=False, width=width).splitlines()

    assert max(map(len, lines)) <= min(width, 100)


def test_bare_nsq_and_help_show_every_command(run_nsq: RunNsq) -> None:
    bare = run_nsq([])

    assert bare == run_nsq(["--help"])
    assert bare.status == 0
    for name, entry in registry.COMMANDS.items():
        assert f"  {name} " in bare.out.decode()
        assert entry.help in bare.out.decode()


def test_the_full_renderer_gives_the_same_page_as_the_front_door(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from nsqtools.cli import app
    from nsqtools.cli.main import at_the_door

    assert app.run(["--help"]) == 0

    assert capsys.readouterr().out == at_the_door(["--help"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_fits_100_columns(run_nsq: RunNsq, name: str) -> None:
    status, out, err = run_nsq([name, "--help"])

    lines = out.decode().splitlines()
    assert (status, err) == (0, "")
    assert [line for line in lines if len(line) > 100] == []
    assert any(line.strip().startswith(f"nsq {name}") for line in lines if "Usage" not in line)


@pytest.mark.parametrize("name", PARSED)
def test_the_registry_says_what_the_docstring_says(name: str) -> None:
    entry = registry.COMMANDS[name]
    assert isinstance(entry, registry.Command)

    assert (entry.load().__doc__ or "").splitlines()[0] == entry.help


def test_a_terminal_gets_colour_and_its_own_width(nsq_on_a_terminal: TerminalNsq) -> None:
    child = nsq_on_a_terminal(["options", "--help"], columns=60)

    text = child.read()

    assert "\x1b[1mUsage:\x1b[0m" in text


def test_no_color_is_honoured_on_a_terminal(nsq_on_a_terminal: TerminalNsq) -> None:
    for arguments in (["--help"], ["options", "--help"], ["options"]):
        assert "\x1b[3" not in nsq_on_a_terminal(arguments, env={"NO_COLOR": "1"}).read()
