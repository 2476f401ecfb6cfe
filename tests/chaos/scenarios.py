"""What is done to the processes: one function each, numbered as in the table of faults in docs/reliability.md."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from scheduler.brain.inputs import Happened
from scheduler.brain.outputs import Send
from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript
from swarm.types import Round
from swarm.wire import jobs_pb2 as pb
from swarm.wire import members_pb2, members_pb2_grpc
from swarm.wire.messages import Average, RoundFailed
from tests.chaos import failing_stage_server, islands
from tests.chaos.failpoints import HIT
from tests.chaos.relay import Relay
from tests.chaos.repeating_stage_server import SAID
from tests.chaos.trial import COMMIT_S_MAX, MICROBATCHES, Broken, Job, Trial, Void, Work, gaps_s, percentile
from tests.support.processes import Process
from tests.support.services import free_port, whole_lines

HARMED = "tests.chaos.harmed_stage_server"
MICROBATCHES_MIN = 5000  # that F1 compares
REPEATED = {"Accumulated", "Averaged", "Committed", "Route", "Average", "Commit", "activation", "gradient"}  # at least
PREDECESSOR_S = 2.0  # the next kill comes so long after the one before, at the earliest


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run(folder, seed, long)` gives the trial that passed; it raises Void or Broken otherwise."""

    name: str
    claim: str
    run: Callable[[Path, str, bool], Trial]
    short: bool = True  # part of the three-minute selection
    network: bool = False  # in network namespaces: needs root


# Stage servers -------------------------------------------------------------------------------------------------------


def kills_while_another_lives(folder: Path, seed: str, long: bool) -> Trial:
    """F1 as far as it goes without joining: random kills down to one replica per stage, then a new job takes all."""
    kills = 60 if long else 2
    with Trial(folder, seed) as trial:
        peers = trial.add_servers(6 if long else 4)
        intervals: list[float] = []
        while len(trial.kills) < kills:
            job = trial.job(2, 45 if long else 40)
            trial.until_step(job, 3)
            dead: list[str] = []
            while len(dead) < 4 and len(trial.kills) < kills:
                pools = trial.serving(job)
                victims = [peer for pool in pools.values() if len(pool) > 1 for peer in pool]
                if not victims:
                    break
                victim = trial.rng.choice(victims)
                trial.kill(victim)
                dead.append(victim)
                intervals.append(trial.heals(job, steps=1))
                if trial.view(job).state != "running":
                    break
                time.sleep(trial.rng.uniform(0.0, 0.5))
            for peer in dead:
                trial.respawn(peer)
            trial.proves(job)
            trial.until_idle(dead)
            trial.until_free(peers)
        _tell_kills(trial, intervals)
        return trial


def kills_and_respawns(folder: Path, seed: str, long: bool) -> Trial:
    """F1: kill -9 of a random stage server, which starts again and joins; the next when every pool is whole."""
    kills = 60 if long else 3
    with Trial(folder, seed) as trial:
        trial.add_servers(4)
        work = Work(trial, 2, 400 if long else 120, limits__min_replicas=2)
        until_commit_s: list[float] = []
        until_whole_s: list[float] = []
        while len(trial.kills) < kills or trial.microbatches < (MICROBATCHES_MIN if long else 0):
            job = work.at_work()
            trial.steps_on(job)
            victim = trial.rng.choice([peer for pool in trial.serving(job).values() for peer in pool])
            killed_s = time.monotonic()
            trial.kill(victim)
            until_commit_s.append(trial.heals(job, steps=1))
            trial.respawn(victim)
            trial.servers[victim].wait_ready()
            ready_s = time.monotonic()
            work.until_whole()
            if trial.view(job).state == "running":
                until_whole_s.append(time.monotonic() - ready_s)
            time.sleep(max(0.0, killed_s + PREDECESSOR_S - time.monotonic()) + trial.rng.uniform(0.0, 0.5))
        work.prove()
        if not until_whole_s:
            raise Void("no job was at work when a pool was whole again")
        _tell_kills(trial, until_commit_s)
        trial.figures["ready_to_serving_s"] = _spread(until_whole_s)
        trial.figures["joined"] = len(until_whole_s)
        return trial


def harm_after_harm(folder: Path, seed: str, long: bool) -> Trial:
    """F1, F2, F5, F10 on one cluster: a death, one at an exact point, a zombie, a dead scheduler, in turn.

    The model has narrow places that know the token, and int8 at its cut.
    """
    narrow: dict[str, object] = {"model__narrow": {"kind": "anchor", "every": 1}, "pipeline__compression": "int8"}
    points = [point for point in failing_stage_server.POINTS if point not in ("nan", "parts/sum")]
    with Trial(folder, seed, grace_s=3.0) as trial:
        peers = trial.add_servers(4)
        work = Work(trial, 2, 120, limits__min_replicas=2, **narrow)
        died_at = trial.figures["died_at"] = []
        for _ in range(6 if long else 1):
            # A death; who comes back joins, and dies at an exact point; then it comes back for good.
            job = work.at_work()
            victim = trial.rng.choice(peers)
            point = trial.rng.choice(points)
            trial.kill(victim)
            trial.heals(job, steps=1)
            hit = trial.rng.randint(2, 8)
            failing = trial.respawn(victim, module=f"tests.chaos.failing_stage_server --at {point} --hit {hit}")
            failing.wait_ready()
            trial.until_hit(failing, point, meanwhile=work.at_work)
            died_at.append(point)
            trial.respawn(victim).wait_ready()
            work.at_work()
            work.until_whole()

            # A zombie wakes up after it was given up.
            job = work.at_work()
            victim = trial.rng.choice([peer for pool in trial.serving(job).values() for peer in pool])
            with trial.frozen(victim):
                trial.until("given up", lambda peer=victim: trial.state_of(peer) == "gone", 20.0)  # type: ignore[misc]
            trial.until("back", lambda peer=victim: trial.state_of(peer) != "gone", 20.0)  # type: ignore[misc]
            work.at_work()
            work.until_whole()

            job = work.at_work()
            before = trial.view(job).step
            trial.restart_scheduler()
            if trial.view(job).step < before:
                raise Broken("steps were rolled back")
            trial.heals(job, steps=1)
        work.prove()
        _tell_kills(trial, [])
        return trial


def deaths_at_exact_points(folder: Path, seed: str, long: bool) -> Trial:
    """F2: a stage server dies at each named edge of a microbatch and of a commit; one job per point."""
    points = [point for point in failing_stage_server.POINTS if point not in ("nan", "parts/sum")]
    if not long:
        points = Random(seed).sample(points, 1)
    with Trial(folder, seed) as trial:
        peers = trial.add_servers(4)
        hits = 0
        for point in points:
            # Any of the servers: it serves whatever stage it is given, and another lives there.
            victim = trial.rng.choice(peers)
            per_step = point in ("reduce/Averaged", "Averaged/row", "Commit/apply", "apply/Committed")
            hit = trial.rng.randint(2, 8) if per_step else trial.rng.randint(5, 40)
            trial.servers[victim].kill(signal.SIGKILL)
            trial.respawn(victim, module=f"tests.chaos.failing_stage_server --at {point} --hit {hit}")
            trial.until_idle([victim])
            trial.until_free(peers)
            job = trial.job(2, 60)  # more than it takes, although some have less to do than others
            trial.until_hit(trial.servers[victim], point)
            hits += 1
            trial.respawn(victim)
            trial.proves(job)
            trial.until_idle([victim])
            trial.until_free(peers)
        trial.figures["points_hit"] = hits
        return trial


def a_carrier_is_harmed(folder: Path, seed: str, long: bool) -> Trial:
    """Two sites of two stage servers, 50 Mbit/s between them: harm comes to a server that has the parts of its site.

    A death is known at once, so the others begin a new round, perhaps by site. While the server is stopped, the others
    only see that no sum comes: then they repeat the round flat.
    """
    with Relay(2, seed=Random(seed).getrandbits(32)) as relay:
        relay.between(0, 1, bytes_per_s=50e6 / 8, delay_s=0.01)
        relay.move_here(0)
        trial, places = Trial(folder, seed, "--record", grace_s=10.0), [0, 0, 1, 1]
        trial.scheduler_host, trial.server_hosts = relay.hosts[0], [relay.hosts[place] for place in places]
        trial.before_servers = [relay.at(place) for place in places]
        with trial:
            site_of = {peer: site for site in islands.SITES for peer in trial.add_servers(2, "--site", site)}
            for point, victim in zip(("parts/sum", "parts/stop"), trial.rng.sample(list(site_of), 2), strict=True):
                harmed = f"tests.chaos.failing_stage_server --at {point} --hit {trial.rng.randint(2, 8)}"
                trial.respawn(victim, "--site", site_of[victim], module=harmed)
                trial.until_idle([victim])
                trial.until_free(list(site_of))
                job = trial.job(1, 30, limits__min_replicas=4, config__hidden_size=128, averaging__timeout_s=2.0)
                if point == "parts/sum":
                    trial.until_hit(trial.servers[victim], point)
                    trial.respawn(victim, "--site", site_of[victim])
                else:
                    _until_a_round_failed(trial, trial.servers[victim], point)
                    trial.servers[victim].kill(signal.SIGCONT)
                trial.proves(job)
                forms = trial.figures[point] = _after_failed_rounds(trial, job)
                if "by site" in forms:
                    raise Broken(f"a failed round was repeated by site: {forms}")
                if point == "parts/stop" and "flat" not in forms:
                    raise Void(f"no failed round was repeated: {forms}")
            for words in ("averages by site: berlin 2, lyon 2", "averages flat: a round by site failed"):
                if not trial.said(trial.scheduler, words):
                    raise Broken(f"the log does not say: {words}")
            return trial


def _until_a_round_failed(trial: Trial, stopped: Process, point: str) -> None:
    trial.until(point, lambda: f"{HIT}{point}\n" in stopped.log.read_text())
    stopped_s = time.time()
    trial.until("a failed round", lambda: bool(trial.said(trial.scheduler, "failed: ", stopped_s)))


def _after_failed_rounds(trial: Trial, job: Job) -> list[str]:
    """The form of the round after each round by site that failed; "others" if its members are others."""
    told: dict[Round, Average] = {}
    failed: dict[Round, Average] = {}
    for path in sorted((trial.folder / "scheduler" / "jobs" / job.id).glob("brain-*.jsonl")):
        transcript = Transcript(path.read_text().splitlines())
        for replayed in replay(transcript, transcript.brain()):
            match replayed.recorded.happened:
                case Happened(event=RoundFailed(round=number)) if number in told and not told[number].ahead:
                    failed[number] = told[number]
            commands = [output.command for output in replayed.outputs if isinstance(output, Send)]
            told |= {command.round: command for command in commands if isinstance(command, Average)}
    found = []
    for number, before in failed.items():
        later = (told[other] for other in sorted(told) if other > number)
        then = next(after for after in later if (after.step, after.unit) == (before.step, before.unit))
        is_same = {member.peer for member in then.members} == {member.peer for member in before.members}
        if any(member.group for member in before.members):
            form = "by site" if any(member.group for member in then.members) else "flat"
            found.append(form if is_same else "others")
    return found


def neighbours_die_together(folder: Path, seed: str, long: bool) -> Trial:
    """F4: a sender that holds boundaries and its receiver at once; then the first and the last stage."""
    with Trial(folder, seed) as trial:
        peers = trial.add_servers(6)
        pairs = [(0, 1), (0, 2), (1, 2)] if long else [(0, 1)]
        for pair in pairs:
            job = trial.job(3, 30)
            trial.until_step(job, trial.rng.randint(2, 6))
            pools = trial.serving(job)
            victims = [trial.rng.choice(pools[stage]) for stage in pair]
            for victim in victims:
                trial.kill(victim)
            trial.heals(job)
            for victim in victims:
                trial.respawn(victim)
            trial.proves(job)
            trial.until_idle(victims)
            trial.until_free(peers)
        _tell_kills(trial, [])
        return trial


def a_stage_is_lost(folder: Path, seed: str, long: bool) -> Trial:
    """F3: all replicas of a stage; nothing commits meanwhile, then all stages go on from the newest checkpoint."""
    with Trial(folder, seed) as trial:
        trial.add_servers(4)
        # Two replicas each, or the two that are left would go on by themselves.
        job = trial.job(2, 200, checkpoint__every_steps=10, limits__min_replicas=2)
        trial.until_step(job, 25)
        trial.until("a checkpoint", lambda: trial.view(job).checkpoint_step > 0)
        victims = trial.serving(job)[1]
        for victim in victims:
            trial.kill(victim)
        trial.until("stalled", lambda: trial.view(job).state == "stalled")
        trial.until("gone back", lambda: "once it has peers" in trial.view(job).reason)
        view = trial.view(job)
        before = view.step
        if not any(victim in view.reason for victim in victims):
            raise Broken(f"the reason names no peer of the stage: {view.reason}")
        time.sleep(2.0)
        if trial.view(job).step != before or trial.view(job).state != "stalled":
            raise Broken("the job went on without one of the stages")
        for victim in victims:
            trial.respawn(victim)
        trial.until_step(job, before + 5)
        trial.proves(job, rollbacks=1)
        return trial


def fleet_halves_for_good(folder: Path, seed: str, long: bool) -> Trial:
    """Six of eight stage servers are gone, and nobody comes: four stages become two, without a person."""
    with Trial(folder, seed) as trial:
        peers = trial.add_servers(8)
        cut = {"config__num_hidden_layers": 12, "pipeline__recut": "stall", "limits__no_progress_s": 10.0}
        job = trial.job(4, 120 if long else 60, checkpoint__every_steps=10, **cut)
        trial.until_step(job, 15)
        trial.until("a checkpoint", lambda: trial.view(job).checkpoint_step > 0)
        for victim in trial.rng.sample(peers, 6):
            trial.kill(victim)
        lost_s = time.monotonic()
        trial.until("told", lambda: "goes on with 2 stages in" in trial.view(job).reason)
        trial.until("cut anew", lambda: sum(trial.metric("swarm_recuts_total").values()) == 1.0, 90.0)
        before = trial.view(job).step
        trial.until_step(job, before + 2)
        trial.figures["stood_still_s"] = round(time.monotonic() - lost_s, 1)
        trial.proves(job, rollbacks=1)
        return trial


def frozen_and_back(folder: Path, seed: str, long: bool) -> Trial:
    """F10: SIGSTOP for less than, about as long as and longer than the grace; the zombie is fenced when it wakes."""
    grace_s = 3.0
    times_s = [1.0, 3.0, 5.5, 6.0, 30.0] if long else [7.0]
    with Trial(folder, seed, grace_s=grace_s) as trial:
        peers = trial.add_servers(4)
        around: list[float] = []
        for frozen_s in times_s:
            job = trial.job(2, 60)
            trial.until_step(job, 3)
            victim = trial.rng.choice([peer for pool in trial.serving(job).values() for peer in pool])
            stopped_unix_s = time.time()
            with trial.frozen(victim):
                if frozen_s > 4.0:
                    trial.until(
                        "noticed",
                        lambda at=stopped_unix_s, peer=victim: bool(  # type: ignore[misc]
                            trial.said(trial.scheduler, f"{peer} (stage", at)
                        ),
                        10.0,
                    )
                    around.append(trial.said(trial.scheduler, f"{victim} (stage", stopped_unix_s)[0] - stopped_unix_s)
                time.sleep(max(0.0, stopped_unix_s + frozen_s - time.time()))
            trial.proves(job)
            trial.until_free(peers)
        trial.figures["noticed_s"] = [round(value, 2) for value in around]
        if around and max(around) > 4.0:
            raise Broken(f"a frozen stage server was noticed after {max(around):.1f} s")
        return trial


def overload(folder: Path, seed: str, long: bool) -> Trial:
    """F18: a window far too large for the machine; memory stays bounded and nothing is lost."""
    with Trial(folder, seed) as trial:
        trial.add_servers(2)
        batch = {"training__global_batch_sequences": 256, "training__microbatch_sequences": 1}
        job = trial.job(2, 4, pipeline__max_in_flight=4096, **batch)
        trial.proves(job)
        return trial


def everything_again(folder: Path, seed: str, long: bool) -> Trial:
    """F12: events, tensors and commands come two to five times, some much later; only the first changes anything."""
    late_s = 60.0 if long else 3.0
    with Trial(folder, seed, grace_s=10.0) as trial:
        module = f"tests.chaos.repeating_stage_server --late {late_s:g} --seed"
        started = [trial.start_server(number, module=f"{module} {number}") for number in range(4)]
        trial.servers |= {process.wait_ready()["peer"]: process for process in started}
        trial.until_free(list(trial.servers))
        job = trial.job(2, 500 if long else 60)
        if long:
            trial.until_step(job, 100)
            trial.restart_scheduler()
        trial.proves(job)
        ignored = sum(trial.metric("swarm_duplicates_discarded_total").values())
        counts: Counter[str] = Counter()
        for process in started:
            told = [line for line in whole_lines(process.log) if line.startswith(SAID)]
            counts.update(json.loads(told[-1].removeprefix(SAID)) if told else {})
        missing = REPEATED - set(counts)
        if missing or ignored < job.spec.training.steps:
            raise Void(f"not repeated: {missing}; {ignored:g} repetitions were ignored")
        trial.figures["repeated"] = dict(counts)
        return trial


def not_a_number(folder: Path, seed: str, long: bool) -> Trial:
    """F20: one gradient is not finite; its step is skipped everywhere, once, and training goes on."""
    with Trial(folder, seed) as trial:
        failing = f"tests.chaos.failing_stage_server --at nan --hit {3 * MICROBATCHES}"
        first = trial.start_server(0, "--stage", "0", module=failing)
        victim = first.wait_ready()["peer"]
        trial.servers[victim] = first
        trial.add_servers(1)
        job = trial.job(2, 10)
        view = trial.wait(job.id)
        if view.state != "succeeded":
            raise Broken(f"the job is {view.state}: {view.reason}")
        skipped = [row.step for row in trial.rows(job) if row.skip]
        if "failpoint hit: nan" not in first.log.read_text():
            raise Void("the gradient was not touched")
        if len(skipped) != 1:
            raise Broken(f"steps {skipped} were skipped, not one")
        trial.clean()
        return trial


# The network ---------------------------------------------------------------------------------------------------------


def partitions(folder: Path, seed: str, long: bool) -> Trial:
    """F8: links between peers cut in both directions and in one; a peer cut off from the scheduler, and from all."""
    with Relay(5, seed=Random(seed).getrandbits(32)) as relay, Trial.on_a_network(folder, seed, relay) as trial:
        peers = trial.add_servers(4)
        host = {peer: number + 1 for number, peer in enumerate(peers)}
        work = Work(trial, 2, 300 if long else 90, limits__min_replicas=2)
        healed: dict[str, float] = {}
        for name in ("peers", "one way", "scheduler", "all") if long else ("one way", "scheduler"):
            job = work.at_work(steps_left=30)
            pools = trial.serving(job)
            near, far = (trial.rng.choice(pools[stage]) for stage in (0, 1))
            before = relay.counts().get("cut", 0)
            # From the whole next stage: with one of its replicas alone, this one may have nothing to do just now.
            there = [(host[near], host[peer]) for peer in pools[1]]
            back = [(target, source) for source, target in there]
            others = [number for number in range(len(relay.hosts)) if number != host[far]]
            pairs = {
                "peers": [*there, *back],
                "one way": there,
                "scheduler": [(host[far], 0), (0, host[far])],
                "all": [(host[far], other) for other in others] + [(other, host[far]) for other in others],
            }[name]
            for source, target in pairs:
                relay.set(source, target, cut=True)
            trial.heals(job, steps=3)  # the rest goes on while the cut lasts
            with contextlib.suppress(Broken):
                trial.until("cut", lambda at=before: relay.counts().get("cut", 0) > at, 5.0)  # type: ignore[misc]
            for source, target in pairs:
                relay.set(source, target, cut=False)
            healed[name] = round(trial.heals(job), 2)
            if relay.counts().get("cut", 0) == before:
                raise Void(f"no packet met the cut ({name})")
            work.until_whole()
        trial.figures["healed_s"] = healed
        trial.figures["relay_cpu_s"] = round(relay.counts()["cpu_s"], 1)
        work.prove()
        return trial


def a_bad_network(folder: Path, seed: str, long: bool) -> Trial:
    """F11: every packet late by chance, so that they overtake one another; some lost, a quarter repeated."""
    with Relay(5, seed=Random(seed).getrandbits(32)) as relay, Trial.on_a_network(folder, seed, relay) as trial:
        trial.add_servers(4)
        relay.everywhere(delay_s=0.005, jitter_s=0.01, loss=0.01, duplicate=0.25)
        job = trial.job(2, 150 if long else 25)
        trial.proves(job)
        counts = relay.counts()
        trial.figures["packets"] = {name: int(count) for name, count in counts.items() if name != "cpu_s"}
        if min(counts.get(fate, 0) for fate in ("lost", "duplicated")) < 50:
            raise Void(f"too few packets met their fate: {counts}")
        return trial


def behind_nat(folder: Path, seed: str, long: bool) -> Trial:
    """Stage servers that nobody can dial, joined by token; the relay that carries most is killed."""
    with Relay(7, seed=Random(seed).getrandbits(32)) as network, Trial.on_a_network(folder, seed, network) as trial:
        trial.server_hosts, trial.before_servers = network.hosts[3:], [network.at(host) for host in range(3, 7)]
        for hidden in (5, 6):
            for other in range(7):
                network.set(other, hidden, closed=True)
        members: Any = members_pb2_grpc.MembersStub(trial.channel)  # type: ignore[no-untyped-call]

        def line(role: str) -> tuple[str, str]:
            return "--join", members.CreateToken(members_pb2.CreateTokenRequest(role=role, ttl_s=600, uses=1)).line

        relays = [
            Process.start(
                folder / f"relay-{host}.log",
                "swarm.relay",
                *("--listen", f"{network.hosts[host]}:7955", "--data-dir", str(folder / f"relay-{host}")),
                *("--http-port", "0", *line("relay")),
                before=network.at(host),
            )
            for host in (1, 2)
        ]
        try:
            for relay in relays:
                relay.wait_ready()
            for _ in range(2):
                trial.add_servers(1, *line("stage-server"))
            hidden_peers = [trial.add_servers(1, "--via-relay", *line("stage-server"))[0] for _ in range(2)]
            job = trial.job(2, 300 if long else 60)
            trial.until_step(job, 10)
            trial.until("relays carry", lambda: any(_relayed(trial, peer) for peer in hidden_peers), 15.0)
            relays[0].kill(signal.SIGKILL)
            trial.proves(job)
            if not network.counts().get("not let in"):
                raise Void("nobody tried to dial a hidden stage server")
            trial.figures["not_let_in"] = int(network.counts()["not let in"])
            return trial
        finally:
            for relay in relays:
                relay.stop()


def _relayed(trial: Trial, peer: str) -> bool:
    facts = trial.jobs.Explain(pb.ExplainRequest(about=peer), timeout=10).facts
    return any("through relay" in fact.text for fact in facts)


# One harm after the other --------------------------------------------------------------------------------------------


def harms_in_turn(folder: Path, seed: str, long: bool) -> Trial:
    """F8, F10, F11: corrupt frames, slow, cut off from a neighbour, frozen, killed, one after the other."""
    with Trial(folder, seed, grace_s=3.0) as trial:
        trial.add_servers(6, module=HARMED)
        job = trial.job(2, 600 if long else 250)
        trial.until_step(job, 3)
        healed_s = {}
        for fault in ("corrupt", "slow", "cut", "freeze", "kill"):
            trial.steps_on(job)
            pools = trial.serving(job)
            victim = trial.rng.choice([peer for pool in pools.values() if len(pool) > 1 for peer in pool])
            against = trial.rng.choice(pools[1 - next(stage for stage, pool in pools.items() if victim in pool)])
            match fault:
                case "corrupt":
                    with trial.harmed(victim, corrupt=8):
                        time.sleep(3.0)
                case "slow":
                    with trial.harmed(victim, slow=10.0):
                        time.sleep(8.0 if long else 4.0)
                case "cut":
                    address = next(peer.address for peer in trial.peers() if peer.id == against)
                    with trial.harmed(victim, cut=[against, address]):
                        time.sleep(8.0 if long else 4.0)
                case "freeze":
                    with trial.frozen(victim):
                        time.sleep(2.0)
                case _:
                    trial.kill(victim)
            healed_s[fault] = round(trial.heals(job), 2)
            if not 0 <= (open_ := trial.view(job).microbatches_in_flight) <= 3 * MICROBATCHES:
                raise Broken(f"{fault}: {open_} microbatches open")
        trial.figures |= {"healed_s": healed_s, "rerouted_s": trial.rerouted_s()}
        trial.proves(job)
        return trial


# The scheduler -------------------------------------------------------------------------------------------------------


def scheduler_restarts(folder: Path, seed: str, long: bool) -> Trial:
    """F5: kill -9 of the scheduler again and again; epochs rise, nothing is rolled back, stepping soon after."""
    restarts, pause_s = (9, 20.0) if long else (2, 2.0)
    with Trial(folder, seed, grace_s=10.0) as trial:
        trial.add_servers(4)
        work = Work(trial, 2, 300 if long else 150)
        epochs, back = [], []
        for _ in range(restarts):
            job = work.at_work(steps_left=60)
            epochs = epochs or [_epoch(trial)]
            trial.steps_on(job)
            before = trial.view(job).step
            trial.scheduler.kill()
            died_s = time.monotonic()
            trial.restart_scheduler()
            ready_s = time.monotonic()
            if trial.view(job).step < before:
                raise Broken("steps were rolled back")
            trial.heals(job, steps=1)
            back.append((ready_s - died_s, time.monotonic() - ready_s))
            epochs.append(_epoch(trial))
            time.sleep(pause_s * trial.rng.uniform(0.5, 1.0))
        if epochs != sorted(set(epochs)):
            raise Broken(f"epochs do not rise: {epochs}")
        trial.figures["scheduler_start_s"] = [round(start, 2) for start, _ in back]
        trial.figures["restart_to_commit_s"] = [round(again, 2) for _, again in back]
        if max(again for _, again in back) > COMMIT_S_MAX:
            raise Broken("no commit within 10 s of a restart")
        work.prove()
        return trial


def scheduler_dies_at_exact_points(folder: Path, seed: str, long: bool) -> Trial:
    """F2: the scheduler dies right before and right after a row is written."""
    with Trial(folder, seed, grace_s=10.0) as trial:
        trial.add_servers(4)
        job = trial.job(2, 60)
        trial.until_step(job, 2)
        for point in ("Averaged/row", "row/Commit"):
            trial.steps_on(job)
            hit = trial.rng.randint(3, 8)
            trial.restart_scheduler(module=f"tests.chaos.failing_scheduler --at {point} --hit {hit}")
            trial.until_hit(trial.scheduler, point)
            trial.restart_scheduler()
            trial.heals(job)
        trial.proves(job)
        return trial


def moves_under_churn(folder: Path, seed: str, long: bool) -> Trial:
    """F25: one of stage 1 is four times as slow for a while; replicas move there while others die and come back."""
    with Trial(folder, seed) as trial:
        trial.add_servers(4)
        (slow,) = trial.add_servers(1, "--stage", "1", module=HARMED)
        trial.restart_scheduler(module="tests.chaos.failing_scheduler --at never/moves --hit 1")
        work = Work(trial, 2, 300)
        kills = 12 if long else 2
        while len(trial.kills) < kills or not trial.said(trial.scheduler, "moves to stage"):
            job = work.at_work()
            with trial.harmed(slow, slow=4.0):
                time.sleep(2.0)
                trial.heals(job)
            if len(trial.kills) >= 3 * kills:
                raise Void("nobody moved")
            pools = trial.serving(job)
            victims = [peer for pool in pools.values() if len(pool) > 1 for peer in pool if peer != slow]
            if trial.view(job).state != "running" or not victims:
                continue
            victim = trial.rng.choice(victims)
            trial.kill(victim)
            trial.heals(job, steps=1)
            trial.respawn(victim).wait_ready()
            time.sleep(trial.rng.uniform(0.0, 1.0))  # the next may meet it in the middle of its joining
        work.prove()
        _tell_kills(trial, [])
        trial.figures["moves"] = len(trial.said(trial.scheduler, "moves to stage"))
        return trial


def two_schedulers(folder: Path, seed: str, long: bool) -> Trial:
    """F6: a second scheduler on the same data refuses, and the job does not notice."""
    with Trial(folder, seed) as trial:
        trial.add_servers(2)
        job = trial.job(2, 150)
        trial.until_step(job, 3)
        second = Process.start(
            folder / "second.log",
            "scheduler",
            *("--listen", "127.0.0.1:0", "--http-port", "0", "--broker", "none"),
            *("--data-dir", str(folder / "scheduler")),
        )
        code = second.child.wait(timeout=60)
        second.stop()
        if code == 0 or "error" not in second.log.read_text():
            raise Broken(f"the second scheduler ended with {code}")
        if trial.view(job).state != "running":
            raise Void("the job had ended before the second scheduler was there")
        trial.proves(job)
        return trial


def saves_while_killed(folder: Path, seed: str, long: bool) -> Trial:
    """F14 on processes: the scheduler dies while checkpoints are written; every one that is listed verifies."""
    with Trial(folder, seed, grace_s=10.0) as trial:
        trial.add_servers(4)
        job = trial.job(2, 600 if long else 120, checkpoint__every_steps=1)
        trial.until_step(job, 3)
        for _ in range(8 if long else 2):
            trial.steps_on(job)
            time.sleep(trial.rng.uniform(0.0, 0.3))
            trial.restart_scheduler()
            trial.heals(job)
            listed = trial.jobs.Checkpoints(pb.CheckpointsRequest(job=job.id, verify=True), timeout=60).checkpoints
            bad = [checkpoint.step for checkpoint in listed if checkpoint.fault]
            if not listed or bad:
                raise Broken(f"checkpoints of steps {bad} of {len(listed)} do not verify")
        trial.proves(job)
        return trial


# Broker, disk --------------------------------------------------------------------------------------------------------


def broker_killed(folder: Path, seed: str, long: bool) -> Trial:
    """F7: the broker dies, comes back empty; training does not notice."""
    port = free_port()
    broker = Process.start(folder / "broker.log", f"tests.chaos.broker {port}")
    broker.wait_ready()
    try:
        with Trial(folder, seed, broker=f"mqtt://127.0.0.1:{port}") as trial:
            trial.add_servers(4)
            job = trial.job(2, 400 if long else 120)
            trial.until_step(job, 3)
            for down_s in (1.0, 20.0) if long else (2.0,):
                trial.steps_on(job)
                broker.kill()
                broker.stop()
                died_unix_s = time.time()
                trial.steps_on(job, steps=3)
                time.sleep(max(0.0, died_unix_s + down_s - time.time()))
                broker = Process.start(folder / "broker.log", f"tests.chaos.broker {port}")
                broker.wait_ready()
                trial.steps_on(job, steps=2)
            rows = trial.proves(job)
            trial.figures["longest_gap_s"] = round(max(gaps_s(rows)), 2)
            return trial
    finally:
        broker.stop()


def disk_full(folder: Path, seed: str, long: bool) -> Trial:
    """F13: no byte left for rows and checkpoints; commits stop, servers do not, and it goes on when there is room."""
    data = folder / "scheduler"
    data.mkdir()
    trial = Trial(folder, seed)
    mount = 'mount -t tmpfs -o size=64m tmpfs "$1" && shift && exec "$@"'
    trial.before_scheduler = ("unshare", "--mount", "sh", "-c", mount, "sh", str(data))
    with trial:
        trial.inside = Path(f"/proc/{trial.scheduler.child.pid}/root")
        servers = trial.add_servers(4)
        job = trial.job(2, 400 if long else 150, checkpoint__every_steps=5)
        trial.until_step(job, 12)
        filler = trial.inside / data.relative_to("/") / "filler"
        for full_s in (1.0, 8.0) if long else (3.0,):
            trial.steps_on(job)
            _fill(filler)
            time.sleep(full_s)
            view = trial.view(job)
            if view.state != "running":
                raise Broken(f"with the disk full the job is {view.state}: {view.reason}")
            filler.unlink()
            trial.heals(job)
        if any(trial.servers[peer].child.poll() is not None for peer in servers):
            raise Broken("a stage server ended")
        if not any(trial.said(trial.scheduler, words) for words in ("waits for its row", "could not be written")):
            raise Void("nothing was written while the disk was full")
        trial.proves(job)
        return trial


def _fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass


# What they measure ---------------------------------------------------------------------------------------------------


def _tell_kills(trial: Trial, until_commit_s: list[float]) -> None:
    rerouted = trial.rerouted_s()
    trial.figures["kills"] = len(trial.kills)
    trial.figures["kill_to_reroute_s"] = {
        "p50": round(percentile(rerouted, 0.5), 3),
        "p99": round(percentile(rerouted, 0.99), 3),
    }
    if until_commit_s:
        trial.figures["kill_to_commit_s"] = _spread(until_commit_s)


def _spread(values: list[float]) -> dict[str, float]:
    return {"p50": round(percentile(values, 0.5), 2), "p99": round(percentile(values, 0.99), 2)}


def _epoch(trial: Trial) -> int:
    return int(trial.jobs.Version(pb.VersionRequest(), timeout=10).epoch)


SCENARIOS = [
    Scenario("F1-lives", "kill -9 while another replica lives", kills_while_another_lives, short=False),
    Scenario("F1", "kill -9 and respawn into the running job", kills_and_respawns, short=False),
    Scenario("F1-F10", "death, exact point, zombie, dead scheduler in turn, of a narrow model", harm_after_harm),
    Scenario("F2-server", "a stage server dies at each exact point", deaths_at_exact_points, short=False),
    Scenario("F2-scheduler", "the scheduler dies around the row", scheduler_dies_at_exact_points, short=False),
    Scenario("F3", "all replicas of a stage are lost", a_stage_is_lost, short=False),
    Scenario("halves", "fleet halves for good", fleet_halves_for_good, short=False),
    Scenario("F4", "two neighbours die together", neighbours_die_together, short=False),
    Scenario("F5", "kill -9 of the scheduler, again and again", scheduler_restarts, short=False),
    Scenario("F6", "a second scheduler on the same data", two_schedulers, short=False),
    Scenario("F7", "the broker dies and comes back empty", broker_killed, short=False),
    Scenario("F8", "links cut both ways, one way, from the scheduler, from all", partitions, network=True),
    Scenario("F11", "loss, repetition, reordering", a_bad_network, network=True, short=False),
    Scenario("relay", "stage servers behind a NAT, a relay is killed", behind_nat, network=True, short=False),
    Scenario("F10-frozen", "SIGSTOP around the grace", frozen_and_back, short=False),
    Scenario("harms", "corrupt, slow, cut off, frozen, killed in turn", harms_in_turn, short=False),
    Scenario("F12", "all that is said comes again", everything_again, short=False),
    Scenario("F13", "the scheduler's disk is full", disk_full, short=False),
    Scenario("F14", "the scheduler dies while it saves", saves_while_killed, short=False),
    Scenario("F18", "a window far too large", overload, short=False),
    Scenario("F20", "a gradient that is not a number", not_a_number),
    *(
        one
        for mode, name in (("diloco", "islands"), ("streaming", "streaming"), ("gaia", "gaia"))
        for one in (
            Scenario(
                f"{name}-kill",
                f"an island is killed whole, and its site comes back ({mode})",
                partial(islands.an_island_is_killed_whole, mode=mode),
                short=False,
            ),
            Scenario(
                f"{name}-cut",
                f"sites cut apart, then one from all ({mode})",
                partial(islands.an_island_is_cut_off, mode=mode),
                network=True,
                short=False,
            ),
            Scenario(
                f"{name}-late",
                f"an island is stopped, the scheduler dies with one late, a late one is killed ({mode})",
                partial(islands.an_island_is_late, mode=mode),
                short=False,
            ),
            Scenario(
                f"{name}-rounds",
                f"the scheduler dies at each edge of an outer round ({mode})",
                partial(islands.the_scheduler_dies_in_an_exchange, mode=mode),
                short=False,
            ),
        )
    ),
    Scenario(
        "islands-troubles",
        "an island is late, and then slow, or leaves; a pause or the end is asked for meanwhile",
        partial(islands.an_island_is_late, troubles=("slow", "pause", "leaves")),
        short=False,
    ),
    Scenario(
        "islands-cut-late",
        "sites cut apart, then one from all, where exchanges do not wait",
        partial(islands.an_island_is_cut_off, patience=0.5),
        network=True,
        short=False,
    ),
    Scenario(
        "islands-three",
        "one of three is killed again and again, the scheduler meanwhile",
        islands.one_of_three_is_killed_again_and_again,
        short=False,
    ),
    Scenario("sites", "a carrier dies or stops in a round by site", a_carrier_is_harmed, network=True, short=False),
    Scenario("F25", "peers move while others die", moves_under_churn, short=False),
]
