"""Who a certificate names, and what may be a name."""

from __future__ import annotations

import pytest

from swarm.errors import NotAdmitted, UsageError
from swarm.pki.names import MEMBERS, Principal, Role, any_of, check_name, check_role, principal_of, scheduler_of

CLUSTER = "abcdefghijklmno2"
GPU = Principal(CLUSTER, Role.STAGE_SERVER, "gpu-3")


def test_a_principal_is_spelt_as_a_uri_and_as_a_host_name() -> None:
    assert GPU.uri == f"spiffe://{CLUSTER}/stage-server/gpu-3"
    assert GPU.dns == f"gpu-3.stage-server.{CLUSTER}.swarm"
    assert str(GPU) == "stage-server gpu-3"
    assert scheduler_of(CLUSTER).dns == f"scheduler.scheduler.{CLUSTER}.swarm"


def test_a_uri_names_the_principal_that_it_was_made_of() -> None:
    for role in Role:
        principal = Principal(CLUSTER, role, "a-1")
        assert principal_of(["https://elsewhere", principal.uri]) == principal


@pytest.mark.parametrize(
    "uri",
    [
        "",
        f"spiffe://{CLUSTER}/stage-server/",
        f"spiffe://{CLUSTER}/janitor/gpu-3",
        f"spiffe://{CLUSTER}/Admin/me",
        f"spiffe://{CLUSTER}/admin/me/more",
        f"spiffe://{CLUSTER}/admin/me\n",
        f"spiffe://{CLUSTER}/admin/ME",
        f"spiffe://{CLUSTER[:-1]}/admin/me",
        f"spiffe://{CLUSTER[:-1]}1/admin/me",
        f"xspiffe://{CLUSTER}/admin/me",
        f"spiffe://{CLUSTER}/admin/{'a' * 64}",
    ],
)
def test_any_other_uri_names_nobody(uri: str) -> None:
    with pytest.raises(NotAdmitted, match="names nobody"):
        principal_of([uri])


def test_no_name_of_a_member_is_one_that_all_of_a_role_share() -> None:
    shared = {any_of(CLUSTER, role) for role in Role}
    assert len(shared) == len(Role)
    assert not shared & {Principal(CLUSTER, role, name).dns for role in Role for name in (*Role, "swarm", CLUSTER)}


def test_a_name_is_of_lower_case_letters_digits_and_dashes() -> None:
    for name in ("a", "0", "gpu-3", "a--b", "a" * 63):
        assert check_name(name) == name
    for name in ("", "-", "-a", "a-", "A", "a.b", "a/b", "a_b", "a\n", "ä", "a" * 64, "*", "a b"):
        with pytest.raises(UsageError, match="is no name"):
            check_name(name)


def test_a_person_may_give_every_role_but_the_schedulers() -> None:
    assert [check_role(str(role)) for role in MEMBERS] == list(MEMBERS)
    for role in ("scheduler", "", "ADMIN", "root"):
        with pytest.raises(UsageError, match="there is no role") as caught:
            check_role(role)
        assert "stage-server, relay, viewer, submitter, admin" in caught.value.hint
