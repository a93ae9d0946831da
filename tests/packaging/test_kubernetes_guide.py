"""The manifests of nsq-kubernetes(7) match their schemas and the options of the programs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from plugins.readme import parse
from plugins.waiting import patience_s

from nsqtools.cli.parsing.app import command_tree
from nsqtools.cli.running.runtime import Runtime
from nsqtools.server.go_flags import flags_of, parse_flags
from nsqtools.server.options import NsqdOptions, NsqlookupdOptions

GUIDE = Path(__file__).parents[2] / "man" / "nsq-kubernetes.7.md"
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for block in parse(GUIDE.name, GUIDE.read_text("utf-8"))
    if block.language == "yaml"
    for manifest in yaml.safe_load_all(block.text)
]
CUSTOM = {
    "ScaledObject": (
        "github.com/kedacore/keda/v2@v2.17.0",
        "config/crd/bases/keda.sh_scaledobjects.yaml",
    ),
    "PodMonitor": (
        "github.com/prometheus-operator/prometheus-operator@v0.78.2",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
}
DAEMONS = {"/nsqd": NsqdOptions, "/nsqlookupd": NsqlookupdOptions}
NATIVE = [manifest for manifest in MANIFESTS if manifest["kind"] not in CUSTOM]
VALIDATE = """
import json, sys
import kubernetes_validate
for manifest in json.load(sys.stdin):
    kubernetes_validate.validate(manifest, "1.29", strict=True)
    print(manifest["kind"])
"""


def run_or_skip(command: list[str], reason: str, stdin: str = "") -> str:
    try:
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=patience_s(120)
        )
    except FileNotFoundError:
        pytest.skip(reason)
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"{reason}: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_native_manifests_are_valid() -> None:
    """The package of schemas has 108 MB, so it is not in the extra ``test``: uv fetches it."""
    uv = [sys.executable, "-m", "uv", "run", "--quiet", "--no-project"]
    command = [*uv, "--with", "kubernetes-validate==1.37.0", "python", "-c", VALIDATE]
    kinds = run_or_skip(command, "kubernetes-validate is not available", json.dumps(NATIVE))
    assert kinds.split() == [manifest["kind"] for manifest in NATIVE]
    assert {"StatefulSet", "Deployment", "CronJob", "PodDisruptionBudget"} <= set(kinds.split())


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_resources_are_valid(kind: str, tmp_path: Path) -> None:
    module, path = CUSTOM[kind]
    command = ["go", "mod", "download", "-json", module]
    folder = json.loads(run_or_skip(command, "the Go module is not available"))["Dir"]
    definition = yaml.safe_load((Path(folder) / path).read_text("utf-8"))
    [manifest] = [manifest for manifest in MANIFESTS if manifest["kind"] == kind]
    [schema] = [
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if manifest["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
    ]
    jsonschema.validate(manifest, without_unknown_fields(schema))


def without_unknown_fields(schema: Any) -> Any:
    """The schema without undeclared fields, about which the API server warns."""
    if isinstance(schema, list):
        return [without_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: without_unknown_fields(part) for key, part in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict


def containers() -> list[dict[str, Any]]:
    specs = [manifest.get("spec", {}) for manifest in NATIVE]
    specs = [spec.get("jobTemplate", {}).get("spec", spec) for spec in specs]
    pods = [spec["template"]["spec"] for spec in specs if "template" in spec]
    return [container for pod in pods for container in pod["containers"]]


def check_command_line(words: list[str]) -> None:
    """Parse the words, which raises an error for an unknown option."""
    runtime = Runtime(sys.stdout, sys.stderr, {"XDG_CONFIG_HOME": "/dev/null"})
    command_tree().load(words[0]).make_context(words[0], words[1:], obj=runtime)


def test_the_command_lines_of_containers_are_valid() -> None:
    checked = []
    for container in containers():
        words = [*container["command"], *container.get("args", ())]
        if words[0] == "nsq":
            check_command_line(words[1:])
        elif words[0] in DAEMONS:
            parse_flags(flags_of(DAEMONS[words[0]], {}), words[1:])
        script = str(container.get("lifecycle", ""))
        if "nsq drain" in script:
            drain = script.partition("nsq ")[2].partition(";")[0].replace('"', "").split()
            check_command_line(drain)
        checked.append(words[0])
    assert sorted(set(checked)) == ["/nsqd", "/nsqlookupd", "nsq", "sh"]
