"""``nsq __complete_line`` as real bash, zsh and fish call it, each on its own terminal.

The shells start without user settings and load completions/ of the checkout. Candidates are the
words that the shell itself offers for the last word, or for the value after an option's =. The
``nsq`` on their PATH asks daemons for as long as a test waits instead of one second, which ends
on a busy machine before anything is imported.
"""

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest
from plugins.cli import NSQ, RunNsq, end_terminal
from plugins.clusters import RunningCluster
from plugins.daemons import Nsqd
from plugins.hostile_cluster import HostileCluster
from plugins.waiting import patience_s

from nsqtools.cli.commands import complete_line

COMPLETIONS = Path(__file__).parents[3] / "completions"
DEADLINE_S = patience_s(20.0)
PATIENT_NSQ = f"""
from nsqtools.cli.commands import complete_line
complete_line.TOTAL_TIMEOUT_S = complete_line.TIMEOUT_S = {DEADLINE_S}
from nsqtools.cli.main import main
raise SystemExit(main())
"""
END = "<end>"


class Shell:
    command = ""
    setup = ""
    """Lines to type first. They bind Escape * to showing the candidates between <<< and <end>."""

    def __init__(self, env: dict[str, str], directory: Path):
        where: Any = {"env": env, "cwd": str(directory), "dimensions": (50, 400), "echo": False}
        self.child = pexpect.spawn(self.command, encoding="utf-8", timeout=DEADLINE_S, **where)
        self.child.delaybeforesend = None
        for line in (*self.setup.strip().splitlines(), "echo re''ady"):
            self.child.sendline(line)
        self.child.expect("ready")

    def candidates(self, line: str) -> set[str]:
        """Return the words that the shell offers for the last word of ``line``."""
        self.child.send(f"{line}\x1b*")
        self.child.expect(f"<<<(.*?){END}")
        output: str = self.child.match.group(1)
        self.child.send("\x15")
        last = line.rpartition(" ")[2]
        # some shells show a value with the option in front of its =
        option = last[: last.rfind("=") + 1]
        return {word.removeprefix(option) for word in self.words(output, line, last)}

    def words(self, output: str, line: str, last: str) -> set[str]:
        """Parse the candidates from the output."""
        return set(output.split())


class Bash(Shell):
    """readline's insert-completions puts the candidates into the command line."""

    command = "bash --norc --noprofile -i"
    setup = rf"""
source {COMPLETIONS}/nsq.bash
bind '"\ez": insert-completions'
bind -x '"\ey": printf "<<<%s{END}" "$READLINE_LINE"'
bind '"\e*": "\ez\ey"'
"""

    def words(self, output: str, line: str, last: str) -> set[str]:
        words = set(output.removeprefix(line.rpartition(" ")[0]).split())
        return words if words != {last} else set()  # no candidates


class Zsh(Shell):
    """``compadd`` is wrapped to record the candidates of the completion system."""

    command = "zsh -f -i"
    setup = rf"""
fpath=({COMPLETIONS} $fpath)
autoload -Uz compinit && compinit -u -D
compadd() {{
  if [[ ${{@[1,(i)(-|--)]}} != *-[OAD]\ * ]]; then
    typeset -a hits
    builtin compadd -A hits "$@"
    found+=($IPREFIX$^hits)
  fi
  builtin compadd "$@"
}}
show() {{ found=(); zle list-choices; print -n "<<<$found{END}" }}
zle -N show
bindkey '\e*' show
"""


class Fish(Shell):
    """``complete -C`` prints the candidates."""

    command = "fish --no-config --private -i"
    setup = rf"""
source {COMPLETIONS}/nsq.fish
function show
set -l found (complete -C (commandline -c) | string split -f 1 \t)
printf '<<<%s{END}' "$found"
end
bind \e\* show
"""

    def words(self, output: str, line: str, last: str) -> set[str]:
        # if no word begins with the typed prefix, fish offers similar words
        return {word for word in output.split() if word.startswith(last)}


def write_script(path: Path, command: Sequence[str]) -> None:
    """Write a program that runs ``command`` with its own arguments appended."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


@pytest.fixture(params=[Bash, Zsh, Fish])
def shell(
    request: pytest.FixtureRequest, nsq_env: dict[str, str], tmp_path: Path
) -> Iterator[Shell]:
    """Each shell, in an empty directory; skips where it is not installed."""
    if shutil.which(request.param.command.split()[0]) is None:
        pytest.skip(f"{request.param.__name__} is not installed")
    for name in ("bin", "here"):
        (tmp_path / name).mkdir()
    write_script(tmp_path / "bin/nsq", [NSQ[0], "-c", PATIENT_NSQ])
    path = f"{tmp_path / 'bin'}:{os.environ.get('PATH', os.defpath)}"
    started = request.param({**nsq_env, "PATH": path}, tmp_path / "here")
    yield started
    end_terminal(started.child)


STATIC = {
    "nsq topic ": {"create", "delete", "empty", "info", "list", "pause", "unpause"},
    # values: in the next word, after =, after a character that breaks words in bash
    "nsq pub --mode r": {"round-robin"},
    "nsq pub --mode=": {"all", "failover", "round-robin"},
    "nsq tail -d a:b --js": {"--json"},
    "nsq archive cat -- --bod": set(),
    "nsq nsqd -data": {"-data-path"},
    "nsq nsqd -deflate=": {"true", "false"},
    "nsq topic create 'cl icks' --dry": {"--dry-run"},
}
"""Lines that shells pass in different ways; the tests below need no shell for the others."""


def test_shells_offer_words_values_and_files_and_complete_on_tab(
    shell: Shell, tmp_path: Path
) -> None:
    assert {line: shell.candidates(line) for line in STATIC} == STATIC
    for line in ("nsq tail --consumer-opt max_att", "nsq tail --consumer-opt=max_att"):
        assert {word.rstrip("=") for word in shell.candidates(line)} == {"max_attempts"}
    assert shell.candidates("nsq tail --consumer-opt max_attempts=") == set()

    (tmp_path / "here/archives").mkdir()
    (tmp_path / "here/archived.log").touch()
    for files in ("pub -f archi", "pub -f ~/here/archi", "pub --unsent-file=archi"):
        names = {Path(path).name for path in shell.candidates(f"nsq {files}")}
        assert names == {"archived.log", "archives"}
    [folder] = shell.candidates("nsq to-file --output-dir archi")
    assert Path(folder).name == "archives"

    shell.child.sendline("echo nsq; nsq topic cr\t")
    shell.child.expect_exact("nsq topic create")
    # Last, as a shell may ask whether to show that many.
    offered = shell.candidates("nsq pub -")
    assert {"-t", "--topic", "--tls", "--no-tls", "--help"} <= offered


def test_names_come_from_the_cluster_of_the_options_or_the_profile(
    shell: Shell, nsqd: Nsqd, tmp_path: Path
) -> None:
    """The names have dots, dashes and a hash; the addresses have a colon."""
    for topic in ("web-clicks.eu", "web-clicks.us", "web-views#ephemeral"):
        nsqd.create_topic(topic)
    nsqd.create_channel("clicks", "arch")
    config = tmp_path / ".config/nsqtools/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(
        f'[profiles.staging]\nnsqd-http-address = "{nsqd.http_address}"\n[profiles.stage-2]\n'
    )
    at = f"--nsqd-http-address={nsqd.http_address}"
    host, _, port = nsqd.http_address.partition(":")

    for line, names in {
        "nsq tail -P sta": {"staging", "stage-2"},
        "nsq tail --profile=staging -t c": {"clicks"},
        f"nsq channel pause {at} 'clicks' ": {"arch"},
        f"nsq tail {at} --topic=web-clicks.": {"web-clicks.eu", "web-clicks.us"},
        f"nsq tail {at} --topic=web-v": {"web-views#ephemeral"},
    }.items():
        assert {word.replace("\\", "") for word in shell.candidates(line)} == names, line
    nodes = shell.candidates(f"nsq tombstone {at} web-clicks.eu {host}:")
    assert nodes in ({nsqd.http_address}, {port})  # bash replaces what follows the colon


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("-P a", r"a\ b\;c"),
        (r"-P a\ ", r"a\ b\;c"),
        ("-P 'a", "a b;c"),
        ('--profile="a', "a b;c"),
        ("--profile=", r"a\ b\;c"),
    ],
)
def test_bash_gets_names_with_special_characters_in_its_syntax(
    run_nsq: RunNsq, nsq_env: dict[str, str], typed: str, completed: str
) -> None:
    config = Path(nsq_env["HOME"], ".config/nsqtools/config.toml")
    config.parent.mkdir(parents=True)
    config.write_text('[profiles."a b;c"]\n')
    status, out, _ = run_nsq(["__complete_line", "bash", f"nsq tail {typed}", "="])
    assert (status, out.decode().splitlines()[1:]) == (0, [completed])


def test_an_unresponsive_cluster_gives_no_candidates_and_no_output(
    shell: Shell, deaf_address: str, tmp_path: Path
) -> None:
    write_script(tmp_path / "bin/nsq", NSQ)  # with the one second that users have

    assert shell.candidates(f"nsq tail --nsqd-http-address={deaf_address} -t ") == set()
    assert shell.candidates("nsq tail --nsqd-http-address='not an address -t ") == set()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_prints_nothing_without_an_answer(nsq_env: dict[str, str], tmp_path: Path) -> None:
    write_script(tmp_path / "nsq", ["false"])
    script = f"source {COMPLETIONS}/nsq.fish; complete -C 'nsq tail -t '"
    path = f"{tmp_path}:{os.environ.get('PATH', os.defpath)}"

    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env={**nsq_env, "PATH": path}, capture_output=True
    )
    assert (done.stdout, done.stderr) == (b"", b"")


@pytest.mark.parametrize("line", ["nsq to-file --", "nsq nsqd -"])
def test_options_are_completed_with_little_cpu_time(nsq_env: dict[str, str], line: str) -> None:
    def cpu_s() -> float:
        times_before = os.times()
        assert subprocess.check_output([*NSQ, "__complete_line", "bash", line, ":="], env=nsq_env)
        return sum(os.times()[2:4]) - sum(times_before[2:4])  # of children

    assert any(cpu_s() < patience_s(0.2) for _ in range(5))  # without the shell's own


def test_names_come_from_nsqd_and_nsqlookupd_and_invalid_ones_are_dropped(
    run_nsq: RunNsq,
    cluster: RunningCluster,
    polite_cluster: HostileCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer that ends the process after a second is disabled: this process runs the tests."""
    monkeypatch.setattr(complete_line, "TIMEOUT_S", patience_s(10))
    monkeypatch.setattr(complete_line, "Timer", lambda *_: threading.Timer(0, int))
    hostile = {"topics": ["a", "$(reboot)", "b;c", "d\n"]}
    monkeypatch.setitem(polite_cluster.answers, "/topics", hostile)
    cluster.nsqds[0].create_channel("views", "live")
    cluster.nsqds[0].create_channel("clicks", "arch")
    cluster.wait_for_topic("clicks", 1)
    cluster.wait_for_topic("views", 1)
    nsqd = f"--nsqd-http-address={cluster.nsqds[0].http_address}"
    lookup = " ".join(cluster.lookupd_options)

    def expect(*lines: tuple[str, list[str]], **env: str) -> None:
        for line, names in lines:
            status, out, err = run_nsq(["__complete_line", "bash", line, ""], env=env)
            head, *words = out.decode().splitlines()
            assert (status, err, head, sorted(words)) == (0, "", "words 0", names), line

    expect(
        (f"nsq tail {nsqd.replace('=', ' ')} --topic c", ["clicks"]),
        (f"nsq tail --no-such {nsqd} --topic c", ["clicks"]),
        (f"nsq topic pause {nsqd} clicks ", ["clicks", "views"]),
        (f"nsq tail {nsqd} --topic=views --channel ", ["live"]),
        (f"nsq tail {nsqd} -tclicks -c ", ["arch"]),
        ("nsq tail --nsqd-http-address=127.0.0.1:1 -t ", []),
        (f"nsq tombstone {lookup} clicks ", sorted(node.http_address for node in cluster.nsqds)),
        (f"nsq tail --lookupd-http-address={polite_cluster.http_address} -t ", ["a"]),
    )
    for node in cluster.nsqds:
        node.kill()
    expect(
        (f"nsq tail {lookup} -t ", ["clicks", "views"]),
        (f"nsq tail {lookup} -t clicks -c ", ["arch"]),
    )
    env = {"NSQ_LOOKUPD_HTTP_ADDRESS": cluster.lookupds[0].http_address}
    expect(("nsq tail -t cl", ["clicks"]), **env)


def test_completion_ends_after_a_second_while_name_resolution_hangs(
    nsq_env: dict[str, str],
) -> None:
    code = (
        "import socket, time\n"
        "socket.getaddrinfo = lambda *a, **k: time.sleep(3600)\n"
        "from nsqtools.cli.main import main\n"
        "line = 'nsq tail --nsqd-http-address=nsqd.example:4151 -t '\n"
        "main(['__complete_line', 'bash', line, ''])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=nsq_env, capture_output=True, timeout=patience_s(100))

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
