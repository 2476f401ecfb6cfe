from swarm.wire import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorHeader(_message.Message):
    __slots__ = ("job", "kind", "timeline", "step", "microbatch", "stage", "attempt", "sender", "incarnation", "dtype", "shape", "codec", "total_bytes", "unit", "round", "start", "wanted")
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    job: str
    kind: str
    timeline: int
    step: int
    microbatch: int
    stage: int
    attempt: int
    sender: str
    incarnation: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: str
    total_bytes: int
    unit: str
    round: _session_pb2.Round
    start: int
    wanted: str
    def __init__(self, job: _Optional[str] = ..., kind: _Optional[str] = ..., timeline: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., sender: _Optional[str] = ..., incarnation: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[str] = ..., total_bytes: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[_session_pb2.Round, _Mapping]] = ..., start: _Optional[int] = ..., wanted: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("sequence", "header", "offset", "payload", "checksum")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    header: TensorHeader
    offset: int
    payload: bytes
    checksum: int
    def __init__(self, sequence: _Optional[int] = ..., header: _Optional[_Union[TensorHeader, _Mapping]] = ..., offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

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

class StateChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: StateReply
    payload: bytes
    def __init__(self, header: _Optional[_Union[StateReply, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence", "error_code", "error_message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    error_code: str
    error_message: str
    def __init__(self, sequence: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...
