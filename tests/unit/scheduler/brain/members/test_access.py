"""Who may call what, written down a second time in the text beside this file."""

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
from tests.support.golden import Golden

CLUSTER = "abcdefghijklmno2"


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
    assert set(RULES) == methods


def may_call(role: Role, method: str) -> bool:
    try:
        check_role(Principal(CLUSTER, role, "a"), method, CLUSTER)
    except RoleForbids:
        return False
    return True


def test_each_role_may_call_what_the_table_says(golden: Golden) -> None:
    golden("\n".join(f"{method}: {', '.join(role for role in Role if may_call(role, method))}" for method in RULES))


@pytest.mark.parametrize("method", ["", "/swarm.wire.Jobs/", "/swarm.wire.Jobs/Delete", "/Jobs/List", "Version"])
def test_a_method_that_nobody_thought_of_is_for_nobody(method: str) -> None:
    for role in Role:
        with pytest.raises(RoleForbids, match="it needs nobody"):
            check_role(Principal(CLUSTER, role, "a"), method, CLUSTER)


@pytest.mark.parametrize("role", Role)
def test_a_member_of_another_swarm_may_call_nothing(role: Role) -> None:
    for method in RULES:
        with pytest.raises(NotAdmitted, match="is of another swarm") as caught:
            check_role(Principal("z" * 16, role, "a"), method, CLUSTER)
        assert type(caught.value) is NotAdmitted


def test_whoever_is_refused_learns_which_role_it_takes() -> None:
    with pytest.raises(RoleForbids, match="viewer does not allow Submit; it needs admin or submitter") as caught:
        check_role(Principal(CLUSTER, Role.VIEWER, "a"), "/swarm.wire.Jobs/Submit", CLUSTER)
    assert "swarm token create --role" in caught.value.hint
