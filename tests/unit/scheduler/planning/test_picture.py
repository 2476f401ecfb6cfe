"""The picture of a plan: nothing in it lies upon anything else."""

from __future__ import annotations

import re

from scheduler.planning.picture import picture
from scheduler.planning.plan import Plan
from scheduler.planning.planner import again, cut_as
from scheduler.planning.pool import PeerPool
from tests.support.pools import machine, planned_job


def test_the_names_of_many_sites_stand_apart_and_each_has_a_colour_of_its_own() -> None:
    """The names from the ninth on stood upon the first ones, and their sites had the colours of the first."""
    pool = PeerPool(tuple(machine(f"p{number}", f"a-site-of-a-long-name-{number:02}") for number in range(19)))
    spec = planned_job(2).having("training", global_batch_sequences=38)
    plan = again(pool, spec, Plan((2,), (tuple(peer.name for peer in pool.peers),), 2))
    drawn = picture(pool, cut_as(pool, spec, plan), plan)
    block = r'<rect class="block" x="(\d+)" y="(\d+)" width="12" .* fill="(.*)"><title>(.*)</title></rect>'
    legend = re.findall(block + r"\n.*>(.*)</text>", drawn)
    blocks = re.findall(r'y="([\d.]+)" width="[\d.]+" height="[\d.]+" fill="(.*)"><title>', drawn)
    places = [(int(x), int(y)) for x, y, *_ in legend]
    assert all(abs(x - u) >= 18 + 7 * 13 or abs(y - v) > 13 for x, y in places for u, v in places if (x, y) != (u, v))
    assert {len(name) for *_, name in legend} == {13}
    assert {name for *_, name, _ in legend} == {peer.site for peer in pool.peers}
    assert len(set(places)) == len({colour for _, _, colour, *_ in legend}) == 19
    assert {colour for _, colour in blocks} == {colour for _, _, colour, *_ in legend}
    assert min(float(top) for top, _ in blocks) > max(y for _, y in places) + 12
