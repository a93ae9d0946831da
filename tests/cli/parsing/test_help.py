"""Help: that of nsq and of each command, from one layout, within 100 columns."""

from __future__ import annotations

import re
from typing import Annotated

import pytest
from plugins.cli import Given, RunNsq, TerminalNsq, all_commands
from typer import Argument

from nsqtools.cli import registry
from nsqtools.cli.main import quick_answer
from nsqtools.cli.parsing import app
from nsqtools.cli.parsing.help import HelpPage, render
from nsqtools.errors import ConfigurationError

COMMANDS = all_commands()
PARSED = [name for name, command in COMMANDS.items() if not command.raw]
GROUPS = [name for name, entry in registry.COMMANDS.items() if isinstance(entry, registry.Group)]
EVERYTHING = ["", *GROUPS, *(name for name in COMMANDS if name != "__complete_line")]

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
        is_shown = not (isinstance(entry, registry.Command) and entry.hidden)
        assert (f"  {name} " in bare.out.decode()) is is_shown
        assert (entry.help in bare.out.decode()) is is_shown


def test_the_examples_are_of_commands_that_exist() -> None:
    commands = {example.split("nsq ")[1].split()[0] for example in registry.ROOT_EXAMPLES}

    assert commands
    assert commands <= set(registry.COMMANDS)


def test_the_full_renderer_gives_the_same_page_as_the_front_door(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["--help"]) == 0

    assert capsys.readouterr().out == quick_answer(["--help"])


def check_page(page: str, name: str, width: int) -> None:
    lines = page.splitlines()
    assert [line for line in lines if len(line) > width] == []
    examples = lines[lines.index("Examples:") + 1 :]
    assert any(f"nsq {name}" in example for example in examples)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_help_has_an_example_and_fits_100_columns(run_nsq: RunNsq, name: str) -> None:
    status, out, err = run_nsq([*name.split(), "--help"])

    assert (status, err) == (0, "")
    check_page(out.decode(), name, 100)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_help_fits_a_terminal_of_80_columns(
    nsq_on_a_terminal: TerminalNsq, name: str
) -> None:
    shown = nsq_on_a_terminal([*name.split(), "--help"], columns=80).read()

    check_page(re.sub(r"\x1b\[\d*m", "", shown), name, 80)


def test_the_brief_help_of_every_command_is_at_most_40_lines_of_80_columns(
    run_nsq: RunNsq,
) -> None:
    for name in PARSED:
        page = run_nsq([*name.split(), "-h"]).out.decode()
        lines = page.splitlines()
        assert len(lines) <= 40, page
        assert max(map(len, lines)) <= 80, page
        assert lines[-1] == "--help: all options", page
        assert page.index("Examples:") < page.index("Options:"), page


def test_a_long_example_goes_on_after_a_backslash_and_never_inside_quotes() -> None:
    page = HelpPage("nsq", "", {}, ["nsq tail -t clicks --grep 'x -y | z' --count 10 | wc -l"])

    examples = render(page, colour=False, width=40).partition("Examples:\n")[2]

    assert examples == ("  nsq tail -t clicks --grep 'x -y | z' \\\n      --count 10 | wc -l\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_registry_says_what_the_docstring_says(name: str) -> None:
    entry = COMMANDS[name]

    assert (entry.load().__doc__ or "").splitlines()[0] == entry.help


def test_a_terminal_gets_colour_and_its_own_width(nsq_on_a_terminal: TerminalNsq) -> None:
    child = nsq_on_a_terminal(["schema", "--help"], columns=60)

    text = child.read()

    assert "\x1b[1mUsage:\x1b[0m" in text


def test_no_color_is_honoured_on_a_terminal(nsq_on_a_terminal: TerminalNsq) -> None:
    for arguments in (["--help"], ["schema", "--help"], ["schema"]):
        assert "\x1b[3" not in nsq_on_a_terminal(arguments, env={"NO_COLOR": "1"}).read()


def topic_create(name: Annotated[str, Argument(metavar="TOPIC")]) -> None:
    """Create a topic."""
    print(f"created {name}")


@pytest.fixture
def topic_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group ``nsq topic`` with the command ``create`` and one that cannot be imported."""
    group = registry.Group(
        "Work on topics.",
        {
            "create": Given(topic_create, raw=False),
            "delete": registry.Command("no.such.module:delete", "Delete a topic."),
        },
    )
    monkeypatch.setitem(registry.COMMANDS, "topic", group)


@pytest.mark.usefixtures("topic_group")
def test_a_group_alone_shows_its_commands_and_imports_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["topic"]) == 0
    alone = capsys.readouterr().out
    assert app.run(["topic", "--help"]) == 0

    assert capsys.readouterr().out == alone
    assert "Usage: nsq topic COMMAND [OPTIONS]" in alone
    assert "  delete  Delete a topic.\n" in alone


@pytest.mark.usefixtures("topic_group")
def test_a_command_of_a_group_runs_and_has_its_own_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app.run(["topic", "create", "clicks"])
    app.run(["topic", "create", "--help"])

    out = capsys.readouterr().out
    assert out.startswith("created clicks\nUsage: nsq topic create [OPTIONS] TOPIC\n")


@pytest.mark.usefixtures("topic_group")
@pytest.mark.parametrize(
    ("line", "complaint", "hint"),
    [
        (
            "topic creat x",
            "no such command 'creat'. Did you mean 'create'?",
            "See nsq topic --help.",
        ),
        ("topic create", "missing argument 'TOPIC'", "See nsq topic create --help."),
    ],
)
def test_errors_in_a_group_point_to_its_help(line: str, complaint: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        app.run(line.split())

    assert (str(caught.value), caught.value.hint) == (complaint, hint)
