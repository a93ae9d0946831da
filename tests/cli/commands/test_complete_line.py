"""``nsq __complete_line``, which real bash, zsh and fish ask, each on a terminal of its own.

They start without anybody's settings, and load what the checkout has in completions/. Candidates
are what the shell itself offers for the last word, or where an option has its value after = for
that value. The ``nsq`` on their PATH asks daemons for as long as a test waits, not for one second,
which is over on a busy machine before anything is imported.
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
        """What the shell offers for the last word of ``line``."""
        self.child.send(f"{line}\x1b*")
        self.child.expect(f"<<<(.*?){END}")
        found: str = self.child.match.group(1)
        self.child.send("\x15")
        last = line.rpartition(" ")[2]
        # of a value behind =, as some shells show the option in front of it
        option = last[: last.rfind("=") + 1]
        return {word.removeprefix(option) for word in self.words(found, line, last)}

    def words(self, found: str, line: str, last: str) -> set[str]:
        """The candidates, from what was shown."""
        return set(found.split())


class Bash(Shell):
    """readline's insert-completions puts the candidates into the command line."""

    command = "bash --norc --noprofile -i"
    setup = rf"""
source {COMPLETIONS}/nsq.bash
bind '"\ez": insert-completions'
bind -x '"\ey": printf "<<<%s{END}" "$READLINE_LINE"'
bind '"\e*": "\ez\ey"'
"""

    def words(self, found: str, line: str, last: str) -> set[str]:
        words = set(found.removeprefix(line.rpartition(" ")[0]).split())
        return words if words != {last} else set()  # nothing came


class Zsh(Shell):
    """What the completion system is given to choose from, with ``compadd`` listened to."""

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
    """fish tells its candidates by itself."""

    command = "fish --no-config --private -i"
    setup = rf"""
source {COMPLETIONS}/nsq.fish
function show
set -l found (complete -C (commandline -c) | string split -f 1 \t)
printf '<<<%s{END}' "$found"
end
bind \e\* show
"""

    def words(self, found: str, line: str, last: str) -> set[str]:
        # where nothing begins with what was typed, fish offers what is somewhat like it
        return {word for word in found.split() if word.startswith(last)}


def write_script(path: Path, command: Sequence[str]) -> None:
    """A program that runs ``command`` with its own arguments after it."""
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
    # values: in the next word, behind =, behind what breaks words in bash
    "nsq pub --mode r": {"round-robin"},
    "nsq pub --mode=": {"all", "failover", "round-robin"},
    "nsq tail -d a:b --js": {"--json"},
    "nsq archive cat -- --bod": set(),
    "nsq nsqd -data": {"-data-path"},
    "nsq nsqd -deflate=": {"true", "false"},
    "nsq topic create 'cl icks' --dry": {"--dry-run"},
}
"""What a shell may hand over in another way; the rest is below, without a shell."""


def test_words_values_and_files_are_offered_and_the_tab_key_completes(
    shell: Shell, tmp_path: Path
) -> None:
    assert {line: shell.candidates(line) for line in STATIC} == STATIC
    for line in ("nsq tail --consumer-opt max_att", "nsq tail --consumer-opt=max_att"):
        assert {each.rstrip("=") for each in shell.candidates(line)} == {"max_attempts"}
    assert shell.candidates("nsq tail --consumer-opt max_attempts=") == set()

    (tmp_path / "here/archives").mkdir()
    (tmp_path / "here/archived.log").touch()
    for files in ("pub -f archi", "pub -f ~/here/archi", "pub --unsent-file=archi"):
        found = {Path(each).name for each in shell.candidates(f"nsq {files}")}
        assert found == {"archived.log", "archives"}
    [folder] = shell.candidates("nsq to-file --output-dir archi")
    assert Path(folder).name == "archives"

    shell.child.sendline("echo nsq; nsq topic cr\t")
    shell.child.expect_exact("nsq topic create")
    # at the end: so many that a shell may ask whether to show them
    offered = shell.candidates("nsq pub -")
    assert {"-t", "--topic", "--tls", "--no-tls", "--help"} <= offered


def test_names_come_from_the_cluster_that_the_line_names_or_its_profile(
    shell: Shell, nsqd: Nsqd, tmp_path: Path
) -> None:
    """Also those with dots, dashes and a hash, and addresses with a colon."""
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
        assert {each.replace("\\", "") for each in shell.candidates(line)} == names, line
    nodes = shell.candidates(f"nsq tombstone {at} web-clicks.eu {host}:")
    assert nodes in ({nsqd.http_address}, {port})  # bash replaces what follows the colon


def test_a_cluster_that_does_not_answer_ends_the_wait_and_says_nothing(
    shell: Shell, deaf_address: str, tmp_path: Path
) -> None:
    write_script(tmp_path / "bin/nsq", NSQ)  # it has a second to answer, as for users

    assert shell.candidates(f"nsq tail --nsqd-http-address={deaf_address} -t ") == set()
    assert shell.candidates("nsq tail --nsqd-http-address='not an address -t ") == set()


@pytest.mark.parametrize("line", ["nsq to-file --", "nsq nsqd -"])
def test_what_can_follow_is_found_at_once(nsq_env: dict[str, str], line: str) -> None:
    def cpu_s() -> float:
        before = os.times()
        assert subprocess.check_output([*NSQ, "__complete_line", "bash", line, ":="], env=nsq_env)
        return sum(os.times()[2:4]) - sum(before[2:4])  # of children

    assert any(cpu_s() < patience_s(0.2) for _ in range(5))  # that of a shell not counted


def test_names_come_from_nsqd_and_nsqlookupd_also_when_no_nsqd_is_left_and_none_that_nsqd_takes_not(
    run_nsq: RunNsq,
    cluster: RunningCluster,
    polite_cluster: HostileCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the second after which the command ends its process, which here runs the tests."""
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
        (f"nsq tombstone {lookup} clicks ", sorted(each.http_address for each in cluster.nsqds)),
        (f"nsq tail --lookupd-http-address={polite_cluster.http_address} -t ", ["a"]),
    )
    for each in cluster.nsqds:
        each.kill()
    expect(
        (f"nsq tail {lookup} -t ", ["clicks", "views"]),
        (f"nsq tail {lookup} -t clicks -c ", ["arch"]),
    )
    env = {"NSQ_LOOKUPD_HTTP_ADDRESS": cluster.lookupds[0].http_address}
    expect(("nsq tail -t cl", ["clicks"]), **env)


def test_it_ends_after_a_second_when_name_resolution_hangs(nsq_env: dict[str, str]) -> None:
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
