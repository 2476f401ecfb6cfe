"""Who may call what, written down a second time."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest

import swarm.wire
from scheduler.brain.members.access import RULES, check_role
from swarm.errors import NotAdmitted, RoleForbids
from swarm.pki.names import Principal, Role
from swarm.rpc.session import SERVICE, add_session_service

CLUSTER = "abcdefghijklmno2"
TABLE = """
                            stage-server  relay  viewer  submitter  admin  metrics
    Jobs.Version            yes           yes    yes     yes        yes    yes
    Jobs.List               -             -      yes     yes        yes    -
    Jobs.Get                -             -      yes     yes        yes    -
    Jobs.Watch              -             -      yes     yes        yes    -
    Jobs.Logs               -             -      yes     yes        yes    -
    Jobs.Explain            -             -      yes     yes        yes    -
    Jobs.Checkpoints        -             -      yes     yes        yes    -
    Jobs.History            -             -      yes     yes        yes    -
    Jobs.Trace              -             -      yes     yes        yes    -
    Jobs.Peers              -             -      yes     yes        yes    -
    Jobs.Probe              -             -      yes     yes        yes    -
    Jobs.MissingShards      -             -      -       yes        yes    -
    Jobs.PutShard           -             -      -       yes        yes    -
    Jobs.Check              -             -      -       yes        yes    -
    Jobs.Submit             -             -      -       yes        yes    -
    Jobs.Cancel             -             -      -       yes        yes    -
    Jobs.Pause              -             -      -       yes        yes    -
    Jobs.Resume             -             -      -       yes        yes    -
    Jobs.Pull               -             -      -       yes        yes    -
    Jobs.Remove             -             -      -       yes        yes    -
    Jobs.Drain              -             -      -       -          yes    -
    Jobs.Undrain            -             -      -       -          yes    -
    Jobs.FreePeer           -             -      -       -          yes    -
    Jobs.Collect            -             -      -       -          yes    -
    Session.Attach          yes           -      -       -          -      -
    Session.Store           yes           -      -       -          -      -
    Session.Fetch           yes           -      -       -          -      -
    Relays.Attach           -             yes    -       -          -      -
    Members.Renew           yes           yes    yes     yes        yes    yes
    Members.Issue           -             -      -       -          yes    -
    Members.CreateToken     -             -      -       -          yes    -
    Members.ListTokens      -             -      -       -          yes    -
    Members.RevokeToken     -             -      -       -          yes    -
    Members.ListMembers     -             -      -       -          yes    -
    Members.RevokeMember    -             -      -       -          yes    -
    Members.ShowAuthority   -             -      -       -          yes    -
"""


def table() -> dict[str, dict[Role, bool]]:
    """Method -> role -> whether it may."""
    head, *rows = [line.split() for line in TABLE.strip().splitlines()]
    roles = [Role(name) for name in head]
    return {
        f"/swarm.wire.{row[0].replace('.', '/')}": dict(zip(roles, (cell == "yes" for cell in row[1:]), strict=True))
        for row in rows
    }


class Registered:
    """A server that only notes which methods are added to it."""

    def __init__(self) -> None:
        self.methods: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        for handler in handlers:
            self.methods |= set(handler._method_handlers)


def methods_of_the_scheduler() -> set[str]:
    """All that others can call: services of descriptors, and the session, which has none."""
    found = Registered()  # Peer is stage servers', Relay relays'
    add_session_service(found, None)  # type: ignore[arg-type]
    for module in pkgutil.iter_modules(swarm.wire.__path__):
        if module.name.endswith("_pb2"):
            described = importlib.import_module(f"swarm.wire.{module.name}").DESCRIPTOR
            for service in described.services_by_name.values():
                found.methods |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return {method for method in found.methods if not method.startswith(("/swarm.wire.Peer/", "/swarm.wire.Relay/"))}


def test_every_method_is_in_the_table_and_nothing_else_is() -> None:
    methods = methods_of_the_scheduler()
    assert f"/{SERVICE}/Attach" in methods
    assert set(RULES) == methods == set(table())


@pytest.mark.parametrize("role", Role)
def test_each_role_may_call_what_the_table_says(role: Role) -> None:
    who = Principal(CLUSTER, role, "a")
    for method, allowed in table().items():
        if allowed.get(role, False):  # nobody calls as the scheduler
            check_role(who, method, CLUSTER)
        else:
            with pytest.raises(RoleForbids, match=f"your role {role} does not allow {method.rpartition('/')[2]}"):
                check_role(who, method, CLUSTER)


@pytest.mark.parametrize("method", ["", "/swarm.wire.Jobs/", "/swarm.wire.Jobs/Delete", "/Jobs/List", "Version"])
def test_a_method_that_nobody_thought_of_is_for_nobody(method: str) -> None:
    for role in Role:
        with pytest.raises(RoleForbids, match="it needs nobody"):
            check_role(Principal(CLUSTER, role, "a"), method, CLUSTER)


@pytest.mark.parametrize("role", Role)
def test_a_member_of_another_swarm_may_call_nothing(role: Role) -> None:
    for method in table():
        with pytest.raises(NotAdmitted, match="is of another swarm") as caught:
            check_role(Principal("z" * 16, role, "a"), method, CLUSTER)
        assert type(caught.value) is NotAdmitted


def test_whoever_is_refused_learns_which_role_it_takes() -> None:
    with pytest.raises(RoleForbids, match="it needs admin or submitter") as caught:
        check_role(Principal(CLUSTER, Role.VIEWER, "a"), "/swarm.wire.Jobs/Submit", CLUSTER)
    assert "swarm token create --role" in caught.value.hint
