"""Serves joiners of the replica's stage: chunks of its state, and records of past commits.

A chunk is copied between two computations and names its own version, so nothing is frozen or held up. Callers
are turned away while SERVED_MAX are being served.

The record of the newest outer step is kept until the next one, however long the log is: an island that was late needs
it, and the next one is not made before all islands have made this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stage_server.brain.rejoin import Chunk, CommitLog, TensorSize, cut
from stage_server.device import Device
from stage_server.ports import Assignment
from swarm.errors import CorruptFrame, Refused, RetryElsewhere, StaleMessage
from swarm.job.course import job_timeline_of
from swarm.model.stage import Stage
from swarm.rpc.links.state import state_reply
from swarm.types import UnitName
from swarm.wire.messages import Commit, StateReply, StateRequest

CHUNK_BYTES = 8 << 20  # one tensor may be more: optimizers work on whole tensors
SERVED_MAX = 4
RECORD_BYTES_MAX = 64 << 20  # of one answer with more than one record
_FACTS = Struct("<dd??")  # learning rate, scale, skip, rebases


@dataclass(frozen=True, slots=True)
class Record:
    """The averaged gradient of a commit by parameter name (empty if the step was skipped)."""

    learning_rate: float
    scale: float
    skip: bool
    gradients: Mapping[str, Tensor]
    rebases: bool = False  # an outer step of an island that was late


CommitRecord: TypeAlias = tuple[int, Record, int]  # its step, and the bytes of its gradients

_CHUNKS: WeakKeyDictionary[Stage, tuple[Chunk, ...]] = WeakKeyDictionary()  # of the stages that were built


def chunks_of(stage: Stage) -> tuple[Chunk, ...]:
    """How the state of a stage is cut: the same for all its replicas.

    It takes long for hundreds of layers, so it is called first while a stage is built, on the compute thread.
    """
    chunks = _CHUNKS.get(stage)
    if chunks is None:
        chunks = _CHUNKS[stage] = _cut(stage)
    return chunks


def _cut(stage: Stage) -> tuple[Chunk, ...]:
    sizes = [TensorSize(name, elements) for name, elements in stage.parameter_sizes()]
    elements = sum(tensor.elements for tensor in sizes)
    element_bytes = max(1, stage.state_bytes([tensor.name for tensor in sizes]) // max(1, elements))
    return cut(sizes, chunk_bytes=CHUNK_BYTES, element_bytes=element_bytes, gradient_bytes=4, whole_tensors=True)


def names_of(chunk: Chunk) -> tuple[str, ...]:
    return tuple(piece.tensor for piece in chunk.pieces)


def sizes_in(stage: Stage, step: int, chunk: Chunk) -> dict[str, int]:
    """The elements of those parameters of a chunk of which the record of a step has something."""
    changed, sizes = stage.places_at(step).names, dict(stage.parameter_sizes())
    return {name: sizes[name] for name in names_of(chunk) if name in changed}


def pack_records(records: Sequence[Record], names: Sequence[str]) -> bytes:
    """Records of consecutive steps for some parameters, as they travel."""
    parts: list[bytes | memoryview] = []
    for record in records:
        parts.append(_FACTS.pack(record.learning_rate, record.scale, record.skip, record.rebases))
        if not record.skip:
            parts += [
                record.gradients[name].detach().cpu().contiguous().view(-1).numpy().data.cast("B")
                for name in names
                if name in record.gradients
            ]
    return b"".join(parts)


def records_bytes(count: int, chunk: Chunk) -> int:
    """The most bytes that `count` records of a chunk's parameters take as they travel."""
    return count * (_FACTS.size + chunk.record_bytes)


def unpack_records(payload: memoryview, sizes_of: Iterable[Mapping[str, int]]) -> list[Record]:
    """Records of parameters of these sizes, in this order; CorruptFrame if the payload is anything else."""
    records, position = [], 0
    for sizes in sizes_of:
        if len(payload) - position < _FACTS.size:
            raise CorruptFrame("a record of a commit is cut off")
        learning_rate, scale, skip, rebases = _FACTS.unpack_from(payload, position)
        position += _FACTS.size
        gradients = {}
        for name, elements in () if skip else sizes.items():
            raw = payload[position : position + 4 * elements]
            if len(raw) != 4 * elements:
                raise CorruptFrame("a record of a commit is cut off")
            gradients[name] = torch.frombuffer(bytearray(raw), dtype=torch.float32)
            position += len(raw)
        records.append(Record(learning_rate, scale, skip, gradients, rebases))
    if position != len(payload):
        raise CorruptFrame("a record of a commit is longer than its parameters")
    return records


class Donor:
    """The giving side of one replica. Its log takes `log_bytes`, or as much as two commits need if that is more."""

    def __init__(self, assignment: Assignment, stage: Stage, device: Device, log_bytes: int) -> None:
        self._serves = (assignment.me.job, assignment.command.timeline, assignment.me.stage)
        self._assignment = assignment
        self._stage = stage
        self._device = device
        self._chunks = chunks_of(stage)
        record_bytes = 4 * sum(elements for _, elements in stage.parameter_sizes())
        # Two at least: a replica that was admitted in the middle of a step needs them from the others.
        self._log = CommitLog(max(log_bytes, 2 * record_bytes), stage.version)
        self._records: dict[int, Record] = {}
        self._merged: dict[int, Record] = {}  # of the newest outer step: an island that is late asks for it
        self._served = Counter[str]()  # under way, by part: records cost nothing on the device

    def record(self, commit: Commit, means: Mapping[UnitName, Tensor]) -> CommitRecord:
        """What a commit did, for `committed`; `means` of all units, or nothing if the step was skipped.

        To be made on the compute thread: it takes long for hundreds of layers.
        """
        gradients = {} if commit.skip else self._stage.places_at(commit.step).gradients_of(means)
        size_bytes = sum(4 * gradient.numel() for gradient in gradients.values())
        record = Record(commit.learning_rate, commit.scale, commit.skip, gradients, commit.rebases)
        return commit.step, record, size_bytes

    def share(self) -> None:
        """Other replicas may miss the next commits and ask for their records."""
        self._log.want()

    def committed(self, step: int, record: Record, size_bytes: int) -> None:
        """Remember a commit that has been applied, if anybody may ask for it."""
        if self._assignment.course.is_outer(step):  # the replicas of other islands may
            self.share()
            self._merged = {step: record}
        self._records[step] = record
        for old in self._log.append(step, size_bytes):
            self._records.pop(old, None)

    async def give(self, request: StateRequest) -> tuple[StateReply, bytes]:
        """The requested part. StaleMessage if this is another stage, Refused if it has no such chunk, RetryElsewhere
        if too many joiners are being served."""
        if (request.job, request.timeline, request.stage) != self._serves and not self._is_shared(request):
            job, timeline, stage = self._serves
            raise StaleMessage(f"this replica serves stage {stage} of job {job}, timeline {timeline}")
        if request.chunk >= len(self._chunks):
            raise Refused(f"stage {request.stage} has {len(self._chunks)} chunks, asked for was {request.chunk}")
        self.share()  # before a chunk is read: what follows its version is kept
        part = "records" if request.part == "records" else "state"
        if self._served[part] >= SERVED_MAX:
            raise RetryElsewhere(f"{self._served[part]} are being served already")
        self._served[part] += 1
        try:
            return await self._give(request, names_of(self._chunks[request.chunk]))
        finally:
            self._served[part] -= 1

    def _is_shared(self, request: StateRequest) -> bool:
        """Whether the request is for an outer step, whose merge is the same in all islands."""
        job, timeline, stage = self._serves
        islands, steps = self._assignment.islands, range(request.start, request.stop)
        together = job_timeline_of(request.timeline, islands) == job_timeline_of(timeline, islands)
        same_job = together and (request.job, request.stage) == (job, stage)
        all_outer = len(steps) == 1 and self._assignment.course.is_outer(request.start)
        return same_job and request.part == "records" and all_outer

    async def _give(self, request: StateRequest, names: Sequence[str]) -> tuple[StateReply, bytes]:
        if request.part == "records":
            steps, reach = self._log.steps(request.start, request.stop), self._log.reach
            if steps is None and request.start in self._merged:
                steps, reach = range(request.start, request.start + 1), request.start
            if steps is None:  # the log begins later: `reach` says so
                return state_reply(request.start, reach, b""), b""
            each_bytes, held = max(1, self._chunks[request.chunk].record_bytes), self._merged | self._records
            records = [held[step] for step in steps[: max(1, RECORD_BYTES_MAX // each_bytes)]]
            version = request.start + len(records)
            payload = await self._device.aside(lambda: pack_records(records, names))
        else:
            version, payload = await self._device.run(lambda: (self._stage.version, self._stage.snapshot(names)))
            reach = self._log.reach
        return await self._device.aside(lambda: state_reply(version, reach, payload)), payload
