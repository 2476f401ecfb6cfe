"""The names in certificates.

    spiffe://CLUSTER/stage-server/gpu-3          the name of a member
    gpu-3.stage-server.CLUSTER.swarm             the same as a host name, which a dialler demands of the other side

CLUSTER is made of the CA's key, so no two swarms share a name. A name says nothing of addresses: the process that
answers at an address must prove to have the expected name. Decision: docs/decisions/047.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from swarm.errors import NotAdmitted, UsageError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
CLUSTER_CHARACTERS = 16
_URI = re.compile(
    rf"spiffe://(?P<cluster>[a-z2-7]{{{CLUSTER_CHARACTERS}}})/(?P<role>[a-z-]{{1,20}})/(?P<name>{NAME.pattern})"
)


class Role(StrEnum):
    """The role in a certificate; the scheduler's table of access lists the calls that each role may make."""

    SCHEDULER = "scheduler"
    STAGE_SERVER = "stage-server"
    RELAY = "relay"
    VIEWER = "viewer"
    SUBMITTER = "submitter"
    ADMIN = "admin"
    METRICS = "metrics"  # of whoever scrapes


PEOPLE = (Role.VIEWER, Role.SUBMITTER, Role.ADMIN)
MEMBERS = (Role.STAGE_SERVER, Role.RELAY, *PEOPLE, Role.METRICS)


def verb_of(role: Role) -> str:
    """The command of `swarm` with which holders of the role join."""
    return role.value if role in (Role.STAGE_SERVER, Role.RELAY) else "login"


@dataclass(frozen=True, slots=True, order=True)
class Principal:
    """The holder of a certificate."""

    cluster: str
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"spiffe://{self.cluster}/{self.role}/{self.name}"

    @property
    def dns(self) -> str:
        return f"{self.name}.{self.role}.{self.cluster}.swarm"

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def scheduler_of(cluster: str) -> Principal:
    return Principal(cluster, Role.SCHEDULER, "scheduler")


def any_of(cluster: str, role: Role) -> str:
    """A host name that all certificates of a role bear."""
    return f"{role}.{cluster}.swarm"


def principal_of(names: Iterable[str]) -> Principal:
    """The holder of a certificate with these alternative names; NotAdmitted if they are not ours."""
    for name in names:
        if (found := _URI.fullmatch(name)) is not None and found["role"] in list(Role):
            return Principal(found["cluster"], Role(found["role"]), found["name"])
    raise NotAdmitted("the certificate names nobody of a swarm", hint="join first: swarm login --join LINE")


def check_name(name: str) -> str:
    """The name, if it may stand in a certificate; UsageError otherwise."""
    if NAME.fullmatch(name) is None:
        raise UsageError(
            f'"{name[:80]}" is no name: lower-case letters, digits and "-", at most 63',
            hint="for example gpu-3",
        )
    return name


def check_role(role: str) -> Role:
    """A role that a person may give; UsageError for any other."""
    if role not in MEMBERS:
        raise UsageError(f'there is no role "{role[:40]}"', hint=f"one of: {', '.join(MEMBERS)}")
    return Role(role)
