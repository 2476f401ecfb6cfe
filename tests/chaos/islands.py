"""What is done to jobs with islands: one is killed whole, cut off, stopped, the scheduler dies in an exchange, or both.

The proof is the twin's: one process repeats what became of the islands (`swarm train-local --outer-log`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from random import Random

import torch

from client.cli import run
from swarm.job.outer_log import OUTER_LOG, OuterRecord, read
from swarm.reference.trainer import Trained, train_local
from swarm.wire import jobs_pb2 as pb
from tests.chaos import failing_scheduler
from tests.chaos.relay import Relay
from tests.chaos.trial import Broken, Job, Trial, Void

SITES = ("lyon", "berlin")
CUT_S = 60.0
STOPPED_S = 8.0  # longer than an exchange takes, and than the grace of the scheduler
LATE = ("goes on", "scheduler", "killed")  # what becomes of an island that is late, in turn
RHYTHMS: dict[str, dict[str, object]] = {  # of each averaging.mode: an exchange behind every fourth step
    "diloco": {"outer__every_steps": 4},
    "streaming": {"outer__every_steps": 8, "outer__fragments": 2},
    "gaia": {"outer__every_steps": 4, "outer__threshold": 0.3},
}


def job_of(trial: Trial, steps: int, mode: str, islands: int = len(SITES), **others: object) -> Job:
    """A job of islands of two stages, in which each has two microbatches of a step."""
    changes = {
        "islands__count": islands,
        "averaging__mode": mode,
        "training__global_batch_sequences": 4 * islands,
        **RHYTHMS[mode],
        **others,
    }
    return trial.job(2, steps, **changes)


def islands_of(trial: Trial, job: Job) -> list[set[str]]:
    """The stage servers that serve each island."""
    found: list[set[str]] = [set() for _ in range(job.spec.island_count)]
    for peer in trial.peers():
        if peer.job == job.id and peer.island:
            found[int(peer.island)].add(peer.id)
    return found


def proves(trial: Trial, job: Job) -> tuple[Trained, tuple[OuterRecord, ...]]:
    """The job ends with the weights of one process that repeats its log: what that made, and the log's exchanges."""
    view = trial.wait(job.id, 900.0)
    if view.state != "succeeded":
        raise Broken(f"the job is {view.state}: {view.reason}")
    model = trial.folder / f"model-{job.id}"
    if run(["pull", job.id, str(model), "--scheduler", trial.address]) != 0:
        raise Broken("the model cannot be pulled")
    path = model / OUTER_LOG
    log = read(path.read_bytes()) if path.exists() else ()
    torch.set_num_threads(1)
    expected = train_local(job.spec, job.tokens.batches(job.spec), device=torch.device("cpu"), log=log)
    if (view.weights_sha256, view.loss) != (expected.sha256, expected.losses[-1]):
        raise Broken("the weights or the loss are not those of one process with the outer log")
    trial.microbatches += job.spec.training.steps * job.spec.training.microbatches
    trial.clean()
    return expected, tuple(record for record in log if isinstance(record, OuterRecord))


def an_island_is_killed_whole(folder: Path, seed: str, long: bool, mode: str = "diloco") -> Trial:
    """kill -9 of all stage servers of an island; the other goes on, and the island comes back with its site."""
    with Trial(folder, seed) as trial:
        sites = {peer: site for site in SITES for peer in trial.add_servers(4 if long else 2, "--site", site)}
        job = job_of(trial, 400 if long else 120, mode)
        trial.until_step(job, 6)
        before = islands_of(trial, job)
        if any(len({sites[peer] for peer in members}) != 1 for members in before):
            raise Broken(f"an island has two sites: {before}")
        lost = trial.rng.randrange(len(SITES))
        for peer in before[lost]:
            trial.servers[peer].kill(signal.SIGKILL)
        trial.until("lost", lambda: bool(trial.said(trial.scheduler, f"island {lost} is lost")), 60.0)
        trial.heals(job)
        for peer in before[lost]:
            trial.respawn(peer, "--site", sites[peer])
        trial.until(
            "an island is its site's again",  # whichever, as the other site may have made two of its own meanwhile
            lambda: before[lost] in islands_of(trial, job) or trial.view(job).state != "running",
            300.0,
        )
        if trial.view(job).state != "running":
            raise Void("the job had ended before the island was back")
        _, log = proves(trial, job)
        trial.figures["without_it"] = sum(record.islands != (0, 1) for record in log)
        if not trial.figures["without_it"] or not any(record.begins for record in log):
            raise Broken(f"the log does not say that the island was away and began anew: {log}")
        return trial


def an_island_is_cut_off(folder: Path, seed: str, long: bool, mode: str = "diloco", patience: object = "none") -> Trial:
    """The links between two sites are cut; then those of one site to all others, the scheduler too.

    With `patience` an island is late while it is cut off, for longer than the grace of the scheduler, and merges when
    it can fetch what the other made.
    """
    cut_s = CUT_S if long else 8.0
    hosts = [[1, 2], [3, 4]]  # of each site
    with Relay(5, seed=Random(seed).getrandbits(32)) as relay, Trial.on_a_network(folder, seed, relay) as trial:
        for site in SITES:
            trial.add_servers(2, "--site", site)
        job = job_of(trial, 400, mode, outer__patience=patience)
        trial.until_step(job, 2)
        for name, others in (("sites", hosts[0]), ("all", [0, *hosts[0]])):
            trial.steps_on(job, 5)
            before = relay.counts().get("cut", 0)
            pairs = [(host, other) for host in hosts[1] for other in others]
            for one, other in pairs:
                relay.between(one, other, cut=True)
            time.sleep(cut_s)
            for one, other in pairs:
                relay.between(one, other, cut=False)
            trial.figures[f"healed_s_{name}"] = round(trial.heals(job), 2)
            if relay.counts().get("cut", 0) == before:
                raise Void(f"no packet met the cut ({name})")
            if name == "sites" and patience != "none" and not trial.said(trial.scheduler, "is late"):
                raise Void("no island was late while the sites were cut apart")
        lost = trial.said(trial.scheduler, "is lost")
        _, log = proves(trial, job)
        if patience != "none" and lost:
            raise Broken(f"an island was lost that may be late: {lost}")
        if not log or (patience == "none" and not lost):
            raise Void("no island was lost, or late, while it was cut off from all")
        return trial


def an_island_is_late(
    folder: Path, seed: str, long: bool, mode: str = "diloco", troubles: Sequence[str] = LATE
) -> Trial:
    """An island is stopped, the others exchange without it, and then it goes on; again, with these troubles.

    It goes on with a tenth of its speed, or leaves; the scheduler is killed meanwhile, or a pause is asked for; or the
    island is killed before it has merged what the others made. Such a job can be cancelled, too.
    """
    with Trial(folder, seed) as trial:
        site_of = {peer: site for site in SITES for peer in trial.add_servers(2, "--site", site)}
        job = job_of(trial, 400 if long else 200, mode, outer__patience=0.5)
        trial.until_step(job, 6)
        left = [*troubles]
        for _ in range(10):
            trial.steps_on(job, 10)  # a scheduler has no patience until it knows how long a period takes
            late = trial.rng.randrange(len(SITES))
            members, then, stopped_s = islands_of(trial, job)[late], "", time.time()
            for peer in members:
                trial.servers[peer].kill(signal.SIGSTOP)
            try:
                if not _becomes_late(trial, late, stopped_s):
                    continue  # it was about to merge the exchange before, for which the others wait
                if trial.said(trial.scheduler, f"island {late} is lost", stopped_s):
                    raise Broken("an island was lost while it was stopped")
                then = left.pop(0)
                if then == "scheduler":
                    trial.restart_scheduler()
                if then == "pause":
                    trial.jobs.Pause(pb.JobRequest(job=job.id), timeout=60)
                time.sleep(0.5 if then == "pause" else STOPPED_S)  # a pause waits for one that is silent for the grace
            finally:
                for peer in members:
                    trial.servers[peer].kill(signal.SIGKILL if then == "killed" else signal.SIGCONT)
            if then == "slow":
                _slow_down(trial, members)
            if then == "pause":
                trial.until("paused", lambda: trial.view(job).state == "paused")
                trial.jobs.Resume(pb.ResumeRequest(job=job.id), timeout=60)
            for peer in members if then == "leaves" else ():
                trial.servers[peer].terminate()
            for peer in members if then in ("killed", "leaves") else ():
                trial.respawn(peer, "--site", site_of[peer])
            trial.figures[f"healed_s_{then.replace(' ', '_')}"] = round(trial.heals(job), 2)
            if not left:
                break
        _, log = proves(trial, job)
        trial.figures["late"] = sum(bool(record.late) for record in log)
        if left or trial.figures["late"] < 3:
            raise Void(f"islands were late at other moments than these: {left}, {log}")
        if troubles != LATE:
            _is_cancelled(trial, job_of(trial, 400, mode, outer__patience=0.5), list(site_of))
        return trial


def _slow_down(trial: Trial, members: Collection[str]) -> None:
    """A tenth of the time of these stage servers is theirs, for a while."""
    for _ in range(30):
        for number, seconds in ((signal.SIGSTOP, 0.45), (signal.SIGCONT, 0.05)):
            for peer in members:
                trial.servers[peer].kill(number)
            time.sleep(seconds)


def _is_cancelled(trial: Trial, job: Job, peers: list[str]) -> None:
    """The job is cancelled while an island is late, and all are free."""
    trial.until_step(job, 20)
    members, stopped_s = islands_of(trial, job)[0], time.time()
    for peer in members:
        trial.servers[peer].kill(signal.SIGSTOP)
    is_late = _becomes_late(trial, 0, stopped_s)
    trial.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=60)
    for peer in members:
        trial.servers[peer].kill(signal.SIGCONT)
    trial.until("cancelled", lambda: trial.view(job).state == "cancelled")
    trial.until_free(peers)
    trial.clean()
    trial.figures["cancelled_late"] = is_late


def _becomes_late(trial: Trial, island: int, since_s: float) -> bool:
    """Whether a stopped island is late soon."""
    while time.time() < since_s + 10.0:
        if trial.said(trial.scheduler, f"island {island} is late", since_s):
            return True
        time.sleep(0.1)
    return False


def the_scheduler_dies_in_an_exchange(folder: Path, seed: str, long: bool, mode: str = "diloco") -> Trial:
    """The scheduler dies at each edge of an outer round; nothing is lost, and the twin needs no log."""
    points = list(failing_scheduler.OUTER_POINTS)
    if not long:
        points = Random(seed).sample(points, 1)
    with Trial(folder, seed, grace_s=10.0) as trial:
        for site in SITES:
            trial.add_servers(2, "--site", site)
        job = job_of(trial, 160 if long else 60, mode)
        trial.until_step(job, 2)
        for point in points:
            trial.steps_on(job)
            _scheduler_that_dies(trial, point)
            _dies_and_is_back(trial, point)
            trial.heals(job)
            if trial.said(trial.scheduler, "is lost"):
                raise Broken(f"an island was lost with the scheduler ({point})")
        proves(trial, job)
        trial.figures["points_hit"] = len(points)
        return trial


def one_of_three_is_killed_again_and_again(folder: Path, seed: str, long: bool, mode: str = "diloco") -> Trial:
    """One of three islands is killed whole, and comes back; meanwhile the scheduler dies in each phase of a round.

    It dies once while two go on without the third, and once while that one begins anew.
    """
    sites = (*SITES, "oslo")
    points = list(failing_scheduler.OUTER_POINTS)
    Random(seed).shuffle(points)
    with Trial(folder, seed, grace_s=10.0) as trial:
        site_of = {peer: site for site in sites for peer in trial.add_servers(2, "--site", site)}
        job = job_of(trial, 300 if long else 120, mode, len(sites))
        trial.until_step(job, 6)
        deaths = len(points) if long else 1
        for at in range(deaths):
            lost = trial.rng.randrange(len(sites))
            members = islands_of(trial, job)[lost]
            _scheduler_that_dies(trial, points[at])
            killed_unix_s = time.time()
            for peer in members:
                trial.servers[peer].kill(signal.SIGKILL)
            _dies_and_is_back(trial, points[at])
            said = f"island {lost} is lost"
            trial.until("lost", lambda: bool(trial.said(trial.scheduler, said, killed_unix_s)))  # noqa: B023
            trial.heals(job)
            again = points[(at + 1) % len(points)]
            _scheduler_that_dies(trial, again)
            for peer in members:
                trial.respawn(peer, "--site", site_of[peer])
            _dies_and_is_back(trial, again)
            trial.until("three islands again", lambda: members in islands_of(trial, job), 120.0)  # noqa: B023
            trial.heals(job)
        _, log = proves(trial, job)
        begun = sum(len(record.begins) for record in log)
        if begun < deaths:
            raise Broken(f"islands began anew {begun} times: {log}")
        trial.figures |= {"begun_anew": begun, "without_one": sum(len(record.islands) == 2 for record in log)}
        return trial


def _scheduler_that_dies(trial: Trial, point: str) -> None:
    """Put one in the place of the scheduler that dies when it comes to a phase of a round, soon."""
    hit = trial.rng.randint(1, 3)
    trial.restart_scheduler(module=f"tests.chaos.failing_scheduler --at {point} --hit {hit}")


def _dies_and_is_back(trial: Trial, point: str) -> None:
    trial.until_hit(trial.scheduler, point)
    trial.restart_scheduler()
