"""How a stage server comes by its certificate: a token, the local admin's word, or what it has from before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import (
    BadToken,
    CertificateEnded,
    InvalidConfig,
    NotAdmitted,
    Revoked,
    SchedulerUnreachable,
    WrongSwarm,
)
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Principal, Role
from swarm.pki.profiles import profile_folder
from swarm.pki.succession import Succession
from swarm.process.logs import get_logger
from swarm.rpc import enrolment as module
from swarm.rpc.enrolment import Enrolment
from swarm.rpc.members import renewed, vouched
from swarm.types import PeerId
from tests.support.members import Clock, SchedulerSide, identity_of, scheduler_side

PEER = PeerId("gpu-1")
OTHERS = Authority.new(time.time())


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))


def enrolling(folder: Path, clock: Clock | None = None) -> tuple[Enrolment, Wallet]:
    """A process that starts with this data folder."""
    wallet = Wallet(None, clock or time.time)
    return Enrolment(PEER, folder / "pki", wallet, get_logger("test"), clock or time.time), wallet


def without_profile(side: SchedulerSide, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scheduler is on another machine."""
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(module, "PROFILE_LOOKS_MAX", 1)
    monkeypatch.setattr(module, "POLL_S", 0.0)


async def works(side: SchedulerSide, identity: Identity | None) -> bool:
    """Whether the scheduler knows this stage server."""
    assert identity is not None
    return (await asyncio.to_thread(renewed, side.address, identity, 10.0)).principal == Principal(
        side.members.authority.cluster, Role.STAGE_SERVER, PEER
    )


async def test_a_token_makes_a_member_that_needs_no_flag_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        without_profile(side, monkeypatch, tmp_path)
        enrolment, wallet = enrolling(tmp_path)
        assert enrolment.scheduler == ""
        line = await side.token()
        await enrolment.join(line)
        await enrolment.admit(side.address)
        assert enrolment.scheduler == side.address
        assert await works(side, wallet.identity)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "pki").iterdir()} == {0o600}
        again, later = enrolling(tmp_path)
        assert later.identity == wallet.identity
        await again.join(line)  # still on its command line; the token is used
        await again.admit(side.address)
        assert (again.scheduler, later.identity) == (side.address, wallet.identity)


async def test_the_local_admin_vouches_and_nobody_types_anything(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        enrolment, wallet = enrolling(tmp_path)
        await enrolment.admit(side.address)
        first = wallet.identity
        assert await works(side, first)
        await enrolment.admit(side.address)
        assert wallet.identity is first
        again, later = enrolling(tmp_path)
        await again.admit(side.address)
        assert later.identity == first


async def test_whoever_has_neither_token_nor_profile_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        without_profile(side, monkeypatch, tmp_path)
        enrolment, wallet = enrolling(tmp_path)
        with pytest.raises(NotAdmitted, match="no certificate for the scheduler") as caught:
            await enrolment.admit(side.address)
        assert "--role stage-server" in caught.value.hint
        assert wallet.identity is None
    with pytest.raises(SchedulerUnreachable, match="no scheduler answers"):
        await enrolment.admit(side.address)


async def test_a_profile_that_is_written_a_little_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler listens before it has written the local admin's profile."""
    async with scheduler_side(tmp_path / "data") as side:
        admin, looks = side.admin, iter([None, None, None, side.admin])
        monkeypatch.setattr(module, "find_profile", lambda scheduler: next(looks))
        monkeypatch.setattr(module, "POLL_S", 0.0)
        enrolment, wallet = enrolling(tmp_path)
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)
        assert admin.principal.role is Role.ADMIN


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_a_token_for_a_person_makes_no_stage_server(tmp_path: Path, role: Role) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        enrolment, wallet = enrolling(tmp_path)
        with pytest.raises(NotAdmitted, match=f"the token is for {role} gpu-1, not for stage server gpu-1"):
            await enrolment.join(await side.token(role))
        assert wallet.identity is None
        assert enrolling(tmp_path)[1].identity is None


async def test_a_token_that_is_used_leaves_nothing_behind(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token()
        await enrolling(tmp_path / "first")[0].join(line)
        enrolment, wallet = enrolling(tmp_path / "second")
        with pytest.raises(BadToken):
            await enrolment.join(line)
        assert (wallet.identity, enrolment.scheduler) == (None, "")


async def test_the_word_of_somebody_who_is_no_admin_does_not_count(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        viewer = await asyncio.to_thread(vouched, side.address, side.admin, Role.VIEWER, "ann", 10.0)
        viewer.save(profile_folder(side.address))
        with pytest.raises(NotAdmitted, match="no certificate for the scheduler"):
            await enrolling(tmp_path)[0].admit(side.address)


async def test_the_certificate_of_another_stage_server_is_an_error(tmp_path: Path) -> None:
    identity_of(OTHERS, Role.STAGE_SERVER, "gpu-2").save(tmp_path / "pki")
    with pytest.raises(InvalidConfig, match="is for stage-server gpu-2, this stage server is gpu-1") as caught:
        enrolling(tmp_path)
    assert "--data-dir" in caught.value.hint


async def test_the_identity_of_a_person_is_not_used(tmp_path: Path) -> None:
    identity_of(OTHERS, Role.ADMIN, PEER).save(tmp_path / "pki")
    assert enrolling(tmp_path)[1].identity is None


async def test_a_certificate_that_has_ended_is_replaced_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        ended = identity_of(side.members.authority, Role.STAGE_SERVER, PEER, life_s=-60.0)
        ended.save(tmp_path / "vouched" / "pki")
        ended.save(tmp_path / "joined" / "pki")
        enrolment, wallet = enrolling(tmp_path / "vouched")
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)
        await side.members.revoke(PEER, "to free the name")
        without_profile(side, monkeypatch, tmp_path)
        enrolment, wallet = enrolling(tmp_path / "joined")
        with pytest.raises(CertificateEnded, match=r"ended 0\.0 days ago"):
            await enrolment.admit(side.address)
        await enrolment.join(await side.token())
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)


async def test_a_scheduler_that_was_made_anew_at_the_same_address_vouches_anew(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        old = identity_of(OTHERS, Role.STAGE_SERVER, PEER)
        old.save(tmp_path / "pki")
        enrolment, wallet = enrolling(tmp_path)
        assert wallet.identity == old
        await enrolment.admit(side.address)
        assert wallet.identity is not None
        assert wallet.identity.cluster == side.members.authority.cluster
        assert await works(side, wallet.identity)
        assert enrolling(tmp_path)[1].identity == wallet.identity


async def test_a_token_of_another_swarm_replaces_what_was_got_before(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        identity_of(OTHERS, Role.STAGE_SERVER, PEER).save(tmp_path / "pki")
        enrolment, wallet = enrolling(tmp_path)
        await enrolment.join(await side.token())
        assert await works(side, wallet.identity)


async def rotated(folder: Path) -> None:
    """A whole rotation, while the scheduler is away."""
    clock = Clock(time.time())
    authority = Succession.open(folder, clock)
    authority.rotate(LIFE_S, 0.0)
    assert authority.times is not None
    clock.unix_s = authority.times.leaves_unix_s
    authority.save()


@pytest.mark.parametrize("is_kept", [True, False], ids=["the token that let it in", "another old token"])
async def test_a_line_of_before_a_rotation_keeps_nobody_out_who_has_a_certificate(
    tmp_path: Path, is_kept: bool
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token()
        await enrolling(tmp_path)[0].join(line)
    await rotated(tmp_path / "data" / "pki")
    async with scheduler_side(tmp_path / "data") as side:
        line = replace(line, address=side.joins)
        assert line.pin != side.members.authority.pin
        renewed_since = await asyncio.to_thread(vouched, side.address, side.admin, Role.STAGE_SERVER, PEER, 10.0)
        renewed_since.save(tmp_path / "pki")
        if not is_kept:
            (tmp_path / "pki" / "token").unlink()
        enrolment, wallet = enrolling(tmp_path)
        await enrolment.join(line)
        assert wallet.identity == renewed_since
        assert await works(side, wallet.identity)
        with pytest.raises(WrongSwarm, match="is not the swarm of the token"):
            await enrolling(tmp_path / "without")[0].join(line)


async def test_a_bad_token_of_another_swarm_is_an_error(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        identity_of(OTHERS, Role.STAGE_SERVER, PEER).save(tmp_path / "pki")
        with pytest.raises(BadToken):
            await enrolling(tmp_path)[0].join(replace(await side.token(), secret="0" * 32))


class Renewing:
    """A stage server whose certificate is due, looked at without pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        self.clock = Clock(time.time())
        self.enrolment, self.wallet = enrolling(folder, self.clock)
        self.kept = asyncio.Event()
        keep = self.enrolment._keep

        async def noticed(identity: Identity) -> None:
            await keep(identity)
            self.kept.set()

        monkeypatch.setattr(self.enrolment, "_keep", noticed)


async def test_a_certificate_is_renewed_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        made = Renewing(monkeypatch, tmp_path)
        await made.enrolment.admit(side.address)
        first = made.wallet.identity
        assert first is not None
        made.kept.clear()
        renewing = asyncio.create_task(made.enrolment.renew())
        for _ in range(5):
            await asyncio.sleep(0)
        assert made.wallet.identity is first
        made.clock.unix_s = first.renews_unix_s
        async with asyncio.timeout(30):
            await made.kept.wait()
        renewing.cancel()
        assert made.wallet.identity is not None
        assert made.wallet.identity.key_pem != first.key_pem
        assert Identity.load(tmp_path / "pki") == made.wallet.identity
        assert await works(side, made.wallet.identity)


async def test_a_scheduler_that_is_away_is_asked_again_and_a_revocation_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        made = Renewing(monkeypatch, tmp_path)
        await made.enrolment.admit(side.address)
        first = made.wallet.identity
        assert first is not None
        made.clock.unix_s = first.renews_unix_s
        answers = iter([SchedulerUnreachable("away"), SchedulerUnreachable("away"), Revoked("it was stolen")])

        def away(address: str, identity: Identity, timeout_s: float) -> Identity:
            assert (address, identity) == (side.address, first)
            raise next(answers)

        monkeypatch.setattr(module, "renewed", away)
        with pytest.raises(Revoked, match="stolen"):
            async with asyncio.timeout(30):
                await made.enrolment.renew()
        assert list(answers) == []
