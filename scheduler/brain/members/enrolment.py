"""Enrolment: decides by token, book of members, name, key and time who may become a member, or come back."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.errors import BadToken, CertificateEnded, Crowded, Revoked
from swarm.limits import CERTIFICATES_AT_ONCE, CERTIFICATES_PER_S, MEMBERS_MAX, Buckets
from swarm.pki.names import Principal, Role, check_name, verb_of
from swarm.text import duration, spoken_duration


@dataclass(frozen=True, slots=True)
class Member:
    """A holder of certificates.

    A renewal does not end a connection, so a connection may be older than the newest certificate. So each key is good
    while its holder goes on renewing; TLS refuses new connections with a certificate that has ended.
    """

    role: Role
    name: str
    keys: Mapping[str, float] = field(default_factory=dict)  # fingerprint -> Unix time at which its certificate ends
    invited_by: str = ""
    revoked_unix_s: float = 0.0  # 0: a member
    reason: str = ""

    @property
    def ends_unix_s(self) -> float:
        """When the newest certificate ends."""
        return max(self.keys.values(), default=0.0)

    @property
    def is_revoked(self) -> bool:
        return self.revoked_unix_s > 0


@dataclass(frozen=True, slots=True)
class Token:
    """Lets `uses_left` more join in a role, under a name that `names` (a pattern) allows."""

    id: str
    secret_hash: str
    role: Role
    names: str
    uses_left: int
    expires_unix_s: float
    created_by: str
    created_unix_s: float
    joined_json: str = "{}"  # name -> fingerprint of whoever joined with it, who may ask again


Book = Mapping[tuple[Role, str], Member]


@dataclass(frozen=True, slots=True)
class Grant:
    """A join that is granted."""

    member: Member  # who then gets the key
    spent: Token | None  # the token with one use less; None: this key has joined with it, and asks again


def grant_join(
    token: Token | None,
    book: Book,
    name: str,
    fingerprint: str,
    now_unix_s: float,
    verb: str = "",
    grace_s: float = 0.0,
) -> Grant:
    """The grant for a joiner with this key and this token's secret; None: no token has this secret.

    `verb` is the command of `swarm` that joins; "": an older one, which does not say it. `grace_s`: how long after its
    certificate has ended a member may come back. Until then only a token for exactly this name gives it to another,
    who would also get the jobs of the absent member.

    The same key may ask again while the token lives, as its answer may have been lost. BadToken, Revoked, UsageError.
    """
    if token is None or now_unix_s >= token.expires_unix_s:
        raise _bad_token()
    if verb and verb != (meant := verb_of(token.role)):
        raise BadToken(
            f"this line is for swarm {meant} ({token.role}), not for swarm {verb}",
            hint=f"it is not used up: swarm {meant} --join LINE",
        )
    name = check_name(name or (token.names if "*" not in token.names else ""))
    joined: dict[str, str] = json.loads(token.joined_json)
    known = book.get((token.role, name))
    # Not in the book: the database failed after the use was spent. Another key there: the name was given anew.
    is_repeated = joined.get(name) == fingerprint and (known is None or known.keys.get(fingerprint, 0.0) > now_unix_s)
    newcomer = Member(token.role, name, invited_by=token.created_by)
    if is_repeated:
        if known is not None and known.is_revoked:
            raise Revoked(f"{token.role} {name} was revoked", hint="ask an admin")
        return Grant(known or newcomer, None)
    if token.uses_left < 1:
        raise _bad_token()
    if not fnmatch.fnmatchcase(name, token.names):
        raise BadToken(
            f'this token is for names like "{token.names}", not for "{name}"',
            hint=f"ask an admin for: swarm token create --role {token.role} --name {name}",
        )
    _check_free(token, known, now_unix_s, grace_s)
    joined_json = json.dumps(joined | {name: fingerprint})
    return Grant(newcomer, replace(token, uses_left=token.uses_left - 1, joined_json=joined_json))


def grant_return(
    known: Member | None, principal: Principal, fingerprint: str, now_unix_s: float, life_s: float, grace_s: float
) -> Member:
    """The member that gets a younger certificate for this key, of which the last one has ended; Revoked,
    CertificateEnded.

    It ended less than `grace_s` ago, and the name got no certificate since. So the key is the newest, or the answer
    that brought a newer one was lost: an older key, such as one in a forgotten copy, is good for nothing.
    """
    hint = f"ask for a new token: swarm token create --role {principal.role} --name {principal.name}; then join again"
    if known is None:
        raise CertificateEnded(f"{principal} is not in the book of members", hint=hint)
    if known.is_revoked:
        raise Revoked(f"{principal} was revoked: {known.reason or 'no reason given'}", hint="ask an admin")
    ended_unix_s = known.keys.get(fingerprint)
    if ended_unix_s is None or known.ends_unix_s - life_s >= ended_unix_s:
        raise CertificateEnded(f"{principal} has another key since", hint=hint)
    if now_unix_s >= ended_unix_s + grace_s:
        raise CertificateEnded(
            f"the certificate of {principal} ended {duration(now_unix_s - ended_unix_s)} ago; this scheduler renews "
            + (f"what ended less than {duration(grace_s)} ago" if grace_s else "none that has ended"),
            hint=hint,
        )
    return known


class Rates:
    """Counts how often one name gets a certificate: each is a row of up to 1,024 keys, which the disk must have.

    Only callers that have proved who they are may be counted, so no stranger takes from what a member may.
    """

    def __init__(self) -> None:
        self._buckets = Buckets(CERTIFICATES_PER_S, CERTIFICATES_AT_ONCE, MEMBERS_MAX)

    def take(self, role: Role, name: str, now_s: float) -> None:
        """Count a certificate; Crowded, with the time until the next one, if the name may have none now."""
        if not self._buckets.take((role, name), now_s):
            raise Crowded(
                f"{role} {name} has asked for {CERTIFICATES_AT_ONCE} certificates in a short time, and may have "
                f"{CERTIFICATES_PER_S:g} a second from there on",
                hint=f"try again in {spoken_duration(max(0.1, self._buckets.wait_s((role, name), now_s)))}",
            )


def _check_free(token: Token, known: Member | None, now_unix_s: float, grace_s: float) -> None:
    """BadToken if another member holds the name; a revoked name is free for tokens made since."""
    if known is None:
        return
    if known.is_revoked:
        if token.created_unix_s > known.revoked_unix_s:
            return
        raise BadToken(
            f"{known.role} {known.name} was revoked", hint="choose another name, or have an admin make a new token"
        )
    if known.ends_unix_s > now_unix_s:
        raise BadToken(
            f"there is a {known.role} {known.name} already",
            hint="choose another name, or have an admin revoke it first and make a new token",
        )
    if known.ends_unix_s + grace_s > now_unix_s and token.names != known.name:
        raise BadToken(
            f"{known.role} {known.name} is away, and may come back under this name",
            hint="choose another name, or have an admin give you this one: "
            f"swarm token create --role {known.role} --name {known.name}",
        )


def _bad_token() -> BadToken:
    return BadToken(
        "the token is unknown, used or expired", hint="ask an admin for a new one: swarm token create --role ROLE"
    )
