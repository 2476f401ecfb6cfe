"""Whether a tensor from a neighbour belongs here, judged by its header before a byte of it is kept."""

from __future__ import annotations

from typing import Any, assert_never

from stage_server.brain.link_codecs import allowed
from stage_server.brain.neighbours import Claim, ClaimStatus, Neighbours
from stage_server.brain.side_work import SideWork
from stage_server.ports import Assignment
from stage_server.replica.averaging.mailbox import Mailbox
from swarm.errors import CorruptFrame, Refused, StaleMessage
from swarm.model import codec
from swarm.model.islands.exchange import proposal_sizes
from swarm.model.stage import Stage
from swarm.rpc.links.peers import Moved
from swarm.wire.messages import Boundary, EvaluationBoundary, Need, Slice, TensorHeader


class HeaderChecks:
    """The checks of one replica; each raises StaleMessage, Refused or CorruptFrame."""

    def __init__(
        self, assignment: Assignment, stage: Stage, mailbox: Mailbox, neighbours: Neighbours, side_work: SideWork[Any]
    ) -> None:
        self._me, self._timeline = assignment.me, assignment.command.timeline
        self._codecs = allowed(assignment.spec.pipeline.compression)
        self._slice_dtypes = codec.slice_dtypes(assignment.spec.averaging.compression)
        self._course = assignment.course
        self._stage = stage
        self._mailbox = mailbox
        self._neighbours = neighbours
        self._side_work = side_work

    def check(self, header: TensorHeader) -> Moved | None:
        """Refuse what is not for this job, timeline and stage, or not of the size that it must have.

        What it gives is to be called whenever a part of the tensor has come.
        """
        if header.job != self._me.job or _timeline(header) != self._timeline:
            raise StaleMessage(f"this replica serves job {self._me.job}, timeline {self._timeline}")
        match header:
            case Boundary():
                self._check_boundary(header)
                if self._side_work.wants(header.microbatch, header.direction, header.sender, header.incarnation):
                    return None
                claim = Claim(header.sender, header.incarnation, header.attempt)
                if self._neighbours.judge(header.microbatch, header.direction, claim) is ClaimStatus.FALSE:
                    raise StaleMessage(f"{claim} is not the neighbour of {header.microbatch} on that side")
            case EvaluationBoundary():
                self._check_boundary(header)
            case Slice():
                return self._check_slice(header)
            case Need(stage=stage):
                if stage != self._me.stage:
                    raise Refused(f"a question to stage {stage} came to stage {self._me.stage}")
            case _:
                assert_never(header)
        return None

    def _check_boundary(self, header: Boundary | EvaluationBoundary) -> None:
        if header.stage != self._me.stage:
            raise Refused(f"a tensor for stage {header.stage} came to stage {self._me.stage}")
        if header.shape != self._stage.boundary_shape():
            raise CorruptFrame(f"boundary tensors are {self._stage.boundary_shape()}, not {header.shape}")
        if header.codec not in self._codecs:
            raise CorruptFrame(f"this job sends boundary tensors as {' or '.join(self._codecs)}, not {header.codec}")
        expected = codec.encoded_bytes(header.dtype, header.shape, header.codec)
        _check_size(f"{header.dtype} {header.shape}", expected, header.total_bytes)

    def _check_slice(self, header: Slice) -> Moved:
        layout = self._stage.units.get(header.unit)
        if layout is None:
            raise Refused(f"stage {self._me.stage} has no unit {header.unit!r}")
        if self._course.is_outer(header.step):
            return self._check_proposal(header)
        if header.start + header.elements > layout.elements:
            raise Refused(f"slice {header.start}+{header.elements} leaves unit {header.unit}")
        if header.dtype not in self._slice_dtypes:
            raise CorruptFrame(f"this job sends slices as {' or '.join(self._slice_dtypes)}, not {header.dtype[:32]!r}")
        expected = codec.slice_bytes(header.dtype, header.elements)
        moved = self._mailbox.admit(header)
        _check_size(f"{header.dtype} ({header.elements},)", expected, header.total_bytes)
        return moved

    def _check_proposal(self, header: Slice) -> Moved:
        sizes = proposal_sizes(self._stage, header.unit, header.step)
        if (header.dtype, header.start, header.averaged) != (codec.PROPOSAL_DTYPE, 0, False):
            raise CorruptFrame(f"a slice of outer step {header.step} is no proposal")
        if header.elements not in sizes:
            most = " at most" if len(sizes) > 1 else ""
            raise CorruptFrame(f"a proposal for unit {header.unit} has {sizes[-1]} bytes{most}, not {header.elements}")
        moved = self._mailbox.admit(header)
        _check_size(f"a proposal for unit {header.unit}", header.elements, header.total_bytes)
        return moved


def _timeline(header: TensorHeader) -> int:
    match header:
        case Boundary(microbatch=microbatch) | Need(microbatch=microbatch):
            return microbatch.timeline
        case EvaluationBoundary(batch=batch):
            return batch.timeline
        case Slice(timeline=timeline):
            return timeline
        case _:
            assert_never(header)


def _check_size(what: str, expected: int, told: int) -> None:
    if told != expected:
        raise CorruptFrame(f"{what} has {expected} bytes, not {told}")
