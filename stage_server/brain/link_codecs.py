"""The codec of the boundary tensors on each link, if the job says `pipeline.compression = "auto"`.

A link keeps pace if a tensor takes at most half as long to travel as to compute: then transfers hide behind computing,
with room for both directions. Each link gets the most precise codec that keeps pace, and the quickest if none does.
Where tensors hold bfloat16 values (model.dtype "bfloat16_parameters"), "none" is not among them: it adds nothing.

    seconds of a codec = its bytes / the link's bytes per second + what encoding and decoding cost

The speed of a link is the best of its last delivery rates, as in BBR (Cardwell et al., ACM Queue 14-5, 2016): the bytes
delivered between the start and the receipt of one tensor, over that time. Latency is part of it, so a link that carries
one tensor at a time looks slower than its bandwidth. Decision: docs/decisions/140.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from swarm.limits import LINKS_TOLD_MAX
from swarm.types import Direction, PeerId
from swarm.wire.messages import LinkSpeed

AUTO: Final = "auto"
PRECISE_FIRST: Final = ("none", "bfloat16", "int8")
FIRST: Final = "bfloat16"  # until the link was measured
EXACT_AT_BFLOAT16: Final = PRECISE_FIRST[1:]  # of those, the ones worth their bytes where all values are bfloat16
PLAIN_BYTES: Final = 4  # of an element of float32
WIRE_BYTES: Final = {"none": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}  # of an element
# Seconds per byte of float32 to encode and to decode, of one CPU thread at 4 MiB: 19 GB/s each way; 3.4 and 13 GB/s.
COST_S: Final = {"none": 0.0, "bfloat16": 2 / 19e9, "int8": 1 / 3.4e9 + 1 / 13e9}
# Smaller tensors cost a round trip in any codec: they travel as they are.
LEAST_BYTES: Final = 16 << 10
SHARE_MAX: Final = 0.5  # of the computing time
SHARE_BACK: Final = 0.3  # a more precise codec than the present one needs that much room, so that links do not flap
GAIN_MIN: Final = 0.2  # of the time, for one codec instead of another where none keeps pace
REMEMBERED: Final = 16  # deliveries of a link, and computations in a direction
FRESH_S: Final = 60.0  # a link that carried nothing for this long, while others did, is not reported
RATE_MAX: Final = 1e12  # bytes per second; a clock that hardly moves shows more


def allowed(setting: str) -> tuple[str, ...]:
    """The codecs that tensors of a job with this `pipeline.compression` may have."""
    return PRECISE_FIRST if setting == AUTO else (setting,)


def choose(
    current: str, elements: int, bytes_per_s: float, compute_s: float, codecs: Sequence[str] = PRECISE_FIRST
) -> str:
    """The one of `codecs`, most precise first, for a tensor of `elements` on a link that now uses `current`."""
    if elements * PLAIN_BYTES < LEAST_BYTES:
        return codecs[0]
    seconds = {codec: seconds_of(codec, elements, bytes_per_s) for codec in codecs}
    present = codecs.index(current)
    for rank, codec in enumerate(codecs):
        if seconds[codec] <= compute_s * (SHARE_BACK if rank < present else SHARE_MAX):
            return codec
    quickest = min(codecs, key=seconds.__getitem__)
    return quickest if seconds[quickest] < (1 - GAIN_MIN) * seconds[current] else current


def seconds_of(codec: str, elements: int, bytes_per_s: float) -> float:
    """Seconds that a tensor takes in this codec: to encode, to travel and to decode."""
    return elements * (WIRE_BYTES[codec] / bytes_per_s + PLAIN_BYTES * COST_S[codec])


@dataclass(frozen=True, slots=True)
class CodecStart:
    """The moment at which a tensor began to travel."""

    at_s: float
    delivered_bytes: int  # on its link until then


@dataclass(slots=True)
class _Link:
    codec: str = FIRST
    delivered_bytes: int = 0
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # bytes per second
    receipts_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A link that uses another codec from now on."""

    to: PeerId
    before: str
    codec: str
    bytes_per_s: float


class LinkCodecs:
    """The links of one replica to its neighbours."""

    def __init__(self, setting: str, *, bfloat16_is_exact: bool = False) -> None:
        self._setting = setting
        self._codecs = EXACT_AT_BFLOAT16 if bfloat16_is_exact else PRECISE_FIRST
        self._links: dict[PeerId, _Link] = {}
        self._compute_s = {direction: deque[float](maxlen=REMEMBERED) for direction in Direction}

    def computed(self, direction: Direction, seconds: float) -> None:
        """A microbatch was computed in this direction."""
        self._compute_s[direction].append(seconds)

    def codec_to(self, to: PeerId | None, direction: Direction, elements: int) -> tuple[str, Change | None]:
        """The codec for the next tensor to `to` (None: no receiver), and whether that is a change for the link."""
        if self._setting != AUTO:
            return self._setting, None
        if to is None:
            return FIRST, None
        link = self._links.setdefault(to, _Link())
        compute_s = self._compute_s[direction]
        if not link.rates or not compute_s:
            return link.codec, None
        before, bytes_per_s = link.codec, max(link.rates)
        link.codec = choose(before, elements, bytes_per_s, median(compute_s), self._codecs)
        return link.codec, Change(to, before, link.codec, bytes_per_s) if link.codec != before else None

    def start(self, to: PeerId, now_s: float) -> CodecStart:
        return CodecStart(now_s, self._links.setdefault(to, _Link()).delivered_bytes)

    def delivered(self, to: PeerId, start: CodecStart, size_bytes: int, now_s: float) -> None:
        """A tensor of `size_bytes` on the wire, sent from `start` on, was acknowledged."""
        link = self._links[to]
        link.delivered_bytes += size_bytes
        link.used_s = now_s
        if now_s > start.at_s:
            rate = (link.delivered_bytes - start.delivered_bytes) / (now_s - start.at_s)
            link.rates.append(min(rate, RATE_MAX))
            link.receipts_s.append(now_s - start.at_s)

    def speeds(self) -> tuple[LinkSpeed, ...]:
        """The speeds of links that carried tensors lately, the newest first."""
        used = sorted(self._links.items(), key=lambda one: -one[1].used_s)
        fresh = [(to, link) for to, link in used if link.receipts_s and link.used_s > used[0][1].used_s - FRESH_S]
        return tuple(LinkSpeed(to, max(link.rates), min(link.receipts_s)) for to, link in fresh[:LINKS_TOLD_MAX])
