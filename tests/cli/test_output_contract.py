"""The output of ``--json`` matches ``nsq schema`` for every command, on a real cluster.

The commands of ``nsq bench`` and ``nsq spark`` are checked against their schemas in their own
tests, as they take long.
"""

import re
from pathlib import Path

import jsonschema
from manual.tree import read_tree
from plugins.cli import RunNsq
from plugins.clusters import RunningCluster, ValidJson

from nsqtools.cli.commands.schema import all_schemas, read_schema, schema_of
from nsqtools.cli.registry import FAILURE_STATUS, OUTPUT_PLACES
from nsqtools.cli.render.documents import DOCUMENTS
from nsqtools.cli.running.runtime import asks_for_json

# tested elsewhere, or with another command
ELSEWHERE = re.compile(
    "message|error|to-http|to-exec|check|archive compact.*|archive erase|archive vacuum|"
    "(authd|bench|queue|schedule|spark|topology) .*"
)
NO_SCHEMA = {"spark sql": "its columns are those of the query"}

COMMANDS = [
    "topic create views NODE LOOKUP",
    "topic list NODE",
    "topic info clicks NODE",
    "topic pause views NODE",
    "topic unpause views NODE",
    "topic empty views --yes NODE",
    "topic delete views --dry-run NODE",
    "topic delete views --yes NODE",
    "channel create clicks copy NODE",
    "channel list NODE",
    "channel info clicks arch NODE",
    "channel pause clicks copy NODE",
    "channel unpause clicks copy NODE",
    "channel empty clicks copy --yes NODE",
    "channel delete clicks copy --yes NODE",
    "nodes LOOKUP",
    "lookup clicks LOOKUP",
    "ping NODE LOOKUP",
    "info NODE",
    "config get max_rdy_count NODE",
    "config set log_level info NODE",
    "config show",
    "config profiles",
    "schema",
    "stat --once NODE",
    "stat --once --show nodes NODE",
    "stat --once --show clients NODE",
    "stat --once --show memory NODE",
    "peek -t clicks -c arch -n 1 TCP NODE",
    "tail -t clicks -c arch -n 1 TCP NODE",
    "to-file -t clicks -c arch -n 1 --output-dir OUT TCP NODE",
    "archive info OUT",
    "archive cat OUT",
    "archive verify OUT",
    "archive convert OUT --output TABLE",
    "archive repair OUT",
    "replay OUT --dry-run TCP",
    "replay OUT --yes TCP",
    "pub -t clicks -m hello TCP",
    "to-nsq -t clicks -c arch -n 5 DEST TCP NODE",
    "drain HTTP --to OTHER --dry-run",
    "drain HTTP --to OTHER --yes",
    "tombstone clicks HTTP --yes LOOKUP",
]


def test_the_output_of_every_command_matches_its_schema(
    run_nsq: RunNsq, cluster: RunningCluster, valid_json: ValidJson, tmp_path: Path
) -> None:
    nsqd, other = cluster.nsqds
    nsqd.create_channel("clicks", "arch")
    nsqd.publish("clicks", *(b"%d" % n for n in range(5)))
    cluster.wait_for_topic("clicks", 1)
    places = {
        "NODE": [f"--nsqd-http-address={nsqd.http_address}"],
        "LOOKUP": cluster.lookupd_options,
        "TCP": [f"--nsqd-tcp-address={nsqd.tcp_address}"],
        "HTTP": [nsqd.http_address],
        "DEST": [f"--destination-nsqd-tcp-address={other.tcp_address}"],
        "OTHER": [other.http_address],
        "OUT": [str(tmp_path / "out")],
        "TABLE": [str(tmp_path / "table")],
    }
    for line in COMMANDS:
        words = [part for word in line.split() for part in places.get(word, [word])]

        result = run_nsq([*words, "--json"])

        assert result.status == 0, (line, result.err)
        assert result.out, line
        [command] = [name for name, _ in all_schemas() if f"{line} ".startswith(f"{name} ")]
        is_stream = schema_of(command) == "message"
        for document in result.out.splitlines() if is_stream else [result.out]:
            valid_json(command, document)


def commands_with_json() -> set[str]:
    return {
        " ".join(page.words[1:])
        for page in read_tree().walk()
        for option in page.options
        if "--json" in option.names
    }


def test_every_command_with_json_has_a_schema_and_is_covered() -> None:
    described = {name for name, _ in all_schemas()}
    tried = {name for name in described for line in COMMANDS if f"{line} ".startswith(f"{name} ")}

    assert commands_with_json() - set(NO_SCHEMA) <= described
    assert {name for name in described - tried if not ELSEWHERE.fullmatch(name)} == set()


def test_a_schema_is_valid_and_has_a_title_and_its_version() -> None:
    for name in DOCUMENTS:
        schema = read_schema(name)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"urn:nsqtools:output:1:{name}"
        assert schema["title"]


def test_a_wrong_command_line_is_a_line_of_json(run_nsq: RunNsq, valid_json: ValidJson) -> None:
    for command in sorted(commands_with_json()):
        result = run_nsq([*command.split(), "--json", "--no-such-option"])

        error = valid_json("error", result.err.encode())
        assert (result.out, result.err.count("\n")) == (b"", 1), command
        usage = FAILURE_STATUS.get(command, 2)
        assert (error["code"], error["status"], result.status) == ("usage", usage, usage), command
        assert "no such option" in error["message"], command


def test_only_commands_with_a_place_for_output_take_it_with_o() -> None:
    with_place = {
        " ".join(page.words[1:])
        for page in read_tree().walk()
        for option in page.options
        if {"-o", "--output"} <= set(option.names) and "json" not in str(option)
    }
    assert with_place == set(OUTPUT_PLACES)


def test_an_output_file_named_json_does_not_ask_for_errors_in_json() -> None:
    assert not asks_for_json(["queue", "recover", "data", "-o", "json"])
    assert asks_for_json(["queue", "list", "data", "-o", "json"])
