"""The harm that a scenario names: one flow per fault, each with a random generator of its own, until the calm phase."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from random import Random
from typing import assert_never

from tests.simulation.engine.history import Fault as Injected
from tests.simulation.engine.scenario import (
    Cancel,
    Clog,
    Crash,
    CrashScheduler,
    CutSession,
    DatabaseOutage,
    Disk,
    Failpoint,
    Fault,
    Leave,
    Partition,
    Pause,
    Slow,
    Spawn,
)
from tests.simulation.engine.world import SCHEDULER, Peer, World
from tests.support.sim import loop as sim
from tests.support.sim.weather import DETECT_S


async def inject(world: World, fault: Fault, number: int) -> None:
    """Do the harm of one fault, again and again; ended by cancellation."""
    rng = sim.rng(f"fault {number} {type(fault).__name__}")
    match fault:
        case Crash():
            await _crash(world, fault, rng)
        case Spawn():
            await _spawn(world, fault, rng)
        case Leave():
            await _leave(world, fault, rng)
        case CrashScheduler():
            await _crash_scheduler(world, fault, rng)
        case Pause():
            await _pause(world, fault, rng)
        case Slow():
            await _slow(world, fault, rng)
        case Partition():
            await _partition(world, fault, rng)
        case Clog():
            await _clog(world, fault, rng)
        case CutSession():
            await _cut(world, fault, rng)
        case Cancel():
            await asyncio.sleep(rng.uniform(*fault.after_s))
            job = world.job
            side = world.scheduler
            if job is not None and side is not None and side.jobs is not None and not job.record.state.is_final:
                _note(world, "cancel")
                await side.jobs.cancel(job, "cancelled by the scenario")
        case DatabaseOutage() | Disk() | Failpoint():
            pass  # where they act the ports ask for them
        case _:
            assert_never(fault)


def heal(world: World) -> None:
    """The calm phase begins: all links open, all processes run, nothing is slow any more."""
    world.is_calm = True
    world.weather.calm()
    for peer in world.peers.values():
        if peer.device is not None:
            peer.device.slowness = 1.0
        if peer.process.is_frozen:
            peer.process.thaw()
    if world.scheduler is not None and world.scheduler.process.is_frozen:
        world.scheduler.process.thaw()
    for name in [SCHEDULER, *world.peers]:
        world.revive(name)


async def _crash(world: World, fault: Crash, rng: Random) -> None:
    for number in range(fault.at_most):
        await asyncio.sleep(rng.uniform(*fault.every_s))
        if rng.random() < fault.stage and (pool := _pool(world, rng)):
            _note(world, "stage lost", ", ".join(peer.name for peer in pool))
            for peer in pool:
                world.kill(peer.process, "stage lost", rng.uniform(*fault.down_s))
            continue
        victims = [peer for peer in _up(world) if world.can_lose(peer.name)]
        if not victims:
            continue
        victim = rng.choice(victims)
        down_s = rng.uniform(*fault.down_s)
        _note(world, "crash", f"{victim.name}.{victim.incarnation}")
        if rng.random() < fault.new_id:
            name = f"{victim.name.partition('-new')[0]}-new{number}"
            world.kill(victim.process, "crash")
            world.retired.add(victim.name)
            world.later(down_s, lambda name=name: world.start_peer(name))
        else:
            world.kill(victim.process, "crash", down_s)


async def _spawn(world: World, fault: Spawn, rng: Random) -> None:
    for number in range(fault.at_most):
        await asyncio.sleep(rng.uniform(*fault.every_s))
        _note(world, "spawn")
        world.start_peer(f"spawned-{number}")


async def _leave(world: World, fault: Leave, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        victims = [peer for peer in _up(world) if world.can_lose(peer.name)]
        if not victims:
            continue
        victim = rng.choice(victims)
        process, server = victim.process, victim.server
        assert server is not None
        _note(world, "leave", f"{victim.name}.{victim.incarnation}")
        _hurt(world, [victim], fault.patience_s)
        if server.leave("SIGTERM"):
            try:
                async with asyncio.timeout(fault.patience_s):
                    await server.handed_over()
                _note(world, "left", f"{victim.name}.{victim.incarnation}")
            except TimeoutError:
                pass  # it ends anyway, as a process that was told to end does
        world.kill(process, "SIGTERM", rng.uniform(*fault.down_s))


async def _crash_scheduler(world: World, fault: CrashScheduler, rng: Random) -> None:
    for _ in range(fault.at_most):
        await asyncio.sleep(rng.uniform(*fault.every_s))
        side = world.scheduler
        if side is None or not side.is_up:
            continue
        _note(world, "scheduler crash")
        world.kill(side.process, "scheduler crash", rng.uniform(*fault.down_s))


async def _pause(world: World, fault: Pause, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        side = world.scheduler
        seconds = rng.uniform(*fault.for_s)
        if rng.random() < fault.scheduler and side is not None and side.is_up:
            process, address = side.process, SCHEDULER
        else:
            # To the others a long pause is a loss, and no stage may be lost by it.
            victims = [peer for peer in _up(world) if seconds < DETECT_S or world.can_lose(peer.name)]
            if not victims:
                continue
            victim = rng.choice(victims)
            process, address = victim.process, victim.address
            _hurt(world, [victim], seconds)
        _note(world, "pause", f"{process.name}.{process.incarnation} for {seconds:.3f} s")
        world.network.freeze(address)
        world.later(seconds, process.thaw)


async def _slow(world: World, fault: Slow, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        victims = [peer for peer in _up(world) if peer.device is not None and peer.device.slowness == 1.0]
        if not victims:
            continue
        device = rng.choice(victims).device
        assert device is not None
        device.slowness = fault.factor
        _note(world, "slow")

        def recover(device=device) -> None:  # type: ignore[no-untyped-def]
            device.slowness = 1.0

        world.later(rng.uniform(*fault.for_s), recover)


async def _partition(world: World, fault: Partition, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        seconds = rng.uniform(*fault.for_s)
        addresses = [peer.address for peer in _up(world) if seconds < DETECT_S or world.can_lose(peer.name)]
        if not addresses:
            continue
        one = rng.choice(addresses)
        others = [address for address in addresses if address != one]
        shape = rng.choice(fault.shapes)
        match shape:
            case "peer":
                pairs = [(one, other) for other in [*others, SCHEDULER]]
            case "scheduler":
                pairs = [(one, SCHEDULER)]
            case "pair":
                pairs = [(one, rng.choice(others))] if others else []
            case "half":
                half = addresses[: len(addresses) // 2]
                pairs = [(left, right) for left in half for right in addresses if right not in half]
            case _:
                raise ValueError(f"unknown shape of a partition: {shape}")
        if not pairs:
            continue
        there, back = rng.choice(((True, False), (False, True))) if rng.random() < fault.one_way else (True, True)
        stopped = [pair for pair in pairs if there] + [(other, one) for one, other in pairs if back]
        _note(world, "partition", f"{shape} of {one} {'one way ' if not (there and back) else ''}for {seconds:.3f} s")
        for pair in stopped:
            world.weather.stop(*pair)
        _hurt(world, [world.peer_at(left) for left, right in pairs if right == SCHEDULER], seconds)
        world.later(seconds, lambda stopped=stopped: [world.weather.let(*pair) for pair in stopped])


async def _clog(world: World, fault: Clog, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        up = _up(world)
        chosen = [address for address in [*(peer.address for peer in up), SCHEDULER] if rng.random() < 0.5]
        pauses_s = [rng.uniform(*fault.between_s) for _ in range(2 * len(chosen))]
        if sum(pauses_s) >= DETECT_S:
            # Long enough that the peers that are cut off may be lost: never all of a stage, and never all at once.
            candidates, chosen = [address for address in chosen if address != SCHEDULER], []
            for victim in map(world.peer_at, candidates):
                if world.can_lose(victim.name):
                    chosen.append(victim.address)
                    _hurt(world, [victim], sum(pauses_s))
        _note(world, "clog", ", ".join(chosen))
        links = {
            address: [
                pair
                for other in [*(peer.address for peer in up), SCHEDULER]
                if other != address
                for pair in ((address, other), (other, address))
            ]
            for address in chosen
        }
        for address, pause_s in zip(chosen, pauses_s, strict=False):
            for pair in links[address]:
                world.weather.stop(*pair)
            await asyncio.sleep(pause_s)
        for address, pause_s in zip(rng.sample(chosen, len(chosen)), reversed(pauses_s), strict=False):
            for pair in links[address]:
                world.weather.let(*pair)
            await asyncio.sleep(pause_s)


async def _cut(world: World, fault: CutSession, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(*fault.every_s))
        victims = _up(world)
        if not victims:
            continue
        victim = rng.choice(victims)
        _note(world, "session cut", victim.name)
        world.network.cut(victim.address, SCHEDULER)


def _hurt(world: World, victims: Iterable[Peer], seconds: float) -> None:
    """Note that these peers are cut off; if that may count as a loss, spare the others of their stages meanwhile."""
    if seconds < DETECT_S:
        return
    names = [victim.name for victim in victims]
    world.hurt.update(names)
    world.later(seconds, lambda: world.hurt.subtract(names))


def _pool(world: World, rng: Random) -> list[Peer]:
    """All peers that hold the same stage as a randomly chosen one."""
    stages = {peer.name: world.stage_of(peer.name) for peer in _up(world)}
    held = sorted({stage for stage in stages.values() if stage is not None})
    if not held:
        return []
    chosen = rng.choice(held)
    return [peer for peer in _up(world) if stages[peer.name] == chosen]


def _up(world: World) -> list[Peer]:
    return [peer for _, peer in sorted(world.peers.items()) if peer.is_up and peer.server is not None]


def _note(world: World, kind: str, detail: str = "") -> None:
    world.history.add("", 0, Injected(kind, detail))
