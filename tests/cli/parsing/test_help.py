"""Help of nsq and of each command, in one layout within 100 columns, and suggestions."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from plugins.cli import RunNsq, all_commands
from plugins.clusters import ValidJson
from plugins.servers import Nsqd
from typer import Exit

from nsqtools.cli import registry
from nsqtools.cli.main import quick_answer
from nsqtools.cli.parsing import app
from nsqtools.cli.parsing.app import LazyGroup, command_tree
from nsqtools.cli.parsing.help import CONNECTION_OPTIONS, HelpPage, render_page
from nsqtools.cli.running.runtime import Runtime

COMMANDS = all_commands()
GROUPS = [name for name, entry in registry.COMMANDS.items() if isinstance(entry, registry.Group)]
PARSED = [name for name, command in COMMANDS.items() if not command.raw]
EVERYTHING = ["", *GROUPS, *COMMANDS]


def test_the_root_help_has_real_examples_and_equals_the_quick_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = {example.split("nsq ")[1].split()[0] for example in registry.ROOT_EXAMPLES}
    assert set() < commands <= set(registry.COMMANDS)

    assert app.run(["--help"]) == 0
    assert capsys.readouterr().out == quick_answer(["--help"])


@pytest.mark.parametrize("width", [80, 100])
def test_every_page_has_an_example_and_fits_its_terminal(run_nsq: RunNsq, width: int) -> None:
    for name in EVERYTHING:
        done = run_nsq([*name.split(), "--help"], terminal=True, columns=width)

        lines = re.sub(r"\x1b\[\d*m", "", done.out.decode()).splitlines()
        assert done.status == 0
        assert [line for line in lines if len(line) > width] == [], name
        examples = lines[lines.index("Examples:") + 1 :]
        assert any(f"nsq {name}" in example for example in examples), name


def test_help_is_available_with_every_common_spelling(run_nsq: RunNsq) -> None:
    bare = run_nsq([])
    assert bare == run_nsq(["--help"]) == run_nsq(["help"])
    page = bare.out.decode()
    assert all(f"  {name} " in page for name in registry.LISTED)
    for line in ("-h", "tail -h", "topic -h", "completion -h", "pub -h -vq"):
        assert run_nsq(line.split()).out.startswith(b"Usage: nsq "), line
    for words in ("tail", "topic", "topic list", "completion"):
        page = run_nsq([*words.split(), "--help"])
        assert page.out.startswith(f"Usage: nsq {words} ".encode())
        assert page == run_nsq(["help", *words.split()])


def test_a_deprecated_command_works_with_a_warning_and_is_not_listed(
    run_nsq: RunNsq, valid_json: ValidJson, quick_nsqd: Nsqd
) -> None:
    front_page = run_nsq(["--help"]).out.decode()
    result = run_nsq(["info", f"--nsqd-http-address={quick_nsqd.http_address}", "--json"])

    assert valid_json("info", result.out)
    assert result.err == "nsq: warning: `nsq info` becomes `nsq nodes -o wide` in 0.5\n"
    assert set(registry.DEPRECATED) == {"info", "lookup"}
    for name in registry.DEPRECATED:
        assert f"  {name} " not in front_page
        offered = run_nsq(["__complete_line", "bash", f"nsq {name[:2]}", ":="]).out
        assert name.encode() not in offered


def test_the_brief_help_of_every_command_is_at_most_40_lines_of_80_columns(run_nsq: RunNsq) -> None:
    for name in PARSED:
        page = run_nsq([*name.split(), "-h"]).out.decode()
        lines = page.splitlines()
        assert len(lines) <= 40, page
        assert max(map(len, lines)) <= 80, page
        assert lines[-1] == "--help: all options", page
        assert page.index("Examples:") < page.index("Options:"), page
        assert page.count("[") == page.count("]"), page


def test_a_long_example_is_wrapped_with_a_backslash_outside_quotes() -> None:
    page = HelpPage("nsq", "", {}, ["nsq tail -t clicks --grep 'x -y | z' --count 10 | wc -l"])

    examples = render_page(page, color=False, width=40).partition("Examples:\n")[2]

    assert examples == ("  nsq tail -t clicks --grep 'x -y | z' \\\n      --count 10 | wc -l\n")


def test_the_help_of_the_registry_equals_the_docstring() -> None:
    for name, entry in COMMANDS.items():
        assert (entry.load().__doc__ or "").splitlines()[0] == entry.help, name


def test_a_terminal_gets_color_unless_no_color_is_set(run_nsq: RunNsq) -> None:
    for arguments in (["--help"], ["schema", "--help"], ["schema"]):
        colored = run_nsq(arguments, terminal=True, columns=60).out
        plain = run_nsq(arguments, terminal=True, columns=60, env={"NO_COLOR": "1"}).out
        assert b"\x1b[1m" in colored
        assert b"\x1b[3" not in plain


# Every example of every help page, and therefore of every manual page of a command, is parsed with
# all its options, but not run.


def calls_in(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``nsq`` in a shell command line."""
    part: list[str] = []
    for word in [*shlex.split(line, comments=True), "|"]:
        if word in {"|", "&&", ";", "&"} or word.startswith((">", "<")):
            while part and re.match(r"[A-Z_]+=", part[0]):
                part.pop(0)
            if part[:1] == ["nsq"]:
                yield part[1:]
            part = []
        else:
            part.append(word)


def parse(words: list[str], runtime: Runtime) -> None:
    """Raise the error of a wrong command line."""
    command = command_tree()
    context = command.make_context("nsq", words, obj=runtime)
    while isinstance(command, LazyGroup):
        arguments = [*context._protected_args, *context.args]
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, arguments, parent=context)


def test_the_examples_of_every_help_page_can_be_parsed(tmp_path: Path) -> None:
    settings = tmp_path / ".config" / "nsqtools" / "config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[profiles.staging]\n")
    with (tmp_path / "out").open("w") as out:
        runtime = Runtime(out, out, {"HOME": str(tmp_path)})
        for name, command in COMMANDS.items():
            examples = (command.load().__doc__ or "").partition("Examples:\n")[2]
            lines = re.sub(r"\\\n\s*", " ", examples).splitlines()
            calls = [call for line in lines for call in calls_in(line)]
            assert calls or command.raw, name
            for call in calls:
                with suppress(Exit):  # raised by options that print a list, such as -X list
                    parse(call, runtime)


def test_connection_options_are_accepted_and_described_on_one_page(run_nsq: RunNsq) -> None:
    page = run_nsq(["tail", "--help"]).out.decode()
    assert page.endswith("\nConnection options: man nsq-options\n")
    assert "--tls " in page
    options_page = run_nsq(["help", "options"]).out.decode()
    for name in sorted(CONNECTION_OPTIONS):
        option = "--" + name.replace("_", "-")
        assert option not in page
        assert option in options_page
    result = run_nsq(["tail", "-t", "x", "--tls-ca-file", "/nowhere", "--tls", "--deflate-level=0"])
    assert "no such option" not in result.err


@pytest.mark.parametrize(("typed", "near"), [("--snapy", "--snappy"), ("--header", "")])
def test_only_a_similar_option_is_suggested_for_an_unknown_one(
    run_nsq: RunNsq, typed: str, near: str
) -> None:
    result = run_nsq(["tail", "-t", "x", typed])
    assert result.status == 2
    assert (f"Did you mean {near}?" if near else "See nsq tail --help.") in result.err
