"""The files of deploy/ start programs that exist, with flags that they have, and give them the time that they need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.cli import VERBS
from swarm.process.lifecycle import SECRET_FLAGS
from tests.support.references import flags_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FILES = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.suffix in (".service", ".yaml", ".yml", ".sh") and not {"prometheus", "grafana"} & set(path.parts)
)
COMMAND = re.compile(r"\bswarm (" + "|".join(VERBS) + r")\b((?:[^\n;)'`>|]|'[^']*')*)")
VARIABLE = re.compile(r"\bSWARM_[A-Z_]+")
# What no flag is called.
OTHER_VARIABLES = {"SWARM_PROFILES", "SWARM_FLAG"}
KUBERNETES = [part for path in (DEPLOY / "kubernetes").glob("*.yaml") for part in yaml.safe_load_all(path.read_text())]
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each call of swarm in a file: the verb and the words behind it. Comments count: people type what they say."""
    text = path.read_text()
    if "kubernetes" in path.parts:
        for part in yaml.safe_load_all(text):
            for container in pod_of(part).get("containers", []):
                verb, *words = container["args"]
                yield verb, words
    text = re.sub(r"^# +", "", text, flags=re.MULTILINE)
    text = re.sub(r"\\\n\s*|(?<=\S)\n\s+(?=--)", " ", text)
    text = re.sub(r"\$+\((?!swarm)[^)]*\)", "VALUE", text)
    for verb, rest in COMMAND.findall(text):
        yield verb, shlex.split(rest.replace('"', " ").replace("'", " "))


def pod_of(part: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = part.get("spec", {}).get("template", {}).get("spec", {})
    return spec


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_a_scheduler_that_may_not_write_to_a_home_keeps_the_admins_profile_elsewhere() -> None:
    unit = (DEPLOY / "systemd" / "swarm-scheduler.service").read_text()
    assert "ProtectHome=yes" in unit
    folder = re.search(r"^Environment=SWARM_PROFILES=(.*)$", unit, re.MULTILINE)
    state = re.search(r"^StateDirectory=(.*)$", unit, re.MULTILINE)
    assert folder is not None
    assert state is not None
    assert folder[1].startswith(f"/var/lib/{state[1]}/")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_flag_is_one_of_its_program(path: Path) -> None:
    for verb, words in commands(path):
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= flags_of(verb), (path.name, verb)


def test_every_program_that_serves_is_started_somewhere() -> None:
    started = {(path.name, verb) for path in FILES for verb, _ in commands(path)}
    for name in ("swarm-stage-server@.service", "compose.yaml", "stage-servers.yaml", "skypilot.yaml", "slurm.sh"):
        assert (name, "stage-server") in started
    for name in ("swarm-scheduler.service", "compose.yaml", "scheduler.yaml"):
        assert (name, "scheduler") in started


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_is_a_flag_of_a_program(path: Path) -> None:
    known = {flag for verb in ("scheduler", "stage-server", "ls") for flag in flags_of(verb)}
    known |= {f"--{flag}-file" for flag in SECRET_FLAGS}  # those that SWARM_<FLAG>_FILE stands in for
    names = set(VARIABLE.findall(path.read_text())) - OTHER_VARIABLES
    assert {"--" + name.removeprefix("SWARM_").lower().replace("_", "-") for name in names} <= known


def drain_s(words: list[str]) -> float:
    at = next(index for index, word in enumerate(words) if word.startswith("--drain-timeout"))
    _, is_one_word, value = words[at].partition("=")
    return float(value if is_one_word else words[at + 1])


def test_whoever_stops_a_stage_server_waits_until_its_work_is_handed_over() -> None:
    """A supervisor that kills earlier makes every restart a loss of work."""
    drains = {
        path.name: drain_s(words)
        for path in FILES
        for verb, words in commands(path)
        if verb == "stage-server" and any(word.startswith("--drain-timeout") for word in words)
    }
    unit = RawConfigParser(strict=False)
    unit.read(DEPLOY / "systemd" / "swarm-stage-server@.service")
    pods = {part["metadata"]["name"]: pod_of(part) for part in KUBERNETES if pod_of(part)}
    slurm = re.search(r"--signal=TERM@(\d+)", (DEPLOY / "slurm.sh").read_text())
    assert slurm is not None
    patience_s = {
        "swarm-stage-server@.service": float(unit["Service"]["TimeoutStopSec"]),
        "compose.yaml": float(seconds(COMPOSE["services"]["stage-server"]["stop_grace_period"])),
        "stage-servers.yaml": float(pods["stage-server"]["terminationGracePeriodSeconds"]),
        "slurm.sh": float(slurm[1]),
    }
    assert {name for name, s in patience_s.items() if s < drains[name] + 20} == set()


def test_services_of_systemd_end_in_order_and_do_not_retry_wrong_settings() -> None:
    for path in (DEPLOY / "systemd").glob("*.service"):
        unit = RawConfigParser(strict=False)
        unit.read(path)
        service = unit["Service"]
        assert (service["User"], service["SuccessExitStatus"], service["RestartPreventExitStatus"]) == (
            "swarm",
            "143",
            "3",
        )
        assert service["ExecStart"].startswith("/opt/swarm/bin/swarm ")


def test_pods_have_probes_no_links_to_services_and_the_ports_that_they_name() -> None:
    pods = {part["metadata"]["name"]: pod_of(part) for part in KUBERNETES if pod_of(part)}
    assert set(pods) == {"scheduler", "stage-server"}
    for pod in pods.values():
        assert pod["enableServiceLinks"] is False, "SWARM_SCHEDULER_PORT and the like would be taken for flags"
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[name] for name in ("livenessProbe", "startupProbe")]
        assert {probe["httpGet"]["path"] for probe in probes} == {"/healthz"}
        assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
        assert f"--http-port={ports['http']}" in container["args"]
        named = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= named
    (service,) = (part for part in KUBERNETES if part["kind"] == "Service")
    ports = {port["name"]: port["containerPort"] for port in pods["scheduler"]["containers"][0]["ports"]}
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    assert pods["scheduler"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (budget,) = (part for part in KUBERNETES if part["kind"] == "PodDisruptionBudget")
    (fleet,) = (part for part in KUBERNETES if part["kind"] == "Deployment")
    labels = fleet["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"] == fleet["spec"]["selector"] == {"matchLabels": labels}


def test_compose_mounts_files_that_are_there_and_waits_for_services_that_it_has() -> None:
    services = COMPOSE["services"]
    assert set(services) >= {"scheduler", "stage-server", "mosquitto", "postgres", "prometheus", "grafana"}
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for source in (volume.partition(":")[0] for volume in service.get("volumes", ())):
            assert (DEPLOY / "compose" / source).exists() if "/" in source else source in COMPOSE["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "it is --insecure"
    build = services["scheduler"]["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).exists()


def test_the_image_installs_the_torch_that_is_pinned() -> None:
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert pinned in (DEPLOY / "Dockerfile").read_text()
