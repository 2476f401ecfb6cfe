from swarm.wire import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorHeader(_message.Message):
    __slots__ = ("boundary", "evaluation_boundary", "slice", "need")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    boundary: Boundary
    evaluation_boundary: EvaluationBoundary
    slice: Slice
    need: Need
    def __init__(self, boundary: _Optional[_Union[Boundary, _Mapping]] = ..., evaluation_boundary: _Optional[_Union[EvaluationBoundary, _Mapping]] = ..., slice: _Optional[_Union[Slice, _Mapping]] = ..., need: _Optional[_Union[Need, _Mapping]] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("job", "microbatch", "direction", "stage", "attempt", "sender", "incarnation", "dtype", "shape", "codec", "total_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    microbatch: _session_pb2.Microbatch
    direction: str
    stage: int
    attempt: int
    sender: str
    incarnation: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    total_bytes: int
    def __init__(self, job: _Optional[str] = ..., microbatch: _Optional[_Union[_session_pb2.Microbatch, _Mapping]] = ..., direction: _Optional[str] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class EvaluationBoundary(_message.Message):
    __slots__ = ("job", "batch", "stage", "attempt", "sender", "incarnation", "dtype", "shape", "codec", "total_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    batch: _session_pb2.EvaluationBatch
    stage: int
    attempt: int
    sender: str
    incarnation: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    total_bytes: int
    def __init__(self, job: _Optional[str] = ..., batch: _Optional[_Union[_session_pb2.EvaluationBatch, _Mapping]] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("job", "timeline", "step", "unit", "round", "averaged", "start", "sender", "incarnation", "dtype", "elements", "total_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    step: int
    unit: str
    round: _session_pb2.Round
    averaged: bool
    start: int
    sender: str
    incarnation: int
    dtype: str
    elements: int
    total_bytes: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[_session_pb2.Round, _Mapping]] = ..., averaged: _Optional[bool] = ..., start: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., dtype: _Optional[str] = ..., elements: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Need(_message.Message):
    __slots__ = ("job", "microbatch", "direction", "stage", "attempt", "sender", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    microbatch: _session_pb2.Microbatch
    direction: str
    stage: int
    attempt: int
    sender: str
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., microbatch: _Optional[_Union[_session_pb2.Microbatch, _Mapping]] = ..., direction: _Optional[str] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("sequence", "header", "offset", "payload", "checksum", "extent_start", "extent_bytes", "memory", "probe")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    EXTENT_START_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    header: TensorHeader
    offset: int
    payload: bytes
    checksum: int
    extent_start: int
    extent_bytes: int
    memory: Memory
    probe: bool
    def __init__(self, sequence: _Optional[int] = ..., header: _Optional[_Union[TensorHeader, _Mapping]] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ..., extent_start: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., memory: _Optional[_Union[Memory, _Mapping]] = ..., probe: _Optional[bool] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("process", "descriptor", "word", "host")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    process: int
    descriptor: int
    word: bytes
    host: bytes
    def __init__(self, process: _Optional[int] = ..., descriptor: _Optional[int] = ..., word: _Optional[bytes] = ..., host: _Optional[bytes] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("job", "timeline", "stage", "part", "chunk", "start", "stop", "sender", "incarnation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    stage: int
    part: str
    chunk: int
    start: int
    stop: int
    sender: str
    incarnation: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., stage: _Optional[int] = ..., part: _Optional[str] = ..., chunk: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Pass(_message.Message):
    __slots__ = ("cluster", "job", "timeline", "peer", "incarnation", "stage", "stages", "issued_unix_s", "expires_unix_s")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    job: str
    timeline: int
    peer: str
    incarnation: int
    stage: int
    stages: int
    issued_unix_s: float
    expires_unix_s: float
    def __init__(self, cluster: _Optional[str] = ..., job: _Optional[str] = ..., timeline: _Optional[int] = ..., peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., issued_unix_s: _Optional[float] = ..., expires_unix_s: _Optional[float] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("version", "reach", "total_bytes", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    reach: int
    total_bytes: int
    checksum: str
    def __init__(self, version: _Optional[int] = ..., reach: _Optional[int] = ..., total_bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class Asking(_message.Message):
    __slots__ = ("request", "held_bytes", "checksum", "received_bytes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    request: StateRequest
    held_bytes: int
    checksum: str
    received_bytes: int
    def __init__(self, request: _Optional[_Union[StateRequest, _Mapping]] = ..., held_bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("header", "payload", "held_bytes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    header: StateReply
    payload: bytes
    held_bytes: int
    def __init__(self, header: _Optional[_Union[StateReply, _Mapping]] = ..., payload: _Optional[bytes] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class Receipts(_message.Message):
    __slots__ = ("receipts", "received_bytes")
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    receipts: _containers.RepeatedCompositeFieldContainer[Receipt]
    received_bytes: int
    def __init__(self, receipts: _Optional[_Iterable[_Union[Receipt, _Mapping]]] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence", "error_code", "error_message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error_code: str
    error_message: str
    def __init__(self, sequence: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...
