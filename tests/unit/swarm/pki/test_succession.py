"""One authority follows the other: who signs and who is trusted in each phase, on disk and for those who join."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swarm.errors import InvalidConfig, NotAllowed
from swarm.pki import keys
from swarm.pki.authority import Authority
from swarm.pki.files import write_private
from swarm.pki.identity import Identity, issue
from swarm.pki.names import Principal, Role
from swarm.pki.succession import TOKENS_LIVE_S, Succession, SuccessionPhase, Times, trusted_by
from tests.support.members import Clock

LIFE_S, HOUR_S = 24 * 3600.0, 3600.0
THEIRS = Authority.new(1_800_000_000.0)


def rotating(folder: Path, clock: Clock) -> Succession:
    made = Succession.open(folder, clock)
    made.rotate(LIFE_S, 0.0)
    made.save()
    return made


def in_phase(folder: Path, phase: SuccessionPhase, clock: Clock) -> Succession:
    """A succession that has come so far; the clock stands there."""
    made = rotating(folder, clock)
    assert made.times is not None
    clock.unix_s = {
        SuccessionPhase.SHOWN: made.times.signs_unix_s - 1.0,
        SuccessionPhase.SIGNS: made.times.signs_unix_s,
        SuccessionPhase.ENDED: made.times.ended_unix_s,
        SuccessionPhase.OVER: made.times.leaves_unix_s,
    }[phase]
    assert made.phase is phase
    return made


def member(signer: Succession | Authority, clock: Clock) -> Identity:
    return issue(signer, Principal(signer.cluster, Role.STAGE_SERVER, "gpu-1"), clock(), life_s=LIFE_S)


def is_signed_by(one: Identity, authority: Authority) -> bool:
    try:
        keys.read_certificate(one.certificate_pem).verify_directly_issued_by(authority.certificate)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("longest_s", [0.0, 3 * LIFE_S])
def test_the_next_one_signs_when_every_certificate_has_been_renewed_or_has_ended(longest_s: float) -> None:
    """A life that was longer before the last start counts, too."""
    times = Times.plan(1000.0, LIFE_S, 1000.0 + longest_s)
    assert times.signs_unix_s == 1000.0 + max(LIFE_S, longest_s)
    assert times.ended_unix_s == times.signs_unix_s + LIFE_S
    assert times.leaves_unix_s == times.signs_unix_s + TOKENS_LIVE_S
    assert Times.plan(0.0, 2 * TOKENS_LIVE_S, 0.0).leaves_unix_s == 4 * TOKENS_LIVE_S


def test_the_old_one_stays_as_long_as_a_token_that_names_it() -> None:
    times = Times.plan(1000.0, LIFE_S, 0.0, 1000.0 + 30 * LIFE_S)
    assert times == replace(Times.plan(1000.0, LIFE_S, 0.0), leaves_unix_s=1000.0 + 30 * LIFE_S)


def test_who_signs_and_who_is_trusted_in_each_phase(tmp_path: Path) -> None:
    clock = Clock()
    made = Succession.open(tmp_path, clock)
    (first,) = made.trusted
    assert (made.phase, made.pem, made.pin, made.proof) == (SuccessionPhase.ALONE, first.pem, first.pin, b"")
    made.rotate(LIFE_S, 0.0)
    made.save()
    (next,) = (one for one in made.trusted if one is not first)
    assert made.times is not None
    for phase, at_unix_s, trusted in (
        (SuccessionPhase.SHOWN, clock(), (first, next)),
        (SuccessionPhase.SHOWN, made.times.signs_unix_s - 1.0, (first, next)),
        (SuccessionPhase.SIGNS, made.times.signs_unix_s, (next, first)),
        (SuccessionPhase.ENDED, made.times.ended_unix_s, (next, first)),
        (SuccessionPhase.OVER, made.times.leaves_unix_s, (next,)),
    ):
        clock.unix_s = at_unix_s
        for one in (made, Succession.open(tmp_path, clock)):
            assert [each.pin for each in one.trusted] == [each.pin for each in trusted]
            assert (one.pin, one.cluster) == (trusted[0].pin, first.cluster)
            gpu = member(one, clock)
            assert (gpu.cluster, gpu.pins) == (first.cluster, tuple(each.pin for each in trusted))
            assert is_signed_by(gpu, trusted[0])
        assert made.phase is phase


def test_no_certificate_of_the_old_one_is_good_when_it_may_leave(tmp_path: Path) -> None:
    """A scheduler that was started again with a longer life in the first phase signed beyond the end of the second."""
    clock = Clock()
    made = in_phase(tmp_path, SuccessionPhase.SHOWN, clock)
    key = keys.new_key().public_key()
    principal = Principal(made.cluster, Role.STAGE_SERVER, "gpu-1")
    pem = made.certify(key, principal, clock(), life_s=30 * LIFE_S)
    assert made.times is not None
    assert keys.ends_unix_s(keys.read_certificate(pem)) == made.times.ended_unix_s
    clock.unix_s = made.times.signs_unix_s
    pem = made.certify(key, principal, clock(), life_s=30 * LIFE_S)
    assert keys.ends_unix_s(keys.read_certificate(pem)) == clock() + 30 * LIFE_S


def test_an_admin_lets_the_old_one_leave_as_soon_as_nobody_needs_it(tmp_path: Path) -> None:
    clock = Clock()
    made = Succession.open(tmp_path, clock)
    with pytest.raises(NotAllowed, match="there is one authority only"):
        made.retire()
    for phase in (SuccessionPhase.SHOWN, SuccessionPhase.SIGNS):
        clock = Clock()
        made = in_phase(tmp_path / phase, phase, clock)
        with pytest.raises(NotAllowed, match="certificates of the old authority are good until"):
            made.retire()
    clock = Clock()
    made = in_phase(tmp_path / "ended", SuccessionPhase.ENDED, clock)
    pin, cluster = made.pin, made.cluster
    made.retire()
    made.save()
    for one in (made, Succession.open(tmp_path / "ended", clock)):
        assert (one.phase, one.pin, one.cluster) == (SuccessionPhase.ALONE, pin, cluster)
    assert sorted(path.name for path in (tmp_path / "ended").iterdir()) == ["ca.crt", "ca.key"]
    made.rotate(LIFE_S, 0.0)
    assert made.cluster == cluster, "the name stays, also the second time"


def test_one_rotation_at_a_time_and_one_that_is_not_on_disk_is_none(tmp_path: Path) -> None:
    clock = Clock()
    made = rotating(tmp_path, clock)
    with pytest.raises(NotAllowed, match="is being rotated already"):
        made.rotate(LIFE_S, 0.0)
    made.forget()
    assert made.phase is SuccessionPhase.ALONE
    assert len(made.trusted) == 1


@pytest.mark.parametrize("written", ["ca.key", "ca.crt"])
def test_a_scheduler_that_is_killed_while_the_old_one_leaves_goes_on_at_its_next_start(
    tmp_path: Path, written: str
) -> None:
    clock = Clock()
    made = in_phase(tmp_path, SuccessionPhase.OVER, clock)
    next = made.trusted[0]
    write_private(tmp_path / "ca.key", keys.key_pem(next.key))
    if written == "ca.crt":
        write_private(tmp_path / "ca.crt", next.pem)
    again = Succession.open(tmp_path, clock)
    assert (again.phase, again.pin, again.cluster) == (SuccessionPhase.ALONE, next.pin, made.cluster)


def test_times_that_cannot_be_read_are_an_error_for_people(tmp_path: Path) -> None:
    rotating(tmp_path, Clock())
    for content in (b"", b"[]", b'{"signs_unix_s": 1}', b"[" * 100_000):
        write_private(tmp_path / "succession.json", content)
        with pytest.raises(InvalidConfig, match=r"succession.json cannot be read"):
            Succession.open(tmp_path, Clock())
    (tmp_path / "next.crt").unlink()
    with pytest.raises(InvalidConfig, match=r"next.crt cannot be read"):
        Succession.open(tmp_path, Clock())


def test_whoever_joins_trusts_whom_his_token_names_and_whom_that_vouches_for(tmp_path: Path) -> None:
    made = in_phase(tmp_path, SuccessionPhase.SIGNS, Clock())
    next, old = made.trusted
    proof = made.proof.hex()

    def trusted(pin: str, bundle: bytes, proof: str) -> list[str]:
        return [each.subject.rfc4514_string() for each in trusted_by(pin, bundle, proof)]

    both = [old.certificate.subject.rfc4514_string(), next.certificate.subject.rfc4514_string()]
    assert trusted(old.pin, made.pem, proof) == both
    assert trusted(next.pin, made.pem, proof) == both[1:], "the next one says nothing of the old one"
    assert trusted(old.pin, made.pem, "") == trusted(old.pin, made.pem, "zz") == both[:1]
    assert trusted(old.pin, old.pem, "") == both[:1]
    # Somebody in between adds his own, with whatever our key has signed.
    assert trusted(old.pin, old.pem + THEIRS.pem, proof) == both[:1]
    assert trusted(old.pin, THEIRS.pem + old.pem, old.certificate.signature.hex()) == both[:1]
    assert trusted(old.pin, made.pem + THEIRS.pem, proof) == []
    assert trusted(old.pin, THEIRS.pem, proof) == trusted(old.pin, b"nonsense", proof) == []


def test_times_are_kept_as_they_were(tmp_path: Path) -> None:
    made = rotating(tmp_path, Clock())
    again = Succession.open(tmp_path, Clock())
    assert made.times is not None
    assert again.times is not None
    assert asdict(again.times) == asdict(made.times)
