"""Invitations and logins, as the person types them, beside a scheduler's side of real HTTPS and gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from client.cli import run
from client.verbs.members.login import _after, _joining
from swarm.errors import BadToken
from swarm.pki.names import MEMBERS, Role
from swarm.pki.profiles import find_profile, memberships
from tests.support.members import scheduler_side


@pytest.mark.parametrize("role", [Role.RELAY, Role.STAGE_SERVER])
async def test_a_line_that_is_no_persons_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: Role
) -> None:
    """`swarm login` used a relay's line up, said "you are relay root", and wrote the relay's key over the person's."""
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "own"))
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token(role)
        monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "other"))
        assert await asyncio.to_thread(run, ["login", "--join", str(line)]) == BadToken.exit_code
        told = capsys.readouterr().err
        assert f"this line is for swarm {role} ({role}), not for swarm login" in told
        assert memberships() == []
        assert [(token.id, token.uses_left) for token in side.members.tokens()] == [(line.id, 1)]


async def test_who_logs_in_has_a_membership_and_an_address_to_come_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "own"))
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token(Role.VIEWER)
        monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "other"))
        assert await asyncio.to_thread(run, ["login", "--join", str(line), "--name", "ann"]) == 0
        assert memberships() == [side.address]
        found = find_profile(side.address)
        assert found is not None
        assert found.principal.name == "ann"
        (joins,) = (tmp_path / "other").glob("*/joins")
        assert joins.read_text() == side.joins


@pytest.mark.parametrize("role", MEMBERS)
def test_the_invitation_names_the_flags_of_a_machine_that_others_reach_otherwise(role: Role) -> None:
    """A stage server that joined as the hint said listened at 127.0.0.1, where nobody of another machine reached it."""
    told = _joining(role, "10.77.0.1:7949#swm1-x")
    assert ("--listen HOST:PORT" in told) == (role in (Role.STAGE_SERVER, Role.RELAY))
    assert ("--via-relay" in told) == (role is Role.STAGE_SERVER)
    assert "--listen" not in _joining(role, "127.0.0.1:7949#swm1-x")


def test_the_work_of_a_person_who_is_out_is_done_by_nobody_else() -> None:
    """Of a submitter that was revoked it was said that others do its work."""
    assert _after(Role.STAGE_SERVER) == ", its work is done by others"
    assert _after(Role.SUBMITTER) == ", its jobs go on"
    assert _after(Role.RELAY) == ""
