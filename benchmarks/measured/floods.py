"""What floods of connections cost a scheduler: TLS handshakes and slow requests at each of its ports.

    python -m benchmarks.measured.floods [--seconds 10] [--rate 1000]
    python -m benchmarks.measured.floods --training [--seconds 10] [--rate 1000] [--rounds 5]

A flood sends the first message of a TLS handshake, which makes the server sign, and leaves; or it opens requests and
never ends them. Meanwhile a person asks for the version and an orchestrator probes /healthz. The processor time of the
scheduler is the measure: unlike rates, it hardly depends on what else the machine does.

With --training a job trains meanwhile, and five ports of the swarm are flooded in turns with quiet. The flood comes
from a process of the least priority, so what is lost is what those who are flooded spend on it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.wire import jobs_pb2 as pb
from tests.support.floods import Flood, client_hello, flooding
from tests.support.processes import Cluster
from tests.support.simulated import Tokens, small_spec, write_text

PORTS = 5


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds_of(what: Callable[[], object]) -> float:
    began_s = time.monotonic()
    what()
    return time.monotonic() - began_s


def measure(cluster: Cluster, name: str, flood: Flood | None, seconds: float) -> None:
    http = cluster.scheduler.ready["http"]
    began_s, before_s = time.monotonic(), cpu_s(cluster.scheduler.child.pid)
    attack = threading.Thread(target=lambda: flood.run(began_s + seconds) if flood else None)
    attack.start()
    calls: list[float] = []
    probes: list[float] = []
    failed = 0
    while time.monotonic() < began_s + seconds:
        calls.append(seconds_of(lambda: cluster.jobs.Version(pb.VersionRequest(), timeout=10)))
        try:
            probes.append(seconds_of(lambda: urllib.request.urlopen(f"http://{http}/healthz", timeout=5).read()))
        except OSError:
            failed += 1
        time.sleep(0.05)
    attack.join()
    spent_s, made = cpu_s(cluster.scheduler.child.pid) - before_s, flood.made if flood else 0
    answered = flood.answered if flood else 0
    each, median, worst, probe = (
        1000 * value for value in (spent_s / max(1, made), statistics.median(calls), max(calls), max(probes, default=0))
    )
    print(
        f"{name:30} {made:7} {answered:8} {spent_s:7.2f} {each:8.3f} {median:8.1f} {worst:8.1f} {probe:9.1f} {failed:6}"
    )


def train(folder: Path, seconds: float, rate: float, rounds: int) -> None:
    """Steps a second of a job of two stages, without and with the flood, in turns."""
    spec = small_spec(write_text(folder), pipeline__stages=2, training__steps=10**6, limits__min_replicas=1)
    spec = resolve(spec, Basis(ByteTokenizer.vocabulary_size))
    tokens = Tokens.make(folder / "tokens", spec)
    with Cluster(folder) as cluster:
        cluster.add_servers(2)
        ready = cluster.scheduler.ready
        ports = [ready["address"], ready["joins"], ready["http"], *(peer.address for peer in cluster.peers())]
        assert len(ports) == PORTS
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 20)

        def steps_per_s() -> float:
            began_s, first = time.monotonic(), cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=10).step
            time.sleep(seconds)
            last = cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=10).step
            return float(last - first) / (time.monotonic() - began_s)

        shares = []
        print("steps/s: quiet, flooded, share")
        for _ in range(rounds):
            quiet = steps_per_s()
            with flooding(rate / PORTS, ports):
                flooded = steps_per_s()
            quiet = (quiet + steps_per_s()) / 2
            shares.append(flooded / quiet)
            print(f"{quiet:.2f} {flooded:.2f} {shares[-1]:.1%}", flush=True)
        print(f"median {statistics.median(shares):.1%}, from {min(shares):.1%} to {max(shares):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--training", action="store_true", help="steps/s of a job, quiet and flooded in turns")
    parser.add_argument("--rounds", type=int, default=5, help="with --training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWARM_PROFILES"] = f"{folder}/profiles"
        if options.training:
            train(Path(folder), options.seconds, options.rate, options.rounds)
            return
        with Cluster(Path(folder)) as cluster:
            ready = cluster.scheduler.ready
            grpc, https = client_hello("h2"), client_hello()
            print(f"{'flood':30} {'made':>7} {'answered':>8} {'cpu s':>7} {'ms each':>8} ", end="")
            print(f"{'call ms':>8} {'worst':>8} {'probe':>9} {'failed':>6}")
            measure(cluster, "none", None, options.seconds)
            for name, flood in (
                ("handshakes at --listen", Flood(ready["address"], options.rate, grpc)),
                ("handshakes at --join-listen", Flood(ready["joins"], options.rate, https)),
                ("slow requests at --join-listen", Flood(ready["joins"], options.rate, https, is_slow=True)),
                ("slow requests at /metrics", Flood(ready["http"], options.rate, b"", is_slow=True)),
            ):
                measure(cluster, name, flood, options.seconds)


if __name__ == "__main__":
    main()
