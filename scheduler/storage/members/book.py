"""The book of members: holders of certificates, tokens for new ones, and revoked members.

It lives in memory, where every call is checked against it, and in the database, where each change is written first.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter

import sqlalchemy as sa

from scheduler.brain.members.access import check_role
from scheduler.brain.members.enrolment import Member, Rates, Token, grant_join, grant_return
from scheduler.storage.database import Database, of_type, put, table
from swarm.errors import (
    CertificateEnded,
    InvalidConfig,
    NotAdmitted,
    NotFound,
    Refused,
    Revoked,
    RoleForbids,
    UsageError,
)
from swarm.limits import MEMBERS_MAX, TOKENS_MAX
from swarm.pki import keys
from swarm.pki.authority import AWAY_S, LIFE_S, Authority
from swarm.pki.identity import Identity, issue
from swarm.pki.names import MEMBERS, Principal, Role, check_name, principal_of
from swarm.pki.tokens import JoinLine, new_line, secret_hash
from swarm.rpc.guard import Caller
from swarm.types import PeerId

TOKEN_TTL_S_MAX = 30 * 86400.0
TOKEN_USES_MAX = 1000
REASON_CHARACTERS_MAX = 300
NAMES_CHARACTERS_MAX = 80
KEYS_MAX = 1024  # of one member, beside the newest: almost two years of one connection

_MEMBERS = table(
    "members",
    of_type(sa.Text, "role", "name"),
    **of_type(sa.Text, "keys_json", "invited_by", "reason"),
    revoked_unix_s=sa.Float,
)
_TOKENS = table(
    "tokens",
    {"id": sa.Text},
    **of_type(sa.Text, "secret_hash", "role", "names", "created_by", "joined_json"),
    **of_type(sa.Float, "expires_unix_s", "created_unix_s"),
    uses_left=sa.Integer,
)


@dataclass(eq=False)
class Members:
    """All certificates come from here. Every method raises a SwarmError that names the way out."""

    authority: Authority
    _database: Database
    _wall_s: Callable[[], float]
    life_s: float = LIFE_S  # of a certificate
    _grace_s: float = AWAY_S  # how long after its end a certificate is still renewed
    _members: dict[tuple[Role, str], Member] = field(default_factory=dict)
    _tokens: dict[str, Token] = field(default_factory=dict)
    _rates: Rates = field(default_factory=Rates)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # two joiners must not share one use
    on_revoked: Callable[[Member], None] = lambda member: None
    on_replaced: Callable[[Member], None] = lambda member: None  # the keys so far are good no more

    @staticmethod
    async def clear(database: Database) -> None:
        """Forget members and tokens: a new authority has signed no certificate, so all names are free."""

        def write(connection: sa.Connection) -> None:
            connection.execute(sa.delete(_MEMBERS))
            connection.execute(sa.delete(_TOKENS))

        await database.write(write)

    async def load(self) -> None:
        """Read what earlier starts wrote."""
        for row in await self._database.select(sa.select(_MEMBERS)):
            member = Member(keys=json.loads(row.pop("keys_json")), **row | {"role": Role(row["role"])})
            self._members[member.role, member.name] = member
        for row in await self._database.select(sa.select(_TOKENS)):
            self._tokens[row["id"]] = Token(**row | {"role": Role(row["role"])})

    # Who calls --------------------------------------------------------------------------------------------------

    def check(self, caller: Caller, method: str) -> None:
        """Raise unless the caller's role, name and key allow the method now."""
        check_role(caller.principal, method, self.authority.cluster)
        self._check_known(caller)

    def inviter(self, peer: PeerId) -> str:
        """The maker of the token with which a stage server joined, or its voucher; "" if it is not in the book."""
        member = self._members.get((Role.STAGE_SERVER, peer))
        return "" if member is None else member.invited_by

    def check_stays(self, caller: Caller) -> None:
        """Raise once the caller was revoked, for calls under way: these outlive the end of a certificate."""
        self._present(caller)

    def check_scraper(self, caller: Caller, own: Principal) -> None:
        """The same for readers of metrics; `own` is this machine's scraper, which is in no book."""
        if caller.principal != own or (own.role, own.name) in self._members:
            self._check_known(caller)

    def _check_known(self, caller: Caller) -> None:
        if self._wall_s() >= self._present(caller).ends_unix_s:
            raise _no_more(caller.principal)

    def _present(self, caller: Caller) -> Member:
        """The member with the caller's name and key."""
        principal = caller.principal
        member = self._members.get((principal.role, principal.name))
        if member is None:  # such as after a book of yesterday was restored
            raise CertificateEnded(f"{principal} is not in the book of members", hint="join again, with a new token")
        if member.is_revoked:
            raise Revoked(f"{principal} was revoked: {member.reason or 'no reason given'}", hint="ask an admin")
        if caller.fingerprint not in member.keys:
            raise _no_more(principal)
        return member

    # Certificates ------------------------------------------------------------------------------------------------

    async def issue_here(self, role: Role, name: str) -> Identity:
        """An identity for a process or person on this machine."""
        principal = Principal(self.authority.cluster, role, name)
        identity = issue(self.authority, principal, self._wall_s(), life_s=self.life_s)
        key = keys.read_key(identity.key_pem).public_key()
        async with self._changing:
            known = self._members.get((role, name))
            if known is None or known.is_revoked:  # then with this key alone
                known = Member(role, name, invited_by="the scheduler")
            await self._put(self._with_key(known, key))
        return identity

    async def issue(self, csr_pem: bytes, role: Role, name: str, by: str) -> bytes:
        """A certificate for a member that an admin vouches for; an earlier one of that name is no longer good.

        A stage server asks by itself with the profile of the local admin, so a revoked member stays out: Revoked.
        """
        key = keys.requested_key(csr_pem)
        async with self._changing:
            known = self._members.get((role, name))
            if known is not None and known.is_revoked:
                raise Revoked(
                    f"{role} {name} was revoked: {known.reason or 'no reason given'}",
                    hint=f"to take it in again, join with a new token: swarm token create --role {role} --name {name}",
                )
            member = Member(role, check_name(name), invited_by=by)
            self._count(member)
            return await self._certify(key, member)

    async def renew(self, caller: Caller, csr_pem: bytes) -> bytes:
        """A certificate for the caller's name and a new key; the present one stays good until it ends. Crowded."""
        key = keys.requested_key(csr_pem)
        async with self._changing:
            self._check_known(caller)  # again: an admin may have changed it meanwhile
            known = self._members[caller.principal.role, caller.principal.name]
            self._count(known)
            return await self._certify(key, known)

    async def renew_ended(self, certificate_pem: bytes, csr_pem: bytes) -> bytes:
        """A younger certificate for the same name and key, for a member that was away until the last one ended.

        The request proves that its sender holds the key. NotAdmitted, Refused, CertificateEnded, Revoked, Crowded.
        """
        key = keys.requested_key(csr_pem)
        try:
            shown = keys.read_certificate(certificate_pem)
            if not keys.is_issued_by(shown, self.authority.certificate):
                raise NotAdmitted("the certificate is not of this swarm", hint="join again, with a new token")
            principal = principal_of(keys.uris(shown))
            fingerprint = keys.fingerprint(key)
            if keys.fingerprint(keys.public_key(shown)) != fingerprint:
                raise NotAdmitted(f"the request is not signed with the key of the certificate of {principal}")
        except InvalidConfig:
            raise Refused("this is no certificate") from None
        async with self._changing:
            known = self._members.get((principal.role, principal.name))
            now_unix_s = self._wall_s()
            member = grant_return(known, principal, fingerprint.hex(), now_unix_s, self.life_s, self._grace_s)
            self._count(member)
            return await self._certify(key, member)

    def has_token(self, id: str) -> bool:
        """Whether there is a token with this id."""
        return id in self._tokens

    async def join(self, id: str, secret: str, name: str, csr_pem: bytes, verb: str = "") -> bytes:
        """A certificate for the holder of a token; BadToken for others, and for a token of another verb of `swarm`."""
        key = keys.requested_key(csr_pem)
        async with self._changing:
            token = self._tokens.get(id)
            is_right = hmac.compare_digest(secret_hash(secret), token.secret_hash if token else "0" * 64)
            fingerprint, now_unix_s = keys.fingerprint(key).hex(), self._wall_s()
            meant = token if is_right else None
            granted = grant_join(meant, self._members, name, fingerprint, now_unix_s, verb, self._grace_s)
            if granted.spent is None:  # uses of a token are counted as it is, the same key asks again for nothing
                self._count(granted.member)
            else:
                # The use is spent before the certificate exists: if the database fails now, ask again.
                await self._put_token(granted.spent)
            return await self._certify(key, granted.member)

    def _count(self, member: Member) -> None:
        """Crowded if the member has asked for certificates too often."""
        self._rates.take(member.role, member.name, asyncio.get_running_loop().time())

    async def _certify(self, key: keys.PublicKey, member: Member) -> bytes:
        now_unix_s = self._wall_s()
        principal = Principal(self.authority.cluster, member.role, member.name)
        certificate = self.authority.certify(key, principal, now_unix_s, life_s=self.life_s)
        is_new = (member.role, member.name) in self._members and not member.keys
        await self._put(self._with_key(member, key))
        if is_new:
            self.on_replaced(member)
        return certificate

    def _with_key(self, member: Member, key: keys.PublicKey) -> Member:
        newest = sorted(member.keys.items(), key=itemgetter(1))[-KEYS_MAX:]
        return replace(member, keys=dict(newest) | {keys.fingerprint(key).hex(): self._wall_s() + self.life_s})

    # For admins --------------------------------------------------------------------------------------------------

    async def create_token(
        self, role: Role, ttl_s: float, uses: int, names: str, by: str, address: str
    ) -> tuple[JoinLine, Token]:
        """A line that lets `uses` join at `address`; its secret is kept nowhere."""
        if role not in MEMBERS:
            raise RoleForbids(f"nobody joins as {role}")
        if len(names) > NAMES_CHARACTERS_MAX:
            raise UsageError(f"a pattern of names has at most {NAMES_CHARACTERS_MAX} characters")
        if not 0.0 < ttl_s <= TOKEN_TTL_S_MAX or not 1 <= uses <= TOKEN_USES_MAX:
            raise UsageError(f"a token lives at most 30 days and lets at most {TOKEN_USES_MAX} join")
        now_unix_s = self._wall_s()
        async with self._changing:
            ended = [token.id for token in self._tokens.values() if token.expires_unix_s <= now_unix_s]
            await self._delete_tokens(ended)
            if len(self._tokens) >= TOKENS_MAX:
                raise Refused(f"{TOKENS_MAX} tokens wait to be used", hint="revoke some: swarm token ls")
            line = new_line(address, self.authority.pin)
            token = Token(
                id=line.id,
                secret_hash=secret_hash(line.secret),
                role=role,
                names=names or "*",
                uses_left=uses,
                expires_unix_s=now_unix_s + ttl_s,
                created_by=by,
                created_unix_s=now_unix_s,
            )
            await self._put_token(token)
        return line, token

    def tokens(self) -> list[Token]:
        """The tokens that can still be used, the newest first."""
        live = [token for token in self._tokens.values() if token.uses_left and token.expires_unix_s > self._wall_s()]
        return sorted(live, key=lambda token: -token.created_unix_s)

    async def revoke_token(self, id: str) -> Token:
        async with self._changing:
            if (token := self._tokens.get(id)) is None:
                raise NotFound(f'there is no token "{id[:20]}"', hint="list them with: swarm token ls")
            await self._delete_tokens([id])
        return token

    def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: (member.role, member.name))

    async def revoke(self, name: str, reason: str) -> Member:
        """Take a member out: NAME, or ROLE/NAME where several roles know the name. It counts from the next call on."""
        role, _, plain = name.rpartition("/")
        found = [member for member in self._members.values() if member.name == plain and role in ("", member.role)]
        if len(found) != 1:
            if not found:
                raise NotFound(f'there is no member "{name[:80]}"', hint="list them with: swarm identity ls")
            several = [f"{member.role}/{member.name}" for member in found]
            raise NotFound(
                f'"{name}" is the name of several: {", ".join(several)}',
                hint=f"say which, with its role: swarm identity revoke {several[0]}",
            )
        revoked = replace(found[0], revoked_unix_s=self._wall_s(), reason=reason[:REASON_CHARACTERS_MAX])
        self._members[revoked.role, revoked.name] = revoked  # at once, even if the database is away
        self.on_revoked(revoked)
        async with self._changing:
            await self._put(revoked)
            by = str(Principal(self.authority.cluster, revoked.role, revoked.name))
            await self._delete_tokens([token.id for token in self._tokens.values() if token.created_by == by])
        return revoked

    # Rows --------------------------------------------------------------------------------------------------------

    async def _put(self, member: Member) -> None:
        """Write a member to the database, then to memory."""
        key = (member.role, member.name)
        before = self._members.get(key)
        if key not in self._members and len(self._members) >= MEMBERS_MAX:
            raise Refused(f"{MEMBERS_MAX} members are in the book already")
        values = asdict(member) | {"role": member.role.value, "keys_json": json.dumps(member.keys)}
        del values["keys"]
        await self._database.write(lambda connection: put(connection, _MEMBERS, values))
        if self._members.get(key) is before:  # else the member was revoked meanwhile
            self._members[key] = member

    async def _put_token(self, token: Token) -> None:
        values = asdict(token) | {"role": token.role.value}
        await self._database.write(lambda connection: put(connection, _TOKENS, values))
        self._tokens[token.id] = token

    async def _delete_tokens(self, ids: list[str]) -> None:
        if ids:
            await self._database.write(
                lambda connection: connection.execute(sa.delete(_TOKENS).where(_TOKENS.c.id.in_(ids)))
            )
        for id in ids:
            del self._tokens[id]


def _no_more(principal: Principal) -> CertificateEnded:
    return CertificateEnded(
        f"the certificate of {principal} on this connection is good no more: it ended, or was replaced",
        hint="dial again; if that does not help, join again with a new token",
    )
