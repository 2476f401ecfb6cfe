"""How long an averaging round takes, beside gloo's all-reduce between the same processes.

    python -m benchmarks.measured.averaging [--members 4] [--mib 16] [--rounds 9]
    python -m benchmarks.measured.averaging --access 100,100,100,25 --mib 4
    python -m benchmarks.measured.averaging --sites 2,2 --access 50,50 --mib 4

Each member is a process that has both: a gloo process group, and what a stage server averages with, over gRPC. They
take turns. A way's seconds are from the moment when the first member begins to the moment when the last one has the
mean. Both must give the same means. The scheduler's rule shares the slices out, by the rates that members have measured
in the rounds before: eight of these are not counted, so that it can learn.

`--access` puts each member at a host of its own, a network namespace which can send and receive so many Mbit/s, with a
round-trip time of `--rtt` ms between any two. That needs root. With `--sites` the hosts are sites of so many members,
and rounds by site stand beside flat ones in place of gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import Fleet, Hosts
from scheduler.brain.commit.slices import SliceShares, plan_round
from scheduler.brain.inputs import ReplicaRecord
from stage_server.device import ThreadDevice
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.all_reduce import Deadline, Reduction, run_round
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.process.malloc import tune_malloc
from swarm.rpc.channel import bind, new_server
from swarm.rpc.links.peer_service import add_peer_service
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.types import JobId, PeerId, Round, UnitName
from swarm.wire.messages import Average, ParameterNorm, Slice, TensorHeader
from tests.chaos.relay import Relay, why_not

WAYS, FORMS = ("gloo", "ours"), ("by site", "flat")
JOB, UNIT = JobId("bench"), UnitName("stage-0")
TOKENS = 1000
ROUND_S_MAX = 60.0
LEARNING_ROUNDS = 8


def main() -> None:
    if sys.argv[1:2] == ["member"]:
        tune_malloc()
        asyncio.run(_Member(*sys.argv[2:]).serve())
        return
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as name, _hosts(options) as hosts:
        seconds = _measure(options, Path(name), hosts)
    if options.output == "json":
        print(json.dumps({"options": vars(options), "load": load, "seconds": seconds}, indent=1))
        return
    for way in seconds:
        print(f"{way}: {median(seconds[way]):.4f} s ({min(seconds[way]):.4f}-{max(seconds[way]):.4f})")
    first, second = seconds
    print(f"{second} / {first}: {median(b / a for a, b in zip(*seconds.values(), strict=True)):.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--mib", type=float, default=16.0, help="of float32 gradients")
    parser.add_argument("--rounds", type=int, default=9, help="measured ones of each way")
    parser.add_argument("--access", type=lambda text: [float(word) for word in text.split(",")], default=[])
    parser.add_argument("--sites", type=lambda text: [int(size) for size in text.split(",")], default=[])
    parser.add_argument("--rtt", type=float, default=2.0, help="ms, with --access")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each member")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    options.members = sum(options.sites) or len(options.access) or options.members
    if options.sites and len(options.access) != len(options.sites):
        parser.error("--sites: --access says what each of them can send")
    if options.members < 2:
        parser.error("with one member there is nothing to average: --members 2 or more")
    if options.access and (lack := why_not()):
        parser.error(f"--access: {lack}")
    return options


@contextlib.contextmanager
def _hosts(options: argparse.Namespace) -> Iterator[Hosts]:
    if not options.access:
        yield Hosts()
        return
    with Relay(len(options.access), seed=0) as relay:
        relay.everywhere(delay_s=options.rtt / 2e3)
        for host, mbit_per_s in enumerate(options.access):
            relay.access(host, mbit_per_s * 1e6 / 8.0, mbit_per_s * 1e6 / 8.0)
        yield Hosts(relay)


class _Rule:
    """The scheduler's rule for slices, without the scheduler."""

    def __init__(self, members: int) -> None:
        self._names = names_of(members)
        state: Any = Namespace(
            settings=Namespace(recount=0.0, second_owner=0.0, clips=False),
            pool=self._names,
            outbox=Namespace(note=lambda _, text: print(text, file=sys.stderr)),
        )
        self._shares = SliceShares(state)

    def shares(self, number: int) -> list[float] | None:
        """Those of the next round; None: equal ones."""
        return self._shares.plan(UNIT, Round(1, number), self._names)

    def learn(self, number: int, reports: Sequence[tuple[float, float, float]]) -> None:
        """What the members said of the round: its seconds, and bytes per second up and down."""
        rates = {name: min(up, down) for name, (_, up, down) in zip(self._names, reports, strict=True)}
        self._shares.averaged(UNIT, Round(1, number), rates, median(took_s for took_s, *_ in reports))


def names_of(members: int) -> list[PeerId]:
    return [PeerId(f"member-{number}") for number in range(members)]


def _measure(options: argparse.Namespace, folder: Path, hosts: Hosts) -> dict[str, list[float]]:
    ways = FORMS if options.sites else WAYS
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    rule = _Rule(options.members)
    site_of = [site for site, size in enumerate(options.sites) for _ in range(size)]
    host_of = site_of or range(options.members)
    with Fleet(folder) as fleet:
        members = [
            fleet.start(
                f"member-{number}",
                "benchmarks.measured.averaging",
                *("member", str(number), str(options.members), str(folder / "rendezvous")),
                *(hosts.address(host_of[number]), str(round(options.mib * (1 << 18))), str(options.threads)),
                before=hosts.at(host_of[number]),
                GLOO_SOCKET_IFNAME=hosts.device,
            )
            for number in range(options.members)
        ]

        def ask(words: Any) -> list[Any]:
            for member in members:
                assert member.stdin is not None
                member.stdin.write(json.dumps(words) + "\n")
                member.stdin.flush()
            return [json.loads(fleet.line(member)) for member in members]

        addresses = [json.loads(fleet.line(member)) for member in members]
        for number in range(LEARNING_ROUNDS + options.rounds):
            is_counted = number >= LEARNING_ROUNDS
            for way in ways if number % 2 else ways[::-1]:
                shares = [1 / options.sites[site] for site in site_of] if way == "by site" else rule.shares(number)
                ask({"prepare": way, "addresses": addresses, "shares": shares, "sites": site_of})
                answers = ask({"go": way})
                if is_counted:
                    seconds[way].append(max(end for _, end, *_ in answers) - min(begin for begin, *_ in answers))
                if way == "ours":
                    rule.learn(number, [(end - begin, *rates) for begin, end, *rates, _ in answers])
            if any(not same for *_, same in answers):
                raise RuntimeError(f"round {number}: the two ways gave different means")
    return seconds


# A member -------------------------------------------------------------------------------------------------------------


class _Sums:
    """What a stage has accumulated."""

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums

    def part(self, step: int, unit: UnitName) -> Tensor:
        return self._sums

    def expect(self, unit: UnitName, mean: Tensor) -> Tensor:
        return mean

    @property
    def places(self) -> _Sums:
        return self

    def squared_norms(self, unit: UnitName, mean: Tensor) -> tuple[ParameterNorm, ...]:
        return ()


class _Sink:
    """Takes what others send: slices only."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def admit(self, header: TensorHeader) -> None:
        assert isinstance(header, Slice)
        self._mailbox.admit(header)

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        assert isinstance(header, Slice)
        self._mailbox.put(header, payload)


class _Member:
    def __init__(self, number: str, count: str, rendezvous: str, host: str, elements: str, threads: str) -> None:
        torch.set_num_threads(int(threads))
        self._names = names_of(int(count))
        self._me = ReplicaId(JOB, self._names[int(number)], 1, 0)
        self._host = host
        self._sums = torch.randn(int(elements), generator=torch.Generator().manual_seed(int(number)))
        self._device = ThreadDevice(torch.device("cpu"), int(threads))
        self._mailbox = Mailbox(self._me.peer, 0, 1)
        self._means: dict[str, Tensor] = {}
        self._rates = (0.0, 0.0)
        self._step = -1
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=int(number), world_size=len(self._names)
        )

    async def serve(self) -> None:
        """Say the address, then do what each line of stdin says, and answer each."""
        server = new_server()
        add_peer_service(server, _Sink(self._mailbox))
        port = bind(server, f"{self._host}:0")
        await server.start()
        self._links = GrpcPeerLinks()
        print(json.dumps(f"{self._host}:{port}"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            words = json.loads(line)
            if "prepare" in words:
                self._prepare(words["prepare"], words["addresses"], words["shares"], words["sites"])
                print(json.dumps("prepared"), flush=True)
                continue
            began_s = time.time()
            self._means[words["go"]] = await (self._gloo() if words["go"] == "gloo" else self._ours())
            ended_s = time.time()
            print(json.dumps([began_s, ended_s, *self._rates, self._agree()]), flush=True)
        await self._links.close()
        await server.stop(None)
        self._device.close()

    def _prepare(
        self, way: str, addresses: Sequence[str], shares: Sequence[float] | None, sites: Sequence[int]
    ) -> None:
        """What a command of the scheduler brings; and for gloo, which adds in place, memory of its own."""
        if way == "gloo":
            self._flat = self._sums.clone()
            return
        named = [f"site-{site}" for site in sites] or [""] * len(addresses)
        facts = zip(self._names, addresses, named, strict=True)
        replicas = [ReplicaRecord(peer, 1, at, 0, "cpu", site=site) for peer, at, site in facts]
        members = plan_round(replicas, {}, self._sums.numel(), shares, by_site=way == "by site")
        self._step += 1
        self._command = Average(0, self._step, UNIT, Round(1, 1), members, TOKENS, ROUND_S_MAX)
        self._mailbox.begin(self._command)

    async def _gloo(self) -> Tensor:
        def reduce() -> Tensor:
            dist.all_reduce(self._flat)
            return self._flat.div_(TOKENS)

        return await asyncio.to_thread(reduce)

    async def _ours(self) -> Tensor:
        stage: Any = _Sums(self._sums)
        own = (self._device, self._links, self._mailbox, ErrorFeedback("none"), Deadline(self._command.timeout_s))
        mean = await run_round(self._command, self._me, stage, Reduction(None), *own)
        self._mailbox.close(self._command.step)
        self._rates = mean.rates
        return mean.gradient

    def _agree(self) -> bool:
        """Whether both ways gave the same means, but for rounding; True before both have."""
        if len(self._means) < len(WAYS):
            return True
        return torch.allclose(*self._means.values(), rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
