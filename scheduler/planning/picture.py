"""The plan as a picture (SVG): a column for each stage, in it a block for each replica.

    a block's height    the microbatches/s of the replica        its colour    its site
    the dashed line     what the slowest of all can do: blocks above it wait for others

Below is one step, as it is played: a lane for each replica, or for each stage where there are many. It is filled where
it computes; a lane of a stage as high as the share of its replicas that do. The picture is readable on light and dark
paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

import numpy as np

from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.planner import numbers_of
from scheduler.planning.play import RULES, Play, PlayRules, Workload, workload
from scheduler.planning.pool import PeerPool
from scheduler.planning.stage_servers import HopPart, Turn
from scheduler.planning.table import headline
from swarm.job.spec import JobSpec

LANES_MAX, LANE, BINS = 32, 18, 240  # lanes of replicas; pixels of each; moments of the step that are told apart
WIDTH, LEFT, TOP, TALL = 960, 16, 92, 300  # TOP: with one row of sites
SITES_WIDE, SITE_WIDE, SITE_TALL, SITE_NAME_MAX = 8, 116, 18, 13  # sites in a row; pixels of each; letters of a name
NAMED_WIDE, NAMED_TALL = 62, 13  # of a block in which its peer's name has room
HUES = ("#9cc2ff", "#ffc59e", "#a7e3b8", "#f5b5d0", "#e3d48a", "#c9b6f5", "#9adbe0", "#d0c4b8")
STYLE = """
    .paper { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e } .name { fill: #10243f; font-size: 10px }
    .block { stroke: #59636e; stroke-width: 0.8 } .limit { stroke: #c2410c; stroke-width: 1.6; stroke-dasharray: 6 4 }
    .busy { fill: #2563eb } .lane { fill: #f6f8fa }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117 } .text { fill: #e6edf3 } .quiet { fill: #9198a1 }
      .block { stroke: #0d1117 } .limit { stroke: #fb923c }
      .busy { fill: #6ea8fe } .lane { fill: #161b22 }
    }
"""


def picture(pool: PeerPool, spec: JobSpec, plan: Plan) -> str:
    """The picture of a plan; `spec` is the job as the plan cuts it."""
    shape, _, second = headline(pool, plan).partition(": ")
    first, details = shape.partition(",")[0], shape.rpartition(", ")[2]
    facts = CutBound(pool, spec)
    sites = sorted({pool.peer(name).site for name in plan.peers})
    base = TOP + (len(sites) - 1) // SITES_WIDE * SITE_TALL + TALL
    lanes = _lanes(pool, facts, plan, base)
    height = base + 62 + LANE * (lanes.count("\n") // 2) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" font-family="system-ui, \'DejaVu Sans\', Helvetica, Arial, sans-serif" font-size="13">\n'
        f"<title>{escape(first)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>\n'
        f"{_text(LEFT, 24, first, 'text', 600)}{_text(LEFT, 44, f'{details}: {second}', 'text')}"
        + "".join(_legend(sites if sites != [""] else []))
        + "".join(_columns(pool, facts, plan, sites, base))
        + lanes
        + "</svg>\n"
    )


def _legend(sites: Sequence[str]) -> Iterator[str]:
    for at, site in enumerate(sites):
        row, column = divmod(at, SITES_WIDE)
        x, y = LEFT + column * SITE_WIDE, 58 + row * SITE_TALL
        end = f"><title>{escape(site)}</title></rect>" if site[SITE_NAME_MAX:] else "/>"
        yield f'<rect class="block" x="{x}" y="{y}" width="12" height="12" rx="2" fill="{_hue(at)}"{end}\n'
        yield _text(x + 18, y + 11, site[:SITE_NAME_MAX], "quiet")


def _hue(site: int) -> str:
    """The colour of a site; those of each next row are darker."""
    row, column = divmod(site, SITES_WIDE)
    parts = (int(0.8**row * int(HUES[column][at : at + 2], 16)) for at in (1, 3, 5))
    return f"#{''.join(f'{part:02x}' for part in parts)}"


def _columns(pool: PeerPool, facts: CutBound, plan: Plan, sites: Sequence[str], base: int) -> Iterator[str]:
    numbers = numbers_of(pool, plan.places)
    rates = [[(float(facts.rate[one, stage]), one) for one in members] for stage, members in enumerate(numbers)]
    scale = TALL / max(sum(rate for rate, _ in column) for column in rates)
    wide = (WIDTH - 2 * LEFT) / len(rates)
    is_narrow = wide < NAMED_WIDE
    for stage, column in enumerate(rates):
        start, y = LEFT + stage * wide, float(base)
        for rate, one in sorted(column, key=lambda pair: (pool.peers[pair[1]].site, -pair[0], pair[1])):
            peer, tall = pool.peers[one], rate * scale
            y -= tall
            hue = _hue(sites.index(peer.site))
            yield (
                f'<rect class="block" x="{start + 2:.1f}" y="{y:.1f}" width="{wide - 4:.1f}" height="{tall:.1f}" '
                f'fill="{hue}"><title>{escape(peer.name)}: {rate:.3g} microbatches/s</title></rect>\n'
            )
            if tall >= NAMED_TALL and not is_narrow:
                name = peer.name[: int(wide / 6.2)]
                yield _text(start + wide / 2, y + tall / 2 + 4, name, "name", middle=True)
        yield _text(start + wide / 2, base + 18, f"{stage}" if is_narrow else f"stage {stage}", "text", middle=True)
        layers = plan.split[stage]
        yield _text(start + wide / 2, base + 36, f"{layers}" if is_narrow else f"{layers} layers", "quiet", middle=True)
    bound = facts.of(numbers)
    y = base - bound.microbatches_per_s * scale
    yield f'<line class="limit" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - LEFT}" y2="{y:.1f}"/>\n'
    told = f"dashed: {bound.limits} lets {bound.microbatches_per_s:.3g} microbatches/s through, what is above it waits"
    yield _text(LEFT, base + 55, f"{told}{'; numbers of stages, and layers below' if is_narrow else ''}", "quiet")


class WatchedPlay(Play):
    """A play that remembers which stage server computed from when to when."""

    def __init__(self, pool: PeerPool, plan: Plan, load: Workload, rules: PlayRules) -> None:
        self.computing: list[tuple[str, float, float]] = []
        super().__init__(pool, plan, load, rules)

    def computed(self, turn: Turn, part: HopPart, seconds: float, wait_s: float) -> None:
        self.computing.append((turn.server.name, self.now_s - seconds, self.now_s))
        super().computed(turn, part, seconds, wait_s)


def _lanes(pool: PeerPool, facts: CutBound, plan: Plan, base: int) -> str:
    """A played step, once steps follow each other evenly: two lines of SVG for each lane."""
    play = WatchedPlay(pool, plan, workload(facts), replace(RULES, warm_up=2, measured=2))
    play.run()
    begin, end = play.committed_s[-2:]
    lanes = [(f"stage {stage}", place) for stage, place in enumerate(plan.places)]
    if len(plan.peers) <= LANES_MAX:
        lanes = [(name, (name,)) for place in plan.places for name in place]
    at = {name: number for number, (_, names) in enumerate(lanes) for name in names}
    busy = np.zeros((len(lanes), BINS + 1))
    for name, since, until in play.computing:
        first, last = (BINS * (min(max(one, begin), end) - begin) / (end - begin) for one in (since, until))
        for moment in range(int(first), int(last) + 1):
            part = min(last, moment + 1.0) - max(first, float(moment))
            busy[at[name], moment] += part / len(lanes[at[name]][1])
    left, top = LEFT + 110, base + 72
    wide = (WIDTH - LEFT - left) / BINS
    filled = "filled while it computes" if len(lanes) > len(plan.places) else "filled as far as its replicas compute"
    drawn = [_text(LEFT, top, f"a step as it is played, {end - begin:.3g} s from left to right; {filled}", "quiet")]
    for number, (name, _) in enumerate(lanes):
        foot = top + 8 + LANE * (number + 1)
        path, level = f"M{left} {foot}", 0.0
        for moment in range(BINS):
            share = round(8 * min(1.0, busy[number, moment])) / 8
            if share != level:
                path, level = f"{path}H{left + moment * wide:.0f}V{foot - (LANE - 3) * share:.0f}", share
        drawn.append(_text(LEFT, foot - 4, name[:16], "quiet"))
        lane = f'<rect class="lane" x="{left}" y="{foot - LANE + 3}" width="{wide * BINS:.0f}" height="{LANE - 3}"/>'
        drawn.append(f'{lane}<path class="busy" d="{path}H{left + wide * BINS:.0f}V{foot}Z"/>\n')
    return "".join(drawn)


def _text(x: float, y: float, text: str, kind: str, weight: int = 400, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-weight="{weight}"{anchor}>{escape(text)}</text>\n'
