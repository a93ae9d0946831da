"""Commands that would run a body in place of ``{}`` as code, and commands that only read it."""

import shlex
import shutil
from pathlib import Path

import pytest

from nsqtools.forward.program_text import find_program_text

RUNS_IT = """
sh -c 'echo {}'
/bin/bash -ec 'echo "{}"'
bash -o pipefail -c 'echo {}'
bash --norc --rcfile x -c -e 'echo {}'
bash -c -- 'echo {}'
dash -ceu 'echo {}' sh
zsh -co extendedglob 'echo {}'
sh -c {}
sh {}
env X=1 sh -c 'echo {}'
/usr/bin/env -i bash -c 'x {}'
sudo -u nobody nice -n 5 timeout -k 1 5 sh -c 'x {}'
env -S 'sh -c "x {}"'
env {}
nice -n 5 {}
busybox sh -c 'x {}'
docker exec -it web sh -c 'x {}'
xargs -0 ksh93 -c 'x {}'
find . -exec sh -c 'x {}' ;
ssh host x {}
parallel echo {}
su - nobody -c 'x {}'
flock /tmp/lock -c 'x {}'
python3 -c 'print("{}")'
/usr/bin/python3.13 -W error -uIc 'print("{}")'
python -cprint({})
python {}
perl -lane 'print "{}"'
perl -I lib -Mstrict -e 'x' -e '{}'
perl -e x {}
perl -M{} x.pl
ruby -rjson -e 'puts "{}"'
node -pe '"{}"'
nodejs --require x --eval '"{}"'
node --eval={}
php -r 'echo "{}";'
lua5.4 -e 'x("{}")'
awk -F: '/{}/ {print}'
sed 's/x/{}/'
sed -n -e 's/x/{}/p' file
psql app -c "insert into t values ('{}')"
mysql -u root app --execute 'x {}'
pwsh -Command 'x {}'
sqlite3 app.db "insert into t values ('{}')"
duckdb app.db -c "insert into t values ('{}')"
clickhouse-client --host db --query "insert into t values ('{}')"
mongosh app --eval 'x("{}")'
expect -c 'send {}'
uv run python -c 'x("{}")'
tmux new-session -d 'x {}'
sudo -iu sort psql -c 'x {}'
sudo -u sort -n bash -c 'x {}'
"""

READS_IT = """
perl '' x {}
echo {}
mail -s 'for {}' root
sh -c 'echo "$1"' sh {}
bash -euc 'echo "$0"' {}
bash script.sh -c {}
env X={} printenv X
sudo -u nobody logger -t nsq -- {}
timeout 5 sh -c 'echo "$1"' sh {}
flock /tmp/lock logger {}
python3 -c 'import sys; print(sys.argv[1])' {}
python3 -m tool -c {}
python3 -W error tool.py -c {}
perl -e 'print $ARGV[0]' -- {}
perl tool.pl -e {}
ruby -e 'puts ARGV[0]' -- {}
awk -v 'user={}' -f program.awk file
awk '{print}' {}
sed s/a/b/ {}
psql app -v 'user={}' -f insert.sql
curl -d {} http://127.0.0.1/
sudo -n sort -t {}
logger -t sh {}
"""


@pytest.mark.parametrize("command", RUNS_IT.strip().splitlines())
def test_a_body_in_program_text_is_found(command: str) -> None:
    assert "{}" in (find_program_text(shlex.split(command)) or "")


@pytest.mark.parametrize("command", READS_IT.strip().splitlines())
def test_a_body_as_plain_data_is_allowed(command: str) -> None:
    assert find_program_text(shlex.split(command)) is None


def test_a_link_to_a_shell_is_treated_as_a_shell(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(shutil.which("sh") or "/bin/sh")
    assert find_program_text([str(tmp_path / "run"), "-c", "echo {}"]) == "echo {}"
