"""How one authority of a swarm follows the other while everybody goes on working.

    rotate            all members have both             all certificates of the old one have ended
      |  SHOWN          |  SIGNS                          |  ENDED             | leaves
      |  the old signs  |  the next one signs             |  the same          |  the next one alone
      |  both are trusted, and renewals give out both ---------------------->  |

The next one signs only when every holder of a good certificate trusts it. The old one leaves only when all of its
certificates have ended. The phase follows from three times on disk and the clock, so a restart in between changes
nothing. The swarm's name stays: a later authority bears it in its subject.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.errors import InvalidConfig, NotAllowed
from swarm.pki import keys
from swarm.pki.authority import LIFE_S, Authority, pin_of
from swarm.pki.files import read_private, write_private
from swarm.pki.names import Principal
from swarm.text import utc

TOKENS_LIVE_S = 7 * 86400.0  # that lines to join with which name the old authority still lead in, at least
_VOUCHES = b"swarm: the next authority\0"  # in front of what is signed: this key signs certificates too
_AUTHORITIES_MAX = 2
_FILES = ("ca.key", "ca.crt")
_NEXT_FILES = ("next.key", "next.crt")
_TIMES_FILE = "succession.json"


class SuccessionPhase(StrEnum):
    """The phase of a succession."""

    ALONE = "alone"  # there is one
    SHOWN = "shown"  # the old one signs, the next one is trusted as well
    SIGNS = "signs"  # the next one signs
    ENDED = "ended"  # and nobody has a good certificate of the old one
    OVER = "over"  # the old one is trusted no more


@dataclass(frozen=True, slots=True)
class Times:
    """When the phases begin, as Unix times."""

    signs_unix_s: float
    ended_unix_s: float
    leaves_unix_s: float

    @classmethod
    def plan(cls, now_unix_s: float, life_s: float, ends_unix_s: float, tokens_end_unix_s: float = 0.0) -> Times:
        """`life_s` is that of new certificates. The last one that is good now ends at `ends_unix_s`, the last token at
        `tokens_end_unix_s`.
        """
        signs_unix_s = max(now_unix_s + life_s, ends_unix_s)
        ended_unix_s = signs_unix_s + life_s
        leaves_unix_s = max(ended_unix_s, signs_unix_s + TOKENS_LIVE_S, tokens_end_unix_s)
        return cls(signs_unix_s, ended_unix_s, leaves_unix_s)

    def phase(self, now_unix_s: float) -> SuccessionPhase:
        if now_unix_s < self.signs_unix_s:
            return SuccessionPhase.SHOWN
        if now_unix_s < self.ended_unix_s:
            return SuccessionPhase.SIGNS
        return SuccessionPhase.ENDED if now_unix_s < self.leaves_unix_s else SuccessionPhase.OVER


class Succession:
    """The authority of a swarm, and the next one while both are trusted. It signs as an `Authority` does."""

    def __init__(
        self,
        folder: Path,
        own: Authority,
        next: Authority | None = None,
        times: Times | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """`next` and `times` are both given or both not."""
        self._folder = folder
        self._own = own
        self._next = next
        self._times = times
        self._before = next, times
        self._wall_s = wall_s

    @classmethod
    def open(cls, folder: Path, wall_s: Callable[[], float] = time.time) -> Succession:
        """The succession kept in the folder, or a new authority; InvalidConfig if its files cannot be used."""
        if not (folder / _TIMES_FILE).exists():
            return cls(folder, Authority.open(folder, wall_s()), wall_s=wall_s)
        next = Authority.read(folder, *_NEXT_FILES)
        if _same_key(folder / _FILES[0], next):  # it ended while the files of the next one took their place
            write_private(folder / _FILES[1], next.pem)
            (folder / _TIMES_FILE).unlink()
            return cls.open(folder, wall_s)
        made = cls(folder, Authority.open(folder, wall_s()), next, _read_times(folder / _TIMES_FILE), wall_s)
        if made.phase is SuccessionPhase.OVER:
            made.save()
        return made

    @property
    def phase(self) -> SuccessionPhase:
        return SuccessionPhase.ALONE if self._times is None else self._times.phase(self._wall_s())

    @property
    def times(self) -> Times | None:
        return self._times

    @property
    def trusted(self) -> tuple[Authority, ...]:
        """The authorities that are trusted now, the one that signs first."""
        if self._next is None or self._times is None:
            return (self._own,)
        match self.phase:
            case SuccessionPhase.SHOWN:
                return self._own, self._next
            case SuccessionPhase.OVER:
                return (self._next,)
        return self._next, self._own

    # As an Authority ---------------------------------------------------------------------------------------------

    @property
    def cluster(self) -> str:
        return self._own.cluster

    @property
    def pin(self) -> str:
        return self.trusted[0].pin

    @property
    def pem(self) -> bytes:
        return b"".join(one.pem for one in self.trusted)

    def certify(self, key: keys.PublicKey, principal: Principal, now_unix_s: float, *, life_s: float = LIFE_S) -> bytes:
        """As `Authority.certify`; none of the old authority's is good when the old one leaves."""
        if self._times is not None and self.phase is SuccessionPhase.SHOWN:
            life_s = min(life_s, self._times.ended_unix_s - now_unix_s)
        return self.trusted[0].certify(key, principal, now_unix_s, life_s=life_s)

    @property
    def proof(self) -> bytes:
        """As `Signer.proof`, for those whose tokens name the old authority."""
        if len(self.trusted) == 1 or self._next is None:
            return b""
        return self._own.key.sign(_claim(self._next.certificate), ec.ECDSA(hashes.SHA256()))

    # The way from one to the other -------------------------------------------------------------------------------

    def rotate(self, life_s: float, ends_unix_s: float, tokens_end_unix_s: float = 0.0) -> None:
        """From now on both are trusted; `save` makes it last. NotAllowed while an earlier rotation is under way.

        The arguments are as those of `Times.plan`.
        """
        now_unix_s = self._wall_s()
        if self._times is not None:
            raise NotAllowed(
                f"the authority is being rotated already, until {utc(self._times.leaves_unix_s)}",
                hint="see where it stands: swarm ca show",
            )
        self._before = None, None
        self._next = Authority.new(now_unix_s, self.cluster)
        self._times = Times.plan(now_unix_s, life_s, ends_unix_s, tokens_end_unix_s)

    def retire(self) -> None:
        """The old one leaves now; NotAllowed while somebody can have a good certificate of it."""
        if self._times is None:
            raise NotAllowed("there is one authority only", hint="make the next one: swarm ca rotate")
        if self.phase in (SuccessionPhase.SHOWN, SuccessionPhase.SIGNS):
            raise NotAllowed(
                f"certificates of the old authority are good until {utc(self._times.ended_unix_s)}",
                hint="wait until then; whoever must be shut out at once: swarm identity revoke NAME",
            )
        times = self._times
        self._before = self._next, times
        self._times = Times(times.signs_unix_s, times.ended_unix_s, self._wall_s())

    def forget(self) -> None:
        """Take the last `rotate` or `retire` back: it could not be saved."""
        if self._times is not None:  # else it was saved meanwhile
            self._next, self._times = self._before

    def save(self) -> None:
        """Write down what `rotate` or `retire` did, or clean up after the old one has left; blocking. InvalidConfig.

        The times come last when a rotation begins and go last when it ends: their being there says that it is on.
        """
        if self._next is None or self._times is None:
            return
        folder, next = self._folder, self._next
        if self.phase is not SuccessionPhase.OVER:
            write_private(folder / _NEXT_FILES[0], keys.key_pem(next.key))
            write_private(folder / _NEXT_FILES[1], next.pem)
            write_private(folder / _TIMES_FILE, json.dumps(asdict(self._times)).encode())
            return
        write_private(folder / _FILES[0], keys.key_pem(next.key))
        write_private(folder / _FILES[1], next.pem)
        self._own, self._next, self._times = next, None, None
        for name in (_TIMES_FILE, *_NEXT_FILES):
            (folder / name).unlink(missing_ok=True)


def trusted_by(pin: str, bundle_pem: bytes, proof: str) -> tuple[x509.Certificate, ...]:
    """Of the authorities in the bundle: the one that the pin names, and the one for which `proof` (hex) is its word.

    Empty if the pin names none of them, or if they cannot be read. Nothing else in the bundle is trusted.
    """
    try:
        shown = keys.read_certificates(bundle_pem)
        named = [one for one in shown if pin_of(one) == pin]
    except InvalidConfig:
        return ()
    if not named or len(shown) > _AUTHORITIES_MAX:
        return ()
    others = [one for one in shown if one is not named[0] and _vouches(named[0], one, proof)]
    return named[0], *others


def _vouches(old: x509.Certificate, next: x509.Certificate, proof: str) -> bool:
    try:
        keys.public_key(old).verify(bytes.fromhex(proof), _claim(next), ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _claim(next: x509.Certificate) -> bytes:
    return _VOUCHES + next.public_bytes(serialization.Encoding.DER)


def _same_key(key_file: Path, authority: Authority) -> bool:
    if not key_file.exists():
        return False
    held = keys.read_key(read_private(key_file)).public_key()
    return keys.fingerprint(held) == keys.fingerprint(authority.key.public_key())


def _read_times(path: Path) -> Times:
    try:
        kept = json.loads(read_private(path))
        return Times(**{one.name: float(kept[one.name]) for one in fields(Times)})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidConfig(
            f"{path} cannot be read: {error}", hint="put back the one of your backup, with next.key and next.crt"
        ) from None
