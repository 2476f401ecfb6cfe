"""Who may become a member, as a table: a token, the book, a name, a key and the time."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from scheduler.brain.members.enrolment import Grant, Member, Rates, Token, grant_join, grant_return
from swarm.errors import BadToken, CertificateEnded, Crowded, Revoked, SwarmError, UsageError
from swarm.pki.names import Principal, Role

GPU = Role.STAGE_SERVER
NOW_S = 1000.0
TOKEN = Token("t", "hash", GPU, "gpu-*", 2, NOW_S + 60.0, "admin me", NOW_S - 60.0)
KEY, OTHER_KEY = "aa", "bb"
LIVES = Member(GPU, "gpu-1", {OTHER_KEY: NOW_S + 5.0}, "admin you")
ENDED = replace(LIVES, keys={OTHER_KEY: NOW_S})
OUT_BEFORE, OUT_SINCE = replace(LIVES, revoked_unix_s=NOW_S - 90.0), replace(LIVES, revoked_unix_s=NOW_S - 30.0)
USED = replace(TOKEN, uses_left=0, joined_json=json.dumps({"gpu-1": KEY}))
MINE = replace(LIVES, keys={KEY: NOW_S + 5.0})


def asked(token: Token | None = TOKEN, known: Member | None = None, name: str = "gpu-1", key: str = KEY) -> Grant:
    return grant_join(token, {} if known is None else {(known.role, known.name): known}, name, key, NOW_S)


@pytest.mark.parametrize("known", [None, ENDED, OUT_BEFORE], ids=["nobody", "ended", "revoked before the token"])
def test_a_free_name_is_given_once_with_the_tokens_role(known: Member | None) -> None:
    given = asked(known=known)
    assert given.member == Member(GPU, "gpu-1", invited_by="admin me")
    assert given.spent is not None
    assert (given.spent.uses_left, json.loads(given.spent.joined_json)) == (1, {"gpu-1": KEY})


@pytest.mark.parametrize("known", [None, MINE], ids=["the member was not written down", "the answer was lost"])
def test_the_same_key_may_ask_again_and_spends_nothing(known: Member | None) -> None:
    again = asked(USED, known)
    assert again.spent is None
    assert again.member == known or (known is None and again.member.invited_by == "admin me")


REFUSALS: dict[str, tuple[dict[str, object], type[SwarmError], str]] = {
    "a wrong secret": ({"token": None}, BadToken, "unknown, used or expired"),
    "an old token": ({"token": replace(TOKEN, expires_unix_s=NOW_S)}, BadToken, "unknown, used or expired"),
    "a used token": ({"token": replace(TOKEN, uses_left=0)}, BadToken, "unknown, used or expired"),
    "a used token, another key": ({"token": USED, "key": OTHER_KEY}, BadToken, "unknown, used or expired"),
    "a used token, a replaced key": ({"token": USED, "known": LIVES}, BadToken, "unknown, used or expired"),
    "a name of others": ({"name": "cpu-1"}, BadToken, "for names like"),
    "a name that somebody bears": ({"known": LIVES}, BadToken, "there is a stage-server gpu-1 already"),
    "a name revoked since": ({"known": OUT_SINCE}, BadToken, "was revoked"),
    "its own name, revoked": ({"token": USED, "known": replace(MINE, revoked_unix_s=NOW_S)}, Revoked, "was revoked"),
    "no name": ({"name": ""}, UsageError, "is no name"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_nobody_else_joins(case: str) -> None:
    words, error, told = REFUSALS[case]
    with pytest.raises(error, match=told):
        asked(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "verb", "other"),
    [(Role.RELAY, "relay", "login"), (GPU, "stage-server", "relay"), (Role.VIEWER, "login", "stage-server")],
)
def test_a_line_for_another_command_is_refused_and_not_used_up(role: Role, verb: str, other: str) -> None:
    """`swarm login` with a relay's line used it up, and wrote a relay's key where the person's belongs."""
    token = replace(TOKEN, role=role)
    with pytest.raises(BadToken, match=rf"this line is for swarm {verb} \({role}\), not for swarm {other}") as caught:
        grant_join(token, {}, "gpu-1", KEY, NOW_S, other)
    assert f"swarm {verb} --join LINE" in caught.value.hint
    for said in (verb, ""):  # an older program does not say it
        assert grant_join(token, {}, "gpu-1", KEY, NOW_S, said).spent is not None


def test_a_token_for_one_name_gives_it_to_whoever_says_none() -> None:
    assert asked(replace(TOKEN, names="gpu-7"), name="").member.name == "gpu-7"


GPU_1 = Principal("a" * 16, GPU, "gpu-1")
LIFE_S, GRACE_S = 60.0, 600.0
AWAY = replace(LIVES, keys={OTHER_KEY: NOW_S - 340.0, KEY: NOW_S - 300.0})  # KEY was renewed before the other ended


def returned(known: Member | None = AWAY, key: str = KEY, now_s: float = NOW_S, grace_s: float = GRACE_S) -> Member:
    return grant_return(known, GPU_1, key, now_s, LIFE_S, grace_s)


def test_only_a_token_for_the_name_gives_that_of_an_absent_member_to_another() -> None:
    """Whoever had a token for any name could take the name of a person who was away for a day, and had his jobs."""
    book = {(GPU, "gpu-1"): AWAY}
    with pytest.raises(BadToken, match="stage-server gpu-1 is away, and may come back") as caught:
        grant_join(TOKEN, book, "gpu-1", "cc", NOW_S, grace_s=GRACE_S)
    assert "swarm token create --role stage-server --name gpu-1" in caught.value.hint
    named = replace(TOKEN, names="gpu-1")
    for token, now_s in ((named, NOW_S), (replace(TOKEN, expires_unix_s=inf), NOW_S + 300.0)):
        assert grant_join(token, book, "gpu-1", "cc", now_s, grace_s=GRACE_S).member.keys == {}


@pytest.mark.parametrize("key", [KEY, OTHER_KEY], ids=["the newest key", "the answer that brought it was lost"])
def test_who_was_away_for_less_than_the_grace_comes_back(key: str) -> None:
    assert returned(key=key) == AWAY
    assert returned(key=KEY, now_s=NOW_S + 299.0) == AWAY


STAY_OUT: dict[str, tuple[dict[str, object], type[SwarmError], str]] = {
    "beyond the grace": ({"now_s": NOW_S + 300.0}, CertificateEnded, "renews what ended less than 10m00s ago"),
    "no grace": ({"grace_s": 0.0}, CertificateEnded, "renews none that has ended"),
    "not in the book": ({"known": None}, CertificateEnded, "is not in the book"),
    "revoked while away": ({"known": replace(AWAY, revoked_unix_s=NOW_S - 1.0)}, Revoked, "was revoked"),
    "another key": ({"key": "cc"}, CertificateEnded, "has another key since"),
    "the name was given anew": ({"known": LIVES, "key": KEY}, CertificateEnded, "has another key since"),
    "an old copy of a key that went on without it": (
        {"known": replace(AWAY, keys={KEY: NOW_S - 300.0, OTHER_KEY: NOW_S - 240.0})},
        CertificateEnded,
        "has another key since",
    ),
}


@pytest.mark.parametrize("case", STAY_OUT)
def test_nobody_else_comes_back(case: str) -> None:
    words, error, told = STAY_OUT[case]
    with pytest.raises(error, match=told):
        returned(**words)  # type: ignore[arg-type]


def test_a_name_has_thirty_certificates_at_once_and_one_a_second_from_there_on() -> None:
    """A member renewed its certificate 312 times a second, and each took the disk of the commits."""
    rates = Rates()
    for _ in range(30):
        rates.take(GPU, "gpu-1", 7.0)
    with pytest.raises(Crowded, match="stage-server gpu-1 has asked for 30 certificates in a short time") as caught:
        rates.take(GPU, "gpu-1", 7.25)
    assert caught.value.hint == "try again in 0.8 s"
    with pytest.raises(Crowded) as caught:
        rates.take(GPU, "gpu-1", 7.99)
    assert caught.value.hint == "try again in 0.1 s", "not now, however soon"
    rates.take(GPU, "gpu-2", 7.25)
    rates.take(Role.RELAY, "gpu-1", 7.25)
    given = 0
    for tenth in range(10 * 60):
        try:
            rates.take(GPU, "gpu-1", 7.25 + tenth / 10)
        except Crowded:
            continue
        given += 1
    assert given in (59, 60)
