"""The two fleets of 64 GPUs that DT-FM is measured with: one data centre, and eight cities.

Delay and bandwidth between the cities were measured by the authors of DT-FM (arXiv 2206.01288) between AWS regions, and
are in their repository under the MIT licence (github.com/DS3Lab/DT-FM, Copyright (c) 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
PEERS_EACH = 8  # of a city, or GPUs of a machine of the data centre
NEAR = (5.0, 2.0)  # ms and Gbit/s within a city
# Between each city and those behind it.
DELAY_MS = (
    (67, 49, 96, 124, 136, 143, 124),
    (11, 143, 172, 76, 90, 67),
    (130, 159, 86, 99, 77),
    (34, 210, 223, 199),
    (238, 235, 228),
    (14, 12),
    (24,),
)
GBIT_PER_S = (
    (0.79, 1.1, 0.523, 0.46, 0.42, 0.404, 0.482),
    (1.12, 0.524, 0.5, 1.16, 1.02, 1.05),
    (0.694, 0.529, 1.05, 0.799, 1.14),
    (1.1, 0.366, 0.36, 0.465),
    (0.342, 0.358, 0.335),
    (1.14, 1.09),
    (1.08,),
)

Tables = tuple[list[list[float]], list[list[float]]]  # delay in s and rate in bit/s, peers x peers


def eight_cities(peers_each: int = PEERS_EACH) -> Tables:
    """Peers of all cities, one city after the other."""
    place = [number for number in range(len(CITIES)) for _ in range(peers_each)]

    def between(triangle: Sequence[Sequence[float]], near: float, one: int, other: int) -> float:
        low, high = sorted((one, other))
        return near if low == high else triangle[low][high - low - 1]

    delay_s = [[between(DELAY_MS, NEAR[0], here, other) / 1e3 for other in place] for here in place]
    return delay_s, [[between(GBIT_PER_S, NEAR[1], here, other) * 1e9 for other in place] for here in place]


def data_centre() -> Tables:
    """Eight machines of eight GPUs: 100 Gbit/s within a machine, 25 Gbit/s shared by its GPUs without, no delay."""
    place = [number // PEERS_EACH for number in range(8 * PEERS_EACH)]
    return [[0.0] * len(place) for _ in place], [[100e9 if a == b else 3.125e9 for b in place] for a in place]
