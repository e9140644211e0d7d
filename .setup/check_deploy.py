"""Checks node/deploy against the schemas of those who read it, and against the program.

usage: check_deploy.py FOLDER_WITH_WHEELS ROOT

- Kubernetes' objects: their own schemas, with fields that they do not know refused.
- The compose file: the schema of compose; what it mounts from the repository is there.
- All of it: every LOCKSTEP_ variable is a setting; whoever ends a node gives it longer than it may take.
- Alertmanager: alerts that a file names exist.
Ends with 1 and what is wrong.
"""

import json
import pathlib
import re
import sys
import zipfile

KUBERNETES = "v1.34.0"
# Variables that are no setting of a node: compose's own, and Grafana's (grafana/README.md).
NOT_SETTINGS = {
    "LOCKSTEP_NODE_DATABASE_URL", "LOCKSTEP_OWNER_DATABASE_URL", "LOCKSTEP_ALERTMANAGER_CONFIG",
    "LOCKSTEP_UID", "LOCKSTEP_GID", "LOCKSTEP_PROMETHEUS_URL", "LOCKSTEP_DASHBOARDS",
}

wheels, root = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
deploy = root / "node/deploy"
modules = wheels / "modules"
for module in ("fastjsonschema", "ruamel_yaml"):
    with zipfile.ZipFile(next(wheels.glob(module + "-*.whl"))) as archive:
        archive.extractall(modules)
sys.path.insert(0, str(modules))
import fastjsonschema  # noqa: E402
from ruamel.yaml import YAML  # noqa: E402

faults = []


def fault(path, text):
    faults.append(f"{path.relative_to(root)}: {text}")


def schema_of(name, inside):
    """A schema out of a wheel, as the draft that fastjsonschema knows: what is meant is the same."""
    with zipfile.ZipFile(next(wheels.glob(name + "-*.whl"))) as archive:
        text = archive.read(inside).decode()
    text = text.replace("/api/_definitions.json#", "#").replace("#/$defs/", "#/definitions/")
    schema = json.loads(text)
    schema["definitions"] = {**schema.get("definitions", {}), **schema.pop("$defs", {})}
    schema.pop("$id", None)
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return schema


def documents(path):
    return [d for d in YAML(typ="safe", pure=True).load_all(path.read_text()) if d is not None]


def closed(definition):
    """Refuses fields that the schema does not know, as the server would with validation on."""
    if "properties" in definition and "additionalProperties" not in definition:
        definition["additionalProperties"] = False
    return definition


def merged(schema):
    """Definitions made of others, with what the newer draft calls unevaluated refused in the older one's way."""
    definitions = schema["definitions"]
    for definition in definitions.values():
        if definition.get("unevaluatedProperties") is not False:
            continue
        for part in definition.get("allOf", []):
            of = definitions[part["$ref"].removeprefix("#/definitions/")]
            for words in ("properties", "patternProperties"):
                definition[words] = {**of.get(words, {}), **definition.get(words, {})}
        definition["additionalProperties"] = False
    return schema


def kubernetes():
    folder = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}-local/"
    definitions = schema_of("kubernetes_validate", folder + "_definitions.json")["definitions"]
    for definition in definitions.values():
        closed(definition)
    validators = {}
    names = set()
    for path in sorted((deploy / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            kind, version = document["kind"], document["apiVersion"]
            names.add(kind)
            name = f"{kind}-{version.replace('/', '-')}".lower()
            if name not in validators:
                schema = closed(schema_of("kubernetes_validate", f"{folder}{name}.json"))
                schema["definitions"] = definitions
                validators[name] = fastjsonschema.compile(schema, use_formats=False, detailed_exceptions=False)
            try:
                validators[name](document)
            except fastjsonschema.JsonSchemaException as error:
                fault(path, f"{kind}: {error.message}")
            if kind == "StatefulSet":
                statefulset(path, document)
    for kind in ("StatefulSet", "PodDisruptionBudget", "Service", "Job"):
        if kind not in names:
            fault(deploy / "kubernetes", f"there is no {kind}")


def statefulset(path, document):
    pod = document["spec"]["template"]["spec"]
    ends_within(path, "terminationGracePeriodSeconds", pod["terminationGracePeriodSeconds"])
    if "podAntiAffinity" not in pod.get("affinity", {}):
        fault(path, "nodes may end up on one machine")
    container = pod["containers"][0]
    for probe, page in [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]:
        if container.get(probe, {}).get("httpGet", {}).get("path") != page:
            fault(path, f"{probe} does not ask for {page}")
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    if mounted != volumes:
        fault(path, f"volumes {sorted(volumes)}, mounted {sorted(mounted)}")


def compose():
    path = deploy / "compose/compose.yaml"
    document, = documents(path)
    schema = schema_of("check_jsonschema", "check_jsonschema/builtin_schemas/vendor/compose-spec.json")
    try:
        fastjsonschema.compile(merged(schema), use_formats=False, detailed_exceptions=False)(document)
    except fastjsonschema.JsonSchemaException as error:
        fault(path, error.message)
    services = document["services"]
    for name, service in services.items():
        for needed in service.get("depends_on", {}):
            if needed not in services:
                fault(path, f"{name} depends on {needed}, which is not there")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("../") and not (path.parent / source).exists():
                fault(path, f"{name} mounts {source}, which is not there")
            if not source.startswith((".", "$")) and source not in document["volumes"]:
                fault(path, f"{name} mounts the volume {source}, which is not there")
        for secret in service.get("secrets", []):
            if secret not in document["secrets"]:
                fault(path, f"{name} reads the secret {secret}, which is not there")
        if service.get("image") == "lockstep" and "stop_grace_period" in service:
            ends_within(path, "stop_grace_period", int(service["stop_grace_period"].removesuffix("s")))
        elif ":" not in service["image"] and service["image"] != "lockstep":
            fault(path, f"{name}: {service['image']} has no version")


def ends_within(path, name, given):
    """A node that is told to end takes so long at most, by its own limits."""
    source = (root / "node/src/cli/node.rs").read_text()
    limits = [int(s) for s in re.findall(r"const (?:DRAIN|WRITER|NOTES)_LIMIT: Duration = Duration::from_secs\((\d+)\)", source)]
    if len(limits) != 3:
        fault(root / "node/src/cli/node.rs", "the limits of the end are not where this check looks for them")
    least = sum(limits) + 15
    if given < least:
        fault(path, f"{name} is {given} s, a node may take {least} s to end")


def systemd():
    path = deploy / "systemd/lockstep-node@.service"
    settings = dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
    ends_within(path, "TimeoutStopSec", int(settings["TimeoutStopSec"]))
    if settings["Type"] != "notify" or int(settings["WatchdogSec"]) < 10:
        fault(path, "must be of Type notify, with a watchdog of 10 s or more")


def settings():
    known = set(re.findall(r'"(LOCKSTEP_[A-Z_]+)"', (root / "node/src/config.rs").read_text()))
    for path in sorted(p for p in deploy.rglob("*") if p.is_file()):
        for name in sorted(set(re.findall(r"LOCKSTEP_[A-Z_]+", path.read_text())) - known - NOT_SETTINGS):
            fault(path, f"{name} is no setting")


def alerts():
    known = set(re.findall(r"alert: (\w+)", (root / "grafana/alerts/lockstep.rules.yml").read_text()))
    for path in sorted((deploy / "alertmanager").glob("*.yml")):
        documents(path)
        for name in sorted(set(re.findall(r"\bLockstep\w+", path.read_text())) - known):
            fault(path, f"there is no alert {name}")


def containerfile():
    path = deploy / "Containerfile"
    lines = [line.strip() for line in path.read_text().splitlines()]
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    if len(bases) < 2 or any(":" not in base or base.endswith(":latest") for base in bases):
        fault(path, f"must build in one image and run in another, both with a version: {bases}")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        fault(path, "must run as a user that is not root, by number")
    toolchain = re.search(r'rust-version = "([\d.]+)"', (root / "Cargo.toml").read_text()).group(1)
    if not bases[0].startswith(f"docker.io/library/rust:{toolchain}-"):
        fault(path, f"builds with {bases[0]}, and Cargo.toml wants {toolchain}")


for check in (kubernetes, compose, systemd, settings, alerts, containerfile):
    check()
if faults:
    sys.exit("\n".join(faults))
