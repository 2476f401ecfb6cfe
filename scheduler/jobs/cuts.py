"""How a job is cut for the stage servers that are here."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.brain.fleet.membership import Membership, Peer, filled, fleet_speed, offer
from scheduler.planning.pool import NEAR, PeerPool, PoolLink, PoolPeer
from scheduler.planning.stages import cut_of
from scheduler.storage.job_record import JobTokens
from swarm.errors import InvalidConfig, SwarmError
from swarm.job.overlap import UNMEASURED
from swarm.job.placement import Candidate
from swarm.job.resolve import Basis, choose
from swarm.job.spec import JobSpec
from swarm.limits import HOPS_MAX, SPEC_BYTES_MAX
from swarm.types import PeerState


def basis_of(membership: Membership, tokens: JobTokens, idle: Sequence[Peer]) -> Basis:
    """What is known of the stage servers; `idle` may serve the job now."""
    free = reached(idle)
    present = [peer for peer in membership.peers() if peer.state is not PeerState.GONE]
    hellos = [peer.hello for peer in membership.lasting_peers()]
    return Basis(
        tokens.vocabulary_size,
        tokens.end_of_text,
        idle=[offer(peer.hello) for peer in free],
        present=[offer(peer.hello) for peer in present],
        lasting=[Candidate(hello.peer, hello.pinned_stage, offer=offer(hello), site=hello.site) for hello in hellos],
        speed=fleet_speed(free),
    )


def reached(idle: Sequence[Peer]) -> Sequence[Peer]:
    """The peers that others can dial, if there are some: the rest gets no stage beside them."""
    return [peer for peer in idle if not peer.unreached] or idle


def pool_of(peers: Sequence[Peer]) -> PeerPool | None:
    """The peers with what was measured of them, and medians where it was not; None if too little was.

    Links between sites are assumed: what was seen on one is less than it carries. A peer that lies makes its own stage
    look faster, and the slowest counts.
    """
    fleet = fleet_speed(peers)
    if fleet is UNMEASURED:
        return None
    near = NEAR.bits_per_s / 8.0
    speeds = filled([peer.measured.multiply_adds_per_s for peer in peers])
    ups = filled([peer.measured.up_bytes_per_s for peer in peers], near)
    downs = filled([peer.measured.down_bytes_per_s for peer in peers], near)
    found = tuple(
        PoolPeer(
            *(hello.peer, hello.device, hello.memory_bytes, hello.site),
            speed=speed,
            up_bits_per_s=8.0 * up,
            down_bits_per_s=8.0 * down,
            host_bytes=hello.host_bytes,
        )
        for hello, speed, up, down in zip((peer.hello for peer in peers), speeds, ups, downs, strict=True)
    )
    return PeerPool(found, {("", ""): PoolLink(fleet.receipt_s / 2.0, NEAR.bits_per_s)})


def cut_for(spec: JobSpec, basis: Basis, pool: PeerPool | None = None) -> tuple[JobSpec, str]:
    """The spec with every "auto" resolved, and what memory and links changed of it; OutOfMemory, InvalidConfig.

    With what is known of a `pool`, the number of stages follows from that.
    """
    resolved, reasons = choose(spec, basis) if pool is None else cut_of(spec, pool, basis)
    if (size_bytes := len(resolved.model_dump_json())) > SPEC_BYTES_MAX:
        raise InvalidConfig(f"the job's spec has {size_bytes} bytes when it is filled in, at most {SPEC_BYTES_MAX}")
    check_hops(resolved)
    return resolved, reasons


def with_split(spec: JobSpec, split: tuple[int, ...]) -> JobSpec:
    """A resolved spec with another cut, and all else as it is."""
    return spec.having("pipeline", split=split, stages=len(split))


def is_allowed(spec: JobSpec, tokens: JobTokens, split: tuple[int, ...]) -> bool:
    """Whether a job file with the values of a resolved spec might name this cut."""
    try:
        cut_for(with_split(spec, split), Basis(tokens.vocabulary_size, tokens.end_of_text))
    except SwarmError:
        return False
    return True


def kept(asked: JobSpec, spec: JobSpec, *, weights: bool) -> JobSpec:
    """What was asked, with what decides the model as it was resolved in `spec`, and (`weights`) what decides how its
    weights are trained. The cut stays open, and what else follows from memory."""
    asked = asked.having("model", narrow=spec.model.narrow)
    if not weights:
        return asked
    asked = asked.having("training", microbatch_sequences=spec.training.microbatch_sequences)
    return asked.having("pipeline", overlap=spec.pipeline.overlap)


def check_hops(spec: JobSpec) -> None:
    """InvalidConfig for steps with so many microbatches that the entries of one step hold other calls up."""
    microbatches, stages = spec.training.microbatches, len(spec.split)
    if microbatches * stages > HOPS_MAX:
        raise InvalidConfig(
            f"a step has {microbatches} microbatches; with {stages} stages, {HOPS_MAX // stages} is the limit",
            hint="raise training.microbatch_sequences, or lower training.global_batch_sequences",
        )
