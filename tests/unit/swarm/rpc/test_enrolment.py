"""How a stage server comes by its certificate: a token, the local admin's word, or what it has from before."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm.errors import (
    BadToken,
    CertificateEnded,
    ClocksDiffer,
    Crowded,
    InvalidConfig,
    NotAdmitted,
    RetryElsewhere,
    Revoked,
    SchedulerUnreachable,
    SwarmError,
    WrongSwarm,
)
from swarm.pki import joining
from swarm.pki.authority import AWAY_S, Authority
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import JOINS_FILE
from swarm.pki.names import Principal, Role
from swarm.pki.profiles import profile_folder
from swarm.pki.tokens import JoinLine
from swarm.process.logs import get_logger
from swarm.rpc import enrolment as module
from swarm.rpc.enrolment import Enrolment
from swarm.rpc.members import renewed, vouched
from swarm.types import PeerId
from tests.support.members import Clock, SchedulerSide, caller_of, identity_of, scheduler_side

PEER = PeerId("gpu-1")
OTHERS = Authority.new(time.time())
DAY_S = 86400.0


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))


def enrolling(folder: Path, clock: Clock | None = None) -> tuple[Enrolment, Wallet]:
    """A process that starts with this data folder."""
    wallet = Wallet(None, clock or time.time)
    return Enrolment(PEER, folder / "pki", wallet, get_logger("test"), clock or time.time), wallet


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the scheduler one on another machine: from then on no profile vouches."""

    def leave() -> None:
        monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "elsewhere"))
        monkeypatch.setattr(module, "PROFILE_LOOKS_MAX", 1)
        monkeypatch.setattr(module, "POLL_S", 0.0)

    return leave


async def works(side: SchedulerSide, identity: Identity | None) -> bool:
    """Whether the scheduler knows this stage server."""
    assert identity is not None
    return (await asyncio.to_thread(renewed, side.address, identity, 10.0)).principal == Principal(
        side.members.authority.cluster, Role.STAGE_SERVER, PEER
    )


async def test_a_token_makes_a_member_that_needs_no_flag_afterwards(
    tmp_path: Path, elsewhere: Callable[[], None]
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        elsewhere()
        enrolment, wallet = enrolling(tmp_path)
        assert enrolment.scheduler == ""
        with pytest.raises(NotAdmitted, match="no certificate for the scheduler") as caught:
            await enrolment.admit(side.address)
        assert "--role stage-server" in caught.value.hint
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
        another, none = enrolling(tmp_path / "second")
        with pytest.raises(BadToken):
            await another.join(line)
        assert (none.identity, another.scheduler) == (None, "")
    with pytest.raises(SchedulerUnreachable, match="no scheduler answers"):
        await another.admit(side.address)


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


async def test_a_profile_that_is_written_a_little_later_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler listens before it has written the local admin's profile."""
    async with scheduler_side(tmp_path / "data") as side:
        looks = iter([None, None, None, side.admin])
        monkeypatch.setattr(module, "find_profile", lambda scheduler: next(looks))
        monkeypatch.setattr(module, "POLL_S", 0.0)
        enrolment, wallet = enrolling(tmp_path)
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_a_token_for_a_person_makes_no_stage_server(tmp_path: Path, role: Role) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        enrolment, wallet = enrolling(tmp_path)
        line = await side.token(role)
        with pytest.raises(NotAdmitted, match=rf"this line is for swarm login \({role}\), not for swarm stage-server"):
            await enrolment.join(line)
        joined = await asyncio.to_thread(joining.join, line, "ann", Application("ann"), verb="login")
        assert joined.identity.principal.role is role
        assert wallet.identity is None
        assert enrolling(tmp_path)[1].identity is None


async def test_the_word_of_somebody_who_is_no_admin_does_not_count(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        viewer = await asyncio.to_thread(vouched, side.address, side.admin, Role.VIEWER, "ann", 10.0)
        viewer.save(profile_folder(side.address))
        with pytest.raises(NotAdmitted, match="no certificate for the scheduler"):
            await enrolling(tmp_path)[0].admit(side.address)


async def test_the_certificate_of_another_stage_server_is_an_error_and_that_of_a_person_is_not_used(
    tmp_path: Path,
) -> None:
    identity_of(OTHERS, Role.STAGE_SERVER, "gpu-2").save(tmp_path / "pki")
    with pytest.raises(InvalidConfig, match="is for stage-server gpu-2, this stage server is gpu-1") as caught:
        enrolling(tmp_path)
    assert "--data-dir" in caught.value.hint
    identity_of(OTHERS, Role.ADMIN, PEER).save(tmp_path / "pki")
    assert enrolling(tmp_path)[1].identity is None


async def test_a_certificate_that_has_ended_is_replaced_where_that_can_be(
    tmp_path: Path, elsewhere: Callable[[], None]
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        ended = identity_of(side.members.authority, Role.STAGE_SERVER, PEER, life_s=-60.0)
        ended.save(tmp_path / "vouched" / "pki")
        ended.save(tmp_path / "joined" / "pki")
        enrolment, wallet = enrolling(tmp_path / "vouched")
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)
        await side.members.revoke(PEER, "to free the name")
        elsewhere()
        enrolment, wallet = enrolling(tmp_path / "joined")
        with pytest.raises(CertificateEnded, match=r"ended 1m0.s ago"):
            await enrolment.admit(side.address)
        await enrolment.join(await side.token())
        await enrolment.admit(side.address)
        assert await works(side, wallet.identity)


@dataclass
class Away:
    """A stage server on another machine that joined with a token and was switched off until its certificate ended."""

    side: SchedulerSide
    folder: Path
    clock: Clock
    first: Identity
    line: JoinLine

    async def comes_back(self, ahead_s: float = 0.0, line: JoinLine | None = None) -> Identity:
        """It starts again with its folder, and perhaps the line of before; its clock may be ahead."""
        enrolment, wallet = enrolling(self.folder, Clock(self.clock.unix_s + ahead_s))
        if line is not None:
            await enrolment.join(line)
        await enrolment.admit(self.side.address)
        assert wallet.identity is not None
        return wallet.identity


AwayFor: TypeAlias = Callable[..., AbstractAsyncContextManager[Away]]


@pytest.fixture
def away_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[], None]) -> AwayFor:
    @asynccontextmanager
    async def away(days: float, grace_s: float = AWAY_S, uses: int = 1) -> AsyncIterator[Away]:
        """Clocks of both sides stand `days` after the end of its certificate."""
        clock = Clock(time.time())
        async with scheduler_side(tmp_path / "data") as side:
            monkeypatch.setattr(side.members, "_wall_s", clock)
            monkeypatch.setattr(side.members, "_grace_s", grace_s)
            monkeypatch.setattr(joining, "_date", lambda text: clock.unix_s)
            elsewhere()
            monkeypatch.setattr(module, "is_loopback", lambda host: False)
            enrolment, wallet = enrolling(tmp_path, clock)
            line = await side.token(uses=uses)
            await enrolment.join(line)
            assert wallet.identity is not None
            clock.unix_s = wallet.identity.ends_unix_s + days * DAY_S
            yield Away(side, tmp_path, clock, wallet.identity, line)

    return away


async def test_a_stage_server_that_was_away_for_a_week_goes_on_without_a_token(
    away_for: AwayFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent for 20 s, and then wanted a new token from an admin; so did each machine and person."""
    async with away_for(7) as away:
        renewed_now = await away.comes_back()
        assert renewed_now.ends_unix_s > away.clock.unix_s
        assert (renewed_now.key_pem, renewed_now.principal) == (away.first.key_pem, away.first.principal)
        away.side.members.check(caller_of(renewed_now.certificate_pem), "/swarm.wire.Session/Attach")
        assert Identity.load(tmp_path / "pki") == renewed_now
        # A member that joined before the address was kept asks beside the scheduler.
        away.first.save(tmp_path / "pki")
        (tmp_path / "pki" / JOINS_FILE).unlink()
        monkeypatch.setattr(joining, "DEFAULT_JOIN_PORT", int(away.side.joins.rpartition(":")[2]))
        assert (await away.comes_back()).ends_unix_s > away.clock.unix_s
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        away.first.save(tmp_path / "pki")
        (tmp_path / "pki" / JOINS_FILE).write_text(f"127.0.0.1:{port}")
        monkeypatch.setattr(joining, "DEFAULT_JOIN_PORT", port)
        with pytest.raises(SchedulerUnreachable, match="has ended, and nobody takes joins at"):
            await away.comes_back()


@pytest.mark.parametrize("uses", [1, 2], ids=["used up", "good for one more"])
async def test_the_command_of_before_still_has_its_line_after_an_absence(away_for: AwayFor, uses: int) -> None:
    """With --join on its command it asked for a certificate with the token, which was used up, and ended."""
    async with away_for(7, uses=uses) as away:
        found = await away.comes_back(line=away.line)
        assert found.key_pem == away.first.key_pem
        assert found.ends_unix_s > away.clock.unix_s


async def test_one_whose_process_slept_past_the_end_goes_on_too(
    away_for: AwayFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with away_for(-1) as away:
        made = Renewing(monkeypatch, tmp_path)
        made.enrolment._wall_s = away.clock
        made.wallet._wall_s = away.clock
        away.clock.unix_s = away.first.renews_unix_s - 1.0
        await made.enrolment.admit(away.side.address)
        away.clock.unix_s = away.first.ends_unix_s + 3 * DAY_S
        await made.renews()
        assert made.wallet.ends_unix_s > away.clock.unix_s


async def sold(away: Away) -> None:
    await away.side.members.revoke(PEER, "the machine was sold")


async def given_anew(away: Away) -> None:
    line = await away.side.token(names=PEER)
    await away.side.members.join(line.id, line.secret, PEER, Application(PEER).request_pem)


async def nothing(away: Away) -> None:
    pass


@pytest.mark.parametrize(
    ("days", "grace_days", "ahead_s", "meanwhile", "kind", "words"),
    [
        (30.1, 30, 0, nothing, CertificateEnded, "ended 30d02h ago; this scheduler renews what ended less than 30d00h"),
        (1.5, 0, 0, nothing, CertificateEnded, r"ended 1d\d\dh ago; this scheduler renews none that has ended"),
        (7, 30, 0, sold, Revoked, "the machine was sold"),
        (7, 30, 0, given_anew, CertificateEnded, "has another key since"),
        (7, 30, 7200.0, nothing, ClocksDiffer, "clocks differ by 2 h 00 min"),
    ],
    ids=["beyond the grace", "never", "revoked", "another has the name", "a wrong clock"],
)
async def test_who_was_away_for_too_long_or_has_no_right_any_more_stays_out(
    away_for: AwayFor,
    days: float,
    grace_days: float,
    ahead_s: float,
    meanwhile: Callable[[Away], Awaitable[None]],
    kind: type[SwarmError],
    words: str,
) -> None:
    async with away_for(days, grace_days * DAY_S) as away:
        await meanwhile(away)
        with pytest.raises(kind, match=words) as caught:
            await away.comes_back(ahead_s)
        if meanwhile is nothing and not ahead_s:
            assert "swarm token create --role stage-server --name gpu-1" in caught.value.hint


async def test_nothing_else_may_be_called_with_a_certificate_that_has_ended(away_for: AwayFor) -> None:
    async with away_for(7) as away:
        with pytest.raises(CertificateEnded, match="good no more"):
            await away.side.members.renew(caller_of(away.first.certificate_pem), Application(PEER).request_pem)
        ended = identity_of(away.side.members.authority, Role.STAGE_SERVER, PEER, life_s=-60.0)
        with pytest.raises(SwarmError):
            await asyncio.to_thread(renewed, away.side.address, ended, 10.0)


async def test_a_scheduler_that_was_made_anew_at_the_same_address_vouches_anew_or_takes_a_token(tmp_path: Path) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        old = identity_of(OTHERS, Role.STAGE_SERVER, PEER)
        for name in ("vouched", "joined"):
            old.save(tmp_path / name / "pki")
        enrolment, wallet = enrolling(tmp_path / "vouched")
        assert wallet.identity == old
        await enrolment.admit(side.address)
        assert wallet.identity is not None
        assert wallet.identity.cluster == side.members.authority.cluster
        assert await works(side, wallet.identity)
        assert enrolling(tmp_path / "vouched")[1].identity == wallet.identity
        await side.members.revoke(PEER, "to free the name")
        enrolment, wallet = enrolling(tmp_path / "joined")
        with pytest.raises(BadToken):
            await enrolment.join(replace(await side.token(), secret="0" * 32))
        await enrolment.join(await side.token())
        assert await works(side, wallet.identity)


@pytest.mark.parametrize("is_kept", [True, False], ids=["the token that let it in", "another old token"])
async def test_a_line_of_an_authority_of_before_keeps_nobody_out_who_has_a_certificate(
    tmp_path: Path, is_kept: bool
) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        line = await side.token()
        await enrolling(tmp_path)[0].join(line)
    shutil.rmtree(tmp_path / "data" / "pki")
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


class Renewing:
    """A stage server whose certificate is due, looked at without pause."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        self.clock = Clock(time.time())
        self.enrolment, self.wallet = enrolling(folder, self.clock)
        self._kept = asyncio.Event()
        keep = self.enrolment._keep

        async def noticed(identity: Identity) -> None:
            await keep(identity)
            self._kept.set()

        monkeypatch.setattr(self.enrolment, "_keep", noticed)

    async def renews(self, comes_due: Callable[[], object] = lambda: None) -> None:
        """It renews its certificate; `comes_due` is called once it has looked for a while."""
        self._kept.clear()
        renewing = asyncio.create_task(self.enrolment.renew())
        for _ in range(5):
            await asyncio.sleep(0)
        comes_due()
        async with asyncio.timeout(30):
            await self._kept.wait()
        renewing.cancel()


async def test_a_certificate_is_renewed_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler_side(tmp_path / "data") as side:
        made = Renewing(monkeypatch, tmp_path)
        await made.enrolment.admit(side.address)
        first = made.wallet.identity
        assert first is not None

        def comes_due() -> None:
            assert made.wallet.identity is first
            made.clock.unix_s = first.renews_unix_s

        await made.renews(comes_due)
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


async def test_one_that_is_to_wait_for_its_certificate_dials_again_and_goes_on(
    away_for: AwayFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was busy, or that had given out too many, ended whoever came back."""
    async with away_for(7) as away:
        answers = [Crowded("30 certificates in a short time", hint="try again in 1.0 s"), RetryElsewhere("it is busy")]
        really = joining.renew_ended

        def renew_ended(*asked: Any) -> Identity:
            if answers:
                raise answers.pop(0)
            return really(*asked)

        monkeypatch.setattr(module, "renew_ended", renew_ended)
        monkeypatch.setattr(module, "FIRST_DIAL_PAUSE_S", 0.0)
        enrolment, wallet = enrolling(tmp_path, away.clock)

        async def find() -> str:
            await enrolment.admit(away.side.address)
            return away.side.address

        with pytest.raises(SchedulerUnreachable, match="gave no certificate yet: 30 certificates") as caught:
            await find()
        assert caught.value.hint == "try again in 1.0 s"
        assert await module.once_reached(find, get_logger("test")) == away.side.address
        assert wallet.ends_unix_s > away.clock.unix_s
