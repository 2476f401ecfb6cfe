"""How a stage server comes by its certificate: a token, the local admin's word, or what it has from before."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
        line = await side.token(role)
        with pytest.raises(NotAdmitted, match=rf"this line is for swarm login \({role}\), not for swarm stage-server"):
            await enrolment.join(line)
        joined = await asyncio.to_thread(joining.join, line, "ann", Application("ann"), verb="login")
        assert joined.identity.principal.role is role
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

    async def comes_back(self) -> Identity:
        """It starts again, with nothing but its folder."""
        enrolment, wallet = enrolling(self.folder, self.clock)
        await enrolment.admit(self.side.address)
        assert wallet.identity is not None
        return wallet.identity


@asynccontextmanager
async def away_for(
    days: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float = AWAY_S, uses: int = 1
) -> AsyncIterator[Away]:
    """Clocks of both sides stand `days` after the end of its certificate."""
    clock = Clock(time.time())
    async with scheduler_side(tmp_path / "data") as side:
        monkeypatch.setattr(side.members, "_wall_s", clock)
        monkeypatch.setattr(side.members, "_grace_s", grace_s)
        monkeypatch.setattr(joining, "_date", lambda text: clock.unix_s)
        without_profile(side, monkeypatch, tmp_path)
        monkeypatch.setattr(module, "is_loopback", lambda host: False)
        enrolment, wallet = enrolling(tmp_path, clock)
        line = await side.token(uses=uses)
        await enrolment.join(line)
        assert wallet.identity is not None
        clock.unix_s = wallet.identity.ends_unix_s + days * DAY_S
        yield Away(side, tmp_path, clock, wallet.identity, line)


async def test_a_stage_server_that_was_away_for_a_week_goes_on_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent for 20 s, and then wanted a new token from an admin; so did each machine and person."""
    async with away_for(7, tmp_path, monkeypatch) as away:
        renewed_now = await away.comes_back()
        assert renewed_now.ends_unix_s > away.clock.unix_s
        assert (renewed_now.key_pem, renewed_now.principal) == (away.first.key_pem, away.first.principal)
        away.side.members.check(caller_of(renewed_now.certificate_pem), "/swarm.wire.Session/Attach")
        assert Identity.load(tmp_path / "pki") == renewed_now


@pytest.mark.parametrize("uses", [1, 2], ids=["used up", "good for one more"])
async def test_the_command_of_before_still_has_its_line_after_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses: int
) -> None:
    """With --join on its command it asked for a certificate with the token, which was used up, and ended."""
    async with away_for(7, tmp_path, monkeypatch, uses=uses) as away:
        enrolment, wallet = enrolling(tmp_path, away.clock)
        await enrolment.join(away.line)
        await enrolment.admit(away.side.address)
        assert wallet.identity is not None
        assert wallet.identity.key_pem == away.first.key_pem
        assert wallet.ends_unix_s > away.clock.unix_s


async def test_one_whose_process_slept_past_the_end_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with away_for(-1, tmp_path, monkeypatch) as away:
        made = Renewing(monkeypatch, tmp_path)
        made.enrolment._wall_s = away.clock
        made.wallet._wall_s = away.clock
        away.clock.unix_s = away.first.renews_unix_s - 1.0
        await made.enrolment.admit(away.side.address)
        away.clock.unix_s = away.first.ends_unix_s + 3 * DAY_S
        renewing = asyncio.create_task(made.enrolment.renew())
        async with asyncio.timeout(30):
            await made.kept.wait()
        renewing.cancel()
        assert made.wallet.ends_unix_s > away.clock.unix_s


@pytest.mark.parametrize(
    ("days", "grace_days", "words"),
    [
        (30.1, 30, "ended 30d02h ago; this scheduler renews what ended less than 30d00h ago"),
        (1.5, 0, r"ended 1d\d\dh ago; this scheduler renews none that has ended"),
    ],
    ids=["beyond the grace", "never"],
)
async def test_who_was_away_for_too_long_needs_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: float, grace_days: float, words: str
) -> None:
    async with away_for(days, tmp_path, monkeypatch, grace_days * DAY_S) as away:
        with pytest.raises(CertificateEnded, match=words) as caught:
            await away.comes_back()
        assert "swarm token create --role stage-server --name gpu-1" in caught.value.hint


async def test_who_was_revoked_while_away_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        await away.side.members.revoke(PEER, "the machine was sold")
        with pytest.raises(Revoked, match="the machine was sold"):
            await away.comes_back()


async def test_whose_name_was_given_anew_while_away_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        other = Application(PEER)
        line = await away.side.token(names=PEER)
        await away.side.members.join(line.id, line.secret, PEER, other.request_pem)
        with pytest.raises(CertificateEnded, match="has another key since"):
            await away.comes_back()


async def test_whose_clock_is_wrong_is_told_both_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        enrolment, _ = enrolling(tmp_path, Clock(away.clock.unix_s + 2 * 3600.0))
        with pytest.raises(ClocksDiffer, match="clocks differ by 2 h 00 min"):
            await enrolment.admit(away.side.address)


async def test_nothing_else_may_be_called_with_a_certificate_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        with pytest.raises(CertificateEnded, match="good no more"):
            await away.side.members.renew(caller_of(away.first.certificate_pem), Application(PEER).request_pem)
        ended = identity_of(away.side.members.authority, Role.STAGE_SERVER, PEER, life_s=-60.0)
        with pytest.raises(SwarmError):
            await asyncio.to_thread(renewed, away.side.address, ended, 10.0)


async def test_one_that_joined_before_the_address_was_kept_asks_beside_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        (tmp_path / "pki" / JOINS_FILE).unlink()
        monkeypatch.setattr(joining, "DEFAULT_JOIN_PORT", int(away.side.joins.rpartition(":")[2]))
        assert (await away.comes_back()).ends_unix_s > away.clock.unix_s


async def test_a_scheduler_that_does_not_answer_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with away_for(7, tmp_path, monkeypatch) as away:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        (tmp_path / "pki" / JOINS_FILE).write_text(f"127.0.0.1:{port}")
        monkeypatch.setattr(joining, "DEFAULT_JOIN_PORT", port)
        with pytest.raises(SchedulerUnreachable, match="has ended, and nobody takes joins at"):
            await away.comes_back()


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


async def test_one_that_is_to_wait_for_its_certificate_dials_again_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that was busy, or that had given out too many, ended whoever came back."""
    async with away_for(7, tmp_path, monkeypatch) as away:
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
