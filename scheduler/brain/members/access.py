"""The table of access: the roles that may call each method, deny by default. A test calls each method in each role.

Decision: docs/decisions/047.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.errors import NotAdmitted, RoleForbids
from swarm.pki.names import Principal, Role

_EVERYBODY = frozenset({Role.STAGE_SERVER, Role.RELAY, Role.VIEWER, Role.SUBMITTER, Role.ADMIN, Role.METRICS})
_READERS = frozenset({Role.VIEWER, Role.SUBMITTER, Role.ADMIN})
_SUBMITTERS = frozenset({Role.SUBMITTER, Role.ADMIN})
_ADMINS = frozenset({Role.ADMIN})
_STAGE_SERVERS = frozenset({Role.STAGE_SERVER})
_RELAYS = frozenset({Role.RELAY})


def _methods(service: str, names: str, roles: frozenset[Role]) -> dict[str, frozenset[Role]]:
    return {f"/swarm.wire.{service}/{name}": roles for name in names.split()}


RULES: Mapping[str, frozenset[Role]] = {
    **_methods("Jobs", "Version", _EVERYBODY),
    **_methods("Jobs", "List Get Watch Logs Explain Checkpoints History Trace Peers Probe", _READERS),
    **_methods("Jobs", "MissingShards PutShard Check Submit Cancel Pause Resume Pull Remove", _SUBMITTERS),
    **_methods("Jobs", "Drain Undrain FreePeer Collect", _ADMINS),
    **_methods("Session", "Attach Store Fetch", _STAGE_SERVERS),
    **_methods("Relays", "Attach", _RELAYS),
    **_methods("Members", "Renew", _EVERYBODY),
    **_methods("Members", "Issue CreateToken ListTokens RevokeToken ListMembers RevokeMember", _ADMINS),
    **_methods("Members", "ShowAuthority", _ADMINS),
}


def check_role(principal: Principal, method: str, cluster: str) -> None:
    """RoleForbids or NotAdmitted unless the table allows a holder of this certificate to call the method."""
    if principal.cluster != cluster:
        raise NotAdmitted(f"{principal} is of another swarm: {principal.cluster}, not {cluster}")
    allowed = RULES.get(method, frozenset())
    if principal.role not in allowed:
        call = method.rpartition("/")[2]
        needed = " or ".join(sorted(allowed)) or "nobody"
        raise RoleForbids(
            f"your role {principal.role} does not allow {call}; it needs {needed}",
            hint="ask an admin for another role: swarm token create --role ROLE",
        )
