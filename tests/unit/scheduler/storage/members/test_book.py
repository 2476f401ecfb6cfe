"""The book of members: who gets a certificate, and who is not let in any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.brain.members import enrolment
from scheduler.storage.database import Database
from scheduler.storage.members import book
from scheduler.storage.members.book import Members
from swarm.errors import (
    BadToken,
    CertificateEnded,
    Crowded,
    DatabaseUnavailable,
    NotAdmitted,
    NotFound,
    Refused,
    Revoked,
    RoleForbids,
    UsageError,
)
from swarm.pki.authority import LIFE_S, Authority
from swarm.pki.identity import Application
from swarm.pki.names import Principal, Role, scheduler_of
from swarm.pki.tokens import JoinLine
from swarm.rpc.guard import Caller
from swarm.types import PeerId
from tests.support.members import Clock, caller_of, database_url

GPU = Role.STAGE_SERVER
ATTACH, LIST = "/swarm.wire.Session/Attach", "/swarm.wire.Jobs/List"
AUTHORITY = Authority.new(Clock().unix_s)


class Unsteady(Database):
    """A database that is away when the test says so."""

    fails: Callable[[], bool] = staticmethod(lambda: False)

    async def write(self, change: Callable[[sa.Connection], object]) -> None:
        if self.fails():
            raise DatabaseUnavailable("the database is away")
        await super().write(change)


@asynccontextmanager
async def opened(
    folder: Path, clock: Clock, executor: ThreadPoolExecutor | None = None
) -> AsyncIterator[tuple[Members, Unsteady]]:
    database = await Unsteady.open(database_url(folder), executor)
    assert isinstance(database, Unsteady)
    made = Members(AUTHORITY, database, clock)
    await made.load()
    yield made, database
    await database.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Unsteady]:
    made = await Unsteady.open(database_url(tmp_path), None)
    assert isinstance(made, Unsteady)
    yield made
    await made.close()


@pytest.fixture
async def members(database: Unsteady, clock: Clock) -> Members:
    made = Members(AUTHORITY, database, clock)
    await made.load()
    return made


async def token(members: Members, role: Role = GPU, ttl_s: float = 600.0, uses: int = 1, names: str = "") -> JoinLine:
    line, _ = await members.create_token(role, ttl_s, uses, names, "admin me", "10.0.0.5:7949")
    return line


async def joined(
    members: Members, line: JoinLine, name: str = "gpu-1", application: Application | None = None
) -> Caller:
    """Whoever joined with the token, as he will call."""
    request = (application or Application(name)).request_pem
    return caller_of(await members.join(line.id, line.secret, name, request))


async def refusal(members: Members, line: JoinLine, name: str = "gpu-1", application: Application | None = None) -> str:
    with pytest.raises(BadToken) as caught:
        await joined(members, line, name, application)
    return caught.value.message


def is_known(members: Members, caller: Caller, method: str = ATTACH) -> bool:
    try:
        members.check(caller, method)
    except (Revoked, CertificateEnded):
        return False
    return True


# Tokens -------------------------------------------------------------------------------------------------------------


async def test_a_token_lets_one_join_once(members: Members) -> None:
    line = await token(members)
    caller = await joined(members, line)
    assert caller.principal == Principal(AUTHORITY.cluster, GPU, "gpu-1")
    members.check(caller, ATTACH)
    assert members.tokens() == []
    assert "used" in await refusal(members, line, "gpu-2")
    assert [member.name for member in members.members()] == ["gpu-1"]


async def test_of_two_who_join_at_the_same_time_with_one_use_one_gets_in(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        async with opened(tmp_path, Clock(), executor) as (members, _):
            line = await token(members, uses=2)
            done = await asyncio.gather(
                *(joined(members, line, f"gpu-{number}") for number in range(5)), return_exceptions=True
            )
            assert [type(outcome) for outcome in done] == [Caller, Caller, BadToken, BadToken, BadToken]
            same = await token(members, uses=2)
            done = await asyncio.gather(*(joined(members, same, "twin") for _ in range(2)), return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in done) == ["BadToken", "Caller"]
            assert len(members.members()) == 3


async def test_an_answer_that_was_lost_can_be_asked_for_again_with_the_same_key(members: Members) -> None:
    line, application = await token(members), Application("gpu-1")
    first = await joined(members, line, application=application)
    assert await joined(members, line, application=application) == first
    assert "used" in await refusal(members, line)  # with another key
    assert "used" in await refusal(members, line, "gpu-2", application)


async def test_a_join_that_the_database_broke_off_can_be_repeated(members: Members, database: Unsteady) -> None:
    """The use was spent, the member was not written down, and the same key met a KeyError for ever."""
    line, application = await token(members), Application("gpu-1")
    for broken in ([True], [False, True]):  # before the use is spent, and after
        answers = iter(broken)
        database.fails = lambda answers=answers: next(answers)
        with pytest.raises(DatabaseUnavailable):
            await joined(members, line, application=application)
    database.fails = lambda: False
    assert members.members() == []
    assert is_known(members, await joined(members, line, application=application))


async def test_a_token_ends(members: Members, clock: Clock) -> None:
    line, application = await token(members, ttl_s=600.0, uses=2), Application("gpu-1")
    used, other = await token(members, ttl_s=9 * LIFE_S), Application("gpu-2")
    await joined(members, used, "gpu-2", other)
    clock.unix_s += 599.0
    await joined(members, line, application=application)
    clock.unix_s += 1.0
    assert members.tokens() == []
    for who in (Application("gpu-2"), application):
        assert "expired" in await refusal(members, line, application=who)
    clock.unix_s += LIFE_S
    assert "used" in await refusal(members, used, "gpu-2", other), "its key comes back only while its certificate lives"


async def test_a_wrong_secret_an_unknown_token_and_a_used_one_are_told_alike(members: Members) -> None:
    line, used = await token(members), await token(members)
    await joined(members, used)
    wrong = (replace(line, secret=line.secret[::-1]), replace(line, id="a" * 8), replace(line, secret=""), used)
    assert len({await refusal(members, token, "gpu-2") for token in wrong}) == 1
    assert [token.uses_left for token in members.tokens()] == [1]


async def test_a_revoked_token_lets_nobody_in(members: Members) -> None:
    line = await token(members)
    assert (await members.revoke_token(line.id)).id == line.id
    await refusal(members, line)
    with pytest.raises(NotFound, match="there is no token"):
        await members.revoke_token(line.id)


async def test_a_token_is_for_the_names_that_it_says(members: Members) -> None:
    line = await token(members, uses=3, names="gpu-*")
    assert 'for names like "gpu-*", not for "cpu-1"' in await refusal(members, line, "cpu-1")
    with pytest.raises(BadToken) as caught:
        await joined(members, line, "cpu-1")
    assert "swarm token create --role stage-server --name cpu-1" in caught.value.hint
    assert (await joined(members, line, "gpu-7")).principal.name == "gpu-7"
    with pytest.raises(UsageError, match="is no name"):
        await joined(members, line, "", Application("x"))
    one = await token(members, names="ann")
    assert (await joined(members, one, "", Application("x"))).principal.name == "ann"


@pytest.mark.parametrize("name", ["GPU", "a/b", "gpu-1\n", "*", "ä"])
async def test_a_name_that_is_none_spends_no_use(members: Members, name: str) -> None:
    line = await token(members)
    with pytest.raises(UsageError):
        await joined(members, line, name, Application("a"))
    with pytest.raises(Refused):  # nor does a request that proves no key
        await members.join(line.id, line.secret, "gpu-1", b"nonsense")
    await joined(members, line)


async def test_a_secret_is_kept_nowhere(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock()) as (members, _):
        line = await token(members)
        assert line.secret not in repr(members.tokens())
    assert not any(line.secret.encode() in path.read_bytes() for path in tmp_path.iterdir())


async def test_tokens_have_limits(members: Members, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for ttl_s, uses in ((0.0, 1), (-1.0, 1), (float("nan"), 1), (31 * 86400.0, 1), (1.0, 0), (1.0, 1001)):
        with pytest.raises(UsageError, match="at most 30 days"):
            await token(members, ttl_s=ttl_s, uses=uses)
    with pytest.raises(RoleForbids, match="nobody joins as scheduler"):
        await token(members, Role.SCHEDULER)
    monkeypatch.setattr(book, "TOKENS_MAX", 3)
    for _ in range(3):
        await token(members)
    with pytest.raises(Refused, match="3 tokens wait to be used"):
        await token(members)
    clock.unix_s += 600.0  # what has ended makes room
    await token(members)
    assert len(members.tokens()) == 1


# Names and keys -----------------------------------------------------------------------------------------------------


async def test_a_name_that_somebody_bears_is_taken_until_his_certificate_ends(members: Members, clock: Clock) -> None:
    first = await joined(members, await token(members))
    late = await token(members, ttl_s=2 * LIFE_S, names="gpu-1")
    assert "there is a stage-server gpu-1 already" in await refusal(members, late)
    viewer = await joined(members, await token(members, Role.VIEWER))  # another role, another name
    assert is_known(members, first)
    assert is_known(members, viewer, LIST)
    clock.unix_s += LIFE_S
    assert "is away, and may come back" in await refusal(members, await token(members))
    second = await joined(members, late)
    assert not is_known(members, first)
    assert is_known(members, second)


async def test_older_keys_are_good_while_their_holder_goes_on_renewing(members: Members, clock: Clock) -> None:
    """A session lives on the connection that it was dialled on, and so with an older key, through many renewals."""
    callers = [await joined(members, await token(members))]
    for _ in range(6):
        clock.unix_s += LIFE_S / 2
        callers.append(caller_of(await members.renew(callers[-1], Application("gpu-1").request_pem)))
        await members.renew(callers[-2], Application("gpu-1").request_pem)  # an answer was lost: with the key before
    assert len({caller.fingerprint for caller in callers}) == 7
    assert all(is_known(members, caller) for caller in callers)
    clock.unix_s += LIFE_S
    with pytest.raises(CertificateEnded, match="stage-server gpu-1 on this connection is good no more") as caught:
        members.check(callers[-1], ATTACH)
    assert "dial again" in caught.value.hint
    with pytest.raises(CertificateEnded):
        await members.renew(callers[-1], Application("gpu-1").request_pem)


async def test_the_keys_of_one_member_have_a_limit_and_the_newest_stay(
    members: Members, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "KEYS_MAX", 4)
    callers = [await joined(members, await token(members))]
    for _ in range(book.KEYS_MAX + 3):
        clock.unix_s += 1.0
        callers.append(caller_of(await members.renew(callers[-1], Application("gpu-1").request_pem)))
    known = [is_known(members, caller) for caller in callers]
    assert known == [False] * 3 + [True] * (book.KEYS_MAX + 1)


async def test_a_renewal_gives_the_callers_own_name_whatever_is_asked(members: Members, clock: Clock) -> None:
    caller = await joined(members, await token(members))
    clock.unix_s += 100.0
    assert caller_of(await members.renew(caller, Application("admin").request_pem)).principal == caller.principal
    (member,) = members.members()
    assert (member.name, member.ends_unix_s, member.invited_by) == ("gpu-1", clock.unix_s + LIFE_S, "admin me")
    assert (members.inviter(PeerId("gpu-1")), members.inviter(PeerId("nobody"))) == ("admin me", "")


async def test_a_key_that_the_book_does_not_know_is_refused(members: Members) -> None:
    """Whoever makes a certificate with a stolen authority's key, behind the book's back."""
    caller = await joined(members, await token(members))
    assert not is_known(members, replace(caller, fingerprint="0" * 64))
    assert not is_known(members, replace(caller, principal=replace(caller.principal, name="gpu-2")))
    with pytest.raises(NotAdmitted, match="another swarm"):
        members.check(replace(caller, principal=replace(caller.principal, cluster="z" * 16)), ATTACH)
    with pytest.raises(RoleForbids):
        members.check(caller, LIST)
    with pytest.raises(RoleForbids):
        members.check(replace(caller, principal=scheduler_of(AUTHORITY.cluster)), ATTACH)


async def test_an_admins_word_replaces_the_key_of_a_name(members: Members) -> None:
    first = await joined(members, await token(members))
    second = caller_of(await members.issue(Application("gpu-1").request_pem, GPU, "gpu-1", "admin me"))
    here = await members.issue_here(Role.ADMIN, "local")
    assert [is_known(members, certificate) for certificate in (first, second)] == [False, True]
    members.check(caller_of(here.certificate_pem), LIST)
    with pytest.raises(UsageError):
        await members.issue(Application("x").request_pem, GPU, "a/b", "admin me")
    await members.revoke("gpu-1", "stolen")
    with pytest.raises(Revoked, match="stage-server gpu-1 was revoked: stolen") as caught:
        await members.issue(Application("gpu-1").request_pem, GPU, "gpu-1", "admin me")
    assert "--name gpu-1" in caught.value.hint


async def test_whoever_is_taken_in_anew_is_named_as_the_keys_before_are_good_no_more(
    members: Members, clock: Clock
) -> None:
    """A stage server came back a second before its certificate ended, began a session with it, and was vouched for.

    The session went on, but nothing could be saved on its connection. So the job failed with its final weights.
    """
    replaced: list[str] = []
    members.on_replaced = lambda member: replaced.append(f"{member.role}/{member.name}")
    first = await joined(members, await token(members))
    await members.renew(first, Application("gpu-1").request_pem)
    assert replaced == []
    await members.issue(Application("gpu-1").request_pem, GPU, "gpu-1", "admin me")
    assert replaced == ["stage-server/gpu-1"]
    clock.unix_s += 2 * LIFE_S
    await joined(members, await token(members, names="gpu-1"))
    assert replaced == ["stage-server/gpu-1"] * 2


async def test_a_renewal_that_waited_while_the_name_was_given_anew_is_refused(tmp_path: Path) -> None:
    """It was checked when the call came, and put the replaced key back."""
    with ThreadPoolExecutor(1) as executor:
        async with opened(tmp_path, Clock(), executor) as (members, _):
            first = await joined(members, await token(members))
            given, renewed = await asyncio.gather(
                members.issue(Application("gpu-1").request_pem, GPU, "gpu-1", "admin me"),
                members.renew(first, Application("gpu-1").request_pem),
                return_exceptions=True,
            )
            assert isinstance(renewed, CertificateEnded)
            assert isinstance(given, bytes)
            assert is_known(members, caller_of(given))
            assert not is_known(members, first)


# Taking members out -------------------------------------------------------------------------------------------------


async def test_a_revoked_member_is_refused_from_the_next_call_on(members: Members) -> None:
    line, application = await token(members, uses=2), Application("gpu-1")
    caller = await joined(members, line, application=application)
    other = await joined(members, await token(members), "gpu-2")
    revoked = await members.revoke("gpu-1", "it was stolen, " + "x" * 1000)
    assert len(revoked.reason) == book.REASON_CHARACTERS_MAX
    with pytest.raises(Revoked, match="stage-server gpu-1 was revoked: it was stolen"):
        members.check(caller, ATTACH)
    with pytest.raises(Revoked):
        await members.renew(caller, Application("gpu-1").request_pem)
    with pytest.raises(Revoked):  # with the key that joined
        await joined(members, line, application=application)
    assert "was revoked" in await refusal(members, line)  # with another key
    assert is_known(members, other)


async def test_a_revocation_counts_at_once_even_if_the_database_fails(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock()) as (members, database):
        caller = await joined(members, await token(members))
        database.fails = lambda: True
        with pytest.raises(DatabaseUnavailable):
            await members.revoke("gpu-1", "stolen")
        assert not is_known(members, caller)
        database.fails = lambda: False
        await members.revoke("gpu-1", "stolen")
    async with opened(tmp_path, Clock()) as (members, _):
        assert not is_known(members, caller)


async def test_a_revoked_name_is_free_for_tokens_made_since(members: Members, clock: Clock) -> None:
    old = await token(members, ttl_s=9 * LIFE_S, uses=9)
    thief = await joined(members, await token(members))
    clock.unix_s += 1.0
    await members.revoke("gpu-1", "stolen")
    same_moment = await token(members)
    clock.unix_s += 1.0
    for line in (old, same_moment):
        assert "was revoked" in await refusal(members, line)
    clock.unix_s += 2 * LIFE_S  # then an older token made a member of it again
    assert "was revoked" in await refusal(members, old)
    owner = await joined(members, await token(members))
    assert [is_known(members, certificate) for certificate in (thief, owner)] == [False, True]


async def test_a_revoked_key_does_not_take_its_name_back_from_the_next_holder(members: Members, clock: Clock) -> None:
    """The key that had joined with a token could ask again with it, whoever bore the name by then."""
    line, application = await token(members, ttl_s=9 * LIFE_S, uses=2), Application("gpu-1")
    thief = await joined(members, line, application=application)
    await members.revoke("gpu-1", "stolen")
    clock.unix_s += 1.0
    owner = await joined(members, await token(members))
    assert "there is a stage-server gpu-1 already" in await refusal(members, line, application=application)
    assert [is_known(members, certificate) for certificate in (thief, owner)] == [False, True]


async def test_a_name_of_several_roles_is_revoked_by_role_and_name(members: Members) -> None:
    callers = {role: await joined(members, await token(members, role), "ann") for role in (GPU, Role.VIEWER)}
    with pytest.raises(NotFound, match="is the name of several: stage-server/ann, viewer/ann") as told:
        await members.revoke("ann", "")
    assert told.value.hint == "say which, with its role: swarm identity revoke stage-server/ann"
    for name in ("", "bob", "admin/ann", "/viewer/ann", "viewer/", "x" * 10_000):
        with pytest.raises(NotFound, match="there is no member"):
            await members.revoke(name, "")
    assert (await members.revoke("viewer/ann", "")).role is Role.VIEWER
    with pytest.raises(Revoked, match="no reason given"):
        members.check(callers[Role.VIEWER], LIST)
    members.check(callers[GPU], ATTACH)


async def test_the_book_has_a_limit(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MEMBERS_MAX", 2)
    first = await joined(members, await token(members))
    await joined(members, await token(members), "gpu-2")
    with pytest.raises(Refused, match="2 members are in the book"):
        await joined(members, await token(members), "gpu-3")
    await members.renew(first, Application("gpu-1").request_pem)
    await members.revoke("gpu-2", "")


async def test_a_restart_knows_all(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as (members, _):
        application = Application("gpu-1")
        line, spare = await token(members), await token(members, Role.VIEWER, uses=2, names="a*")
        first = await joined(members, line, application=application)
        renewed = caller_of(await members.renew(first, Application("gpu-1").request_pem))
        gone = await joined(members, await token(members), "gpu-2")
        await members.revoke("gpu-2", "stolen")
        before = members.members(), members.tokens()
    async with opened(tmp_path, clock) as (members, _):
        assert (members.members(), members.tokens()) == before
        assert [is_known(members, certificate) for certificate in (first, renewed, gone)] == [True, True, False]
        assert "used" in await refusal(members, line)
        assert is_known(members, await joined(members, line, application=application))
        assert is_known(members, await joined(members, spare, "ann"), LIST)
        assert (await members.revoke("gpu-2", "again")).reason == "again"


# Rates --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "CERTIFICATES_PER_S", 0.001)


@pytest.mark.usefixtures("few_certificates")
@pytest.mark.parametrize("way", ["renew", "come back", "join again", "an admin vouches"])
async def test_no_way_to_a_certificate_writes_rows_without_a_rate(
    members: Members, database: Unsteady, clock: Clock, way: str
) -> None:
    """A member had 312 certificates a second, each a row of up to 1,024 keys on the disk of the commits."""
    clock, application = Clock(), Application("gpu-1")
    line = await token(members)
    first = await members.join(line.id, line.secret, "gpu-1", application.request_pem)
    if way == "come back":
        clock.unix_s += LIFE_S + 1.0
    writes = 0

    def counted() -> bool:
        nonlocal writes
        writes += 1
        return False

    async def asks() -> bytes:
        match way:
            case "renew":
                return await members.renew(caller_of(first), Application("gpu-1").request_pem)
            case "come back":
                return await members.renew_ended(first, application.request_pem)
            case "join again":
                return await members.join(line.id, line.secret, "gpu-1", application.request_pem)
            case _:
                return await members.issue(application.request_pem, GPU, "gpu-1", "admin me")

    database.fails = counted
    for _ in range(30):
        newest = await asks()
    for _ in range(100):
        with pytest.raises(Crowded, match="stage-server gpu-1 has asked for 30 certificates") as caught:
            await asks()
    assert caught.value.hint.startswith("try again in 16 min")
    assert writes == 30
    assert is_known(members, caller_of(newest)), "it keeps what it has"
    other = await joined(members, await token(members), "gpu-2")
    await members.renew(other, Application("gpu-2").request_pem)


async def test_strangers_take_nothing_from_what_a_member_may_ask_for(members: Members) -> None:
    member = await joined(members, await token(members))
    stranger = replace(member, fingerprint="00")
    revoked = await joined(members, await token(members), "gpu-2")
    await members.revoke("gpu-2", "left")
    used = await token(members)
    await joined(members, used, "gpu-3")
    before = len(members._rates._buckets._buckets)
    for _ in range(40):
        for caller in (stranger, revoked):
            with pytest.raises((CertificateEnded, Revoked)):
                await members.renew(caller, Application("gpu-1").request_pem)
        for name in ("gpu-1", "gpu-4"):
            await refusal(members, used, name)
    assert len(members._rates._buckets._buckets) == before
    await members.renew(member, Application("gpu-1").request_pem)
