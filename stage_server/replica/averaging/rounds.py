"""A replica's part in averaging, from the command to the mean that its commit uses.

    Average ──▶ waits for the seal ──▶ under way ──▶ mean held until the commit
                     └────────────── given up ◀──┘ AbortRound, a newer round, a new session

A command that comes ahead comes again when the step is full: from then on the round may take its time and no longer.
Only the newest round of each unit and step counts. Its mean is kept even if the round is given up because the session
broke: it may have been complete everywhere, and its commit row written, before that.

Decisions: docs/decisions/007, 039.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from stage_server.ports import ReplicaId, ReplicaPorts
from stage_server.replica.averaging.all_reduce import Deadline, Mean, Reduction, run_round
from stage_server.replica.averaging.error_feedback import ErrorFeedback
from stage_server.replica.averaging.exchange import run_exchange
from stage_server.replica.averaging.mailbox import Mailbox
from stage_server.replica.averaging.second_owner import answer_to, reduce_again, send_part
from swarm.errors import OutOfMemory, RoundBroken, SetMismatch, SwarmError
from swarm.model.islands.exchange import proposal_sizes
from swarm.model.runtime import to_host
from swarm.model.stage import Stage
from swarm.types import PeerId, Round, RoundFault, UnitName
from swarm.wire.messages import AbortRound, Average, Averaged, Commit, Exchange, Recheck, RoundFailed


@dataclass(slots=True)
class _RoundUnderWay:
    """The newest round of a unit in one step."""

    command: Average | Exchange
    deadline: Deadline
    task: asyncio.Task[None] | None = None  # none: waits for the seal
    given_up: bool = False
    checks: list[asyncio.Task[None]] = field(default_factory=list)


class RoundRunner:
    def __init__(
        self,
        me: ReplicaId,
        stage: Stage,
        reduction: Reduction,
        ports: ReplicaPorts,
        fail: Callable[[SwarmError], None],
        mailbox: Mailbox,
        leftovers: ErrorFeedback,
    ) -> None:
        self.mailbox = mailbox
        self._leftovers = leftovers
        self._me = me
        self._stage = stage
        self._reduction = reduction
        self._ports = ports
        self._fail = fail
        self._rounds: dict[tuple[int, UnitName], _RoundUnderWay] = {}
        self._means: dict[tuple[int, UnitName, Round], Mean] = {}

    def exchange(self, command: Exchange) -> None:
        """Take part in an outer round: at once, since there are no sums to wait for."""
        if self.take(command):
            under_way = self._rounds[command.step, command.unit]
            under_way.task = self._ports.work.start(self._take_part(under_way))

    def take(self, command: Average | Exchange) -> bool:
        """Note a round, to begin with `sealed`; False if it is not newer than the known one."""
        key = (command.step, command.unit)
        known = self._rounds.get(key)
        if known is not None and command.round <= known.command.round:
            return False
        if known is not None:
            self._stop(known)
        under_way = self._rounds[key] = _RoundUnderWay(command, Deadline(command.timeout_s))
        # A newer round means that no older one was or will be written into a row.
        self._means = {at: mean for at, mean in self._means.items() if at[:2] != key}
        is_outer = isinstance(command, Exchange)
        sizes = proposal_sizes(self._stage, command.unit, command.step) if is_outer else range(0)
        self.mailbox.begin(command, sizes, under_way.deadline.moved)
        return True

    def full(self, command: Average) -> bool:
        """The step is full: the time of a known round begins. Returns whether it still waits for the seal."""
        known = self._rounds.get((command.step, command.unit))
        if known is None or known.given_up or known.command.round != command.round:
            return False
        known.deadline.begin()
        return known.task is None

    def sealed(self, step: int, digest: str) -> None:
        """Begin the rounds that waited for the step's parts; `digest` names the set that is in them."""
        for (of, _), one in list(self._rounds.items()):
            if of != step or one.given_up or one.task is not None or isinstance(one.command, Exchange):
                continue
            expected = expected_set(one.command, self._me.peer)
            if digest == expected:
                one.task = self._ports.work.start(self._take_part(one))
            else:
                one.given_up = True
                self._failed(one.command, SetMismatch(f"expected set {expected}, this replica holds {digest}"))

    def recheck(self, command: Recheck) -> None:
        """Take part in reducing a slice of a complete round again, or say that its sums are not held any more."""
        known = self._rounds.get((command.step, command.unit))
        mean = self._means.get((command.step, command.unit, command.round))
        if known is None or known.given_up or known.command.round != command.round or mean is None:
            self._ports.emit(answer_to(command, fault="the round was given up here"))
            return
        average, me, ports = known.command, self._me, self._ports
        if isinstance(average, Exchange):
            return
        deadline = Deadline(average.timeout_s)

        def part() -> Tensor:
            return to_host(self._stage.part(command.step, command.unit))[0]

        if me.peer == command.verifier:
            self.mailbox.expect(average, command.owner, deadline.moved)
        else:
            known.checks.append(ports.work.start(self._send_part(average, command, part)))
        if me.peer in (command.owner, command.verifier):
            known.checks.append(ports.work.start(self._reduce_again(average, command, part, mean, deadline)))

    async def _send_part(self, average: Average, command: Recheck, part: Callable[[], Tensor]) -> None:
        try:
            await send_part(average, command, self._me, self._ports.device, self._ports.links, part)
        except SwarmError as error:
            facts = {"step": command.step, "unit": command.unit, "to": command.verifier}
            self._ports.log.warning("part not sent again", **facts, reason=error.message)

    async def _reduce_again(
        self, average: Average, command: Recheck, part: Callable[[], Tensor], mean: Mean, deadline: Deadline
    ) -> None:
        own = (self._me, self._reduction, self._ports.device, self.mailbox, deadline)
        self._ports.emit(await reduce_again(average, command, *own, part, mean.gradient))

    def abort(self, command: AbortRound) -> bool:
        """Give a round up if it is the unit's newest; returns whether no round of the step is left."""
        known = self._rounds.get((command.step, command.unit))
        if known is not None and known.command.round == command.round:
            self._stop(known)
        return all(one.given_up for (step, _), one in self._rounds.items() if step == command.step)

    def abort_all(self) -> None:
        for round_ in self._rounds.values():
            self._stop(round_)

    def means(self, commit: Commit) -> dict[UnitName, Mean] | None:
        """The averaged gradients that a commit makes effective; None if one is not held here."""
        keys = [(commit.step, made.unit, made.round) for made in commit.rounds]
        if any(key not in self._means for key in keys):
            return None
        return {unit: self._means[step, unit, round_] for step, unit, round_ in keys}

    def close(self, commit: Commit) -> None:
        """The step is committed: forget its rounds and earlier ones, but keep their leftovers."""
        step, means = commit.step, {} if commit.skip else self.means(commit) or {}
        self._leftovers.committed(step, {unit: mean.left for unit, mean in means.items() if mean.left is not None})
        self.mailbox.close(step)
        self._means = {key: mean for key, mean in self._means.items() if key[0] > step}
        for key in [key for key in self._rounds if key[0] <= step]:
            self._stop(self._rounds.pop(key))

    def _stop(self, one: _RoundUnderWay) -> None:
        one.given_up = True
        for check in one.checks:
            check.cancel()
        if one.task is not None and not one.task.done():
            one.task.cancel()
            self._ports.metrics.round_finished(self._me.stage, "aborted", 0.0)

    async def _take_part(self, one: _RoundUnderWay) -> None:
        loop, command = asyncio.get_running_loop(), one.command
        started_s = loop.time()
        try:
            mean = await self._run(command, one.deadline)
        except* OutOfMemory as group:
            self._fail(_first(group))
        except* RoundBroken as group:
            self._failed(command, *(_each(group) if isinstance(command, Exchange) else [_first(group)]))
        except* SwarmError as group:
            self._failed(command, _first(group))
        else:
            duration_s = loop.time() - max(started_s, mean.all_began_s)
            self._means[command.step, command.unit, command.round] = mean
            sites = None if isinstance(command, Exchange) else len({member.group for member in command.members} - {""})
            self._ports.metrics.round_finished(self._me.stage, "averaged", duration_s, sites)
            if isinstance(command, Exchange):
                self._ports.metrics.exchanged(*mean.travelled)
            of_round = (command.timeline, command.step, command.unit, command.round)
            self._ports.emit(Averaged(*of_round, mean.digest, mean.norms, duration_s, *mean.rates))

    async def _run(self, command: Average | Exchange, deadline: Deadline) -> Mean:
        me, stage, device, links = self._me, self._stage, self._ports.device, self._ports.links
        if isinstance(command, Exchange):
            return await run_exchange(command, me, stage, device, links, self.mailbox, deadline)
        own = (self._reduction, device, links, self.mailbox, self._leftovers, deadline)
        return await run_round(command, me, stage, *own)

    def _failed(self, command: Average | Exchange, *errors: SwarmError) -> None:
        self._ports.metrics.round_finished(self._me.stage, "failed", 0.0)
        of_round = (command.timeline, command.step, command.unit, command.round)
        for error in errors:
            self._ports.log.warning("round failed", step=command.step, unit=command.unit, reason=str(error))
            accused = error.accused if isinstance(error, RoundBroken) else ""
            self._ports.emit(RoundFailed(*of_round, f"{error.code}: {error}", accused, _cause(error)))


def expected_set(average: Average, peer: PeerId) -> str:
    """The digest of the set that the sums of a member must hold; empty if it is none."""
    return next((member.digest for member in average.members if member.peer == peer), "")


def _cause(error: SwarmError) -> RoundFault:
    if isinstance(error, SetMismatch):
        return RoundFault.SET
    lacks_relay = isinstance(error, RoundBroken) and error.lacks_relay
    return RoundFault.RELAYS if lacks_relay else RoundFault.MEMBER


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    return _each(group)[0]


def _each(group: BaseExceptionGroup[SwarmError]) -> list[SwarmError]:
    """The errors of a group, and of groups in it."""
    found: list[SwarmError] = []
    for error in group.exceptions:
        found += _each(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
