from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Microbatch(_message.Message):
    __slots__ = ("timeline", "step", "index")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    index: int
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class EvaluationBatch(_message.Message):
    __slots__ = ("timeline", "version", "index")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    version: int
    index: int
    def __init__(self, timeline: _Optional[int] = ..., version: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("epoch", "number")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("peer", "incarnation", "attempt", "address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    attempt: int
    address: str
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., attempt: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ReportedCell(_message.Message):
    __slots__ = ("microbatch", "attempt", "accumulated", "finite", "loss", "stamp")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    attempt: int
    accumulated: bool
    finite: bool
    loss: float
    stamp: bytes
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., attempt: _Optional[int] = ..., accumulated: _Optional[bool] = ..., finite: _Optional[bool] = ..., loss: _Optional[float] = ..., stamp: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("hello", "heartbeat", "loaded", "accumulated", "averaged", "round_failed", "committed", "saved", "failed", "logged", "leaving", "evaluated", "undelivered", "forwarded", "evaluation_undelivered", "checked", "hashed", "rechecked", "recounted", "calibrated", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    AVERAGED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FAILED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOGGED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    UNDELIVERED_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_UNDELIVERED_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    HASHED_FIELD_NUMBER: _ClassVar[int]
    RECHECKED_FIELD_NUMBER: _ClassVar[int]
    RECOUNTED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    loaded: Loaded
    accumulated: Accumulated
    averaged: Averaged
    round_failed: RoundFailed
    committed: Committed
    saved: Saved
    failed: Failed
    logged: Logged
    leaving: Leaving
    evaluated: Evaluated
    undelivered: Undelivered
    forwarded: Forwarded
    evaluation_undelivered: EvaluationUndelivered
    checked: Checked
    hashed: Hashed
    rechecked: Rechecked
    recounted: Recounted
    calibrated: Calibrated
    more: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., accumulated: _Optional[_Union[Accumulated, _Mapping]] = ..., averaged: _Optional[_Union[Averaged, _Mapping]] = ..., round_failed: _Optional[_Union[RoundFailed, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., logged: _Optional[_Union[Logged, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., undelivered: _Optional[_Union[Undelivered, _Mapping]] = ..., forwarded: _Optional[_Union[Forwarded, _Mapping]] = ..., evaluation_undelivered: _Optional[_Union[EvaluationUndelivered, _Mapping]] = ..., checked: _Optional[_Union[Checked, _Mapping]] = ..., hashed: _Optional[_Union[Hashed, _Mapping]] = ..., rechecked: _Optional[_Union[Rechecked, _Mapping]] = ..., recounted: _Optional[_Union[Recounted, _Mapping]] = ..., calibrated: _Optional[_Union[Calibrated, _Mapping]] = ..., more: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "incarnation", "protocol", "product", "address", "http_address", "device", "threads", "memory_bytes", "pinned_stage", "job", "timeline", "version", "cells", "stage", "attempt", "join", "via_relay", "slow_bfloat16", "site", "forwarded", "host_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_STAGE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    VIA_RELAY_FIELD_NUMBER: _ClassVar[int]
    SLOW_BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    protocol: int
    product: str
    address: str
    http_address: str
    device: str
    threads: int
    memory_bytes: int
    pinned_stage: int
    job: str
    timeline: int
    version: int
    cells: _containers.RepeatedCompositeFieldContainer[ReportedCell]
    stage: int
    attempt: int
    join: int
    via_relay: bool
    slow_bfloat16: bool
    site: str
    forwarded: bool
    host_bytes: int
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., protocol: _Optional[int] = ..., product: _Optional[str] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., pinned_stage: _Optional[int] = ..., job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[ReportedCell, _Mapping]]] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., join: _Optional[int] = ..., via_relay: _Optional[bool] = ..., slow_bfloat16: _Optional[bool] = ..., site: _Optional[str] = ..., forwarded: _Optional[bool] = ..., host_bytes: _Optional[int] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("to", "bytes_per_s", "receipt_s")
    TO_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_S_FIELD_NUMBER: _ClassVar[int]
    to: str
    bytes_per_s: float
    receipt_s: float
    def __init__(self, to: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., receipt_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "links")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    links: _containers.RepeatedCompositeFieldContainer[LinkSpeed]
    def __init__(self, sequence: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkSpeed, _Mapping]]] = ...) -> None: ...

class UnitSize(_message.Message):
    __slots__ = ("unit", "elements")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    unit: str
    elements: int
    def __init__(self, unit: _Optional[str] = ..., elements: _Optional[int] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("job", "timeline", "stage", "version", "digest", "units", "probe", "join")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    stage: int
    version: int
    digest: str
    units: _containers.RepeatedCompositeFieldContainer[UnitSize]
    probe: str
    join: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., stage: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., units: _Optional[_Iterable[_Union[UnitSize, _Mapping]]] = ..., probe: _Optional[str] = ..., join: _Optional[int] = ...) -> None: ...

class Accumulated(_message.Message):
    __slots__ = ("microbatch", "stage", "attempt", "finite", "loss", "forward_s", "backward_s", "wait_s", "digests", "overflow")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    stage: int
    attempt: int
    finite: bool
    loss: float
    forward_s: float
    backward_s: float
    wait_s: float
    digests: _containers.RepeatedScalarFieldContainer[str]
    overflow: str
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ..., finite: _Optional[bool] = ..., loss: _Optional[float] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., digests: _Optional[_Iterable[str]] = ..., overflow: _Optional[str] = ...) -> None: ...

class Checked(_message.Message):
    __slots__ = ("microbatch", "stage", "number", "finite", "loss", "digests", "fault")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    stage: int
    number: int
    finite: bool
    loss: float
    digests: _containers.RepeatedScalarFieldContainer[str]
    fault: str
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., stage: _Optional[int] = ..., number: _Optional[int] = ..., finite: _Optional[bool] = ..., loss: _Optional[float] = ..., digests: _Optional[_Iterable[str]] = ..., fault: _Optional[str] = ...) -> None: ...

class Recounted(_message.Message):
    __slots__ = ("timeline", "step", "number", "digest", "fault")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    number: int
    digest: str
    fault: str
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., digest: _Optional[str] = ..., fault: _Optional[str] = ...) -> None: ...

class Forwarded(_message.Message):
    __slots__ = ("microbatch", "stage", "attempt")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    stage: int
    attempt: int
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., stage: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("batch", "attempt", "loss")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    batch: EvaluationBatch
    attempt: int
    loss: float
    def __init__(self, batch: _Optional[_Union[EvaluationBatch, _Mapping]] = ..., attempt: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class ParameterNorm(_message.Message):
    __slots__ = ("name", "squared_norm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SQUARED_NORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    squared_norm: float
    def __init__(self, name: _Optional[str] = ..., squared_norm: _Optional[float] = ...) -> None: ...

class Averaged(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "digest", "norms", "duration_s", "up_bytes_per_s", "down_bytes_per_s")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    digest: str
    norms: _containers.RepeatedCompositeFieldContainer[ParameterNorm]
    duration_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., digest: _Optional[str] = ..., norms: _Optional[_Iterable[_Union[ParameterNorm, _Mapping]]] = ..., duration_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ...) -> None: ...

class Rechecked(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "number", "took", "computed", "held", "fault")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    number: int
    took: _containers.RepeatedScalarFieldContainer[str]
    computed: str
    held: str
    fault: str
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., number: _Optional[int] = ..., took: _Optional[_Iterable[str]] = ..., computed: _Optional[str] = ..., held: _Optional[str] = ..., fault: _Optional[str] = ...) -> None: ...

class RoundFailed(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "reason", "accused", "cause")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    reason: str
    accused: str
    cause: str
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., reason: _Optional[str] = ..., accused: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class Undelivered(_message.Message):
    __slots__ = ("microbatch", "stage", "to", "attempt", "reason")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    stage: int
    to: str
    attempt: int
    reason: str
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., stage: _Optional[int] = ..., to: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EvaluationUndelivered(_message.Message):
    __slots__ = ("batch", "stage", "to", "attempt", "reason")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    batch: EvaluationBatch
    stage: int
    to: str
    attempt: int
    reason: str
    def __init__(self, batch: _Optional[_Union[EvaluationBatch, _Mapping]] = ..., stage: _Optional[int] = ..., to: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("timeline", "step", "version", "stage", "digest")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    version: int
    stage: int
    digest: str
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ParameterHash(_message.Message):
    __slots__ = ("name", "dtype", "shape", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    sha256: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., sha256: _Optional[str] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("job", "timeline", "version", "stage", "parameters", "fault", "again")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    version: int
    stage: int
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterHash]
    fault: str
    again: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., parameters: _Optional[_Iterable[_Union[ParameterHash, _Mapping]]] = ..., fault: _Optional[str] = ..., again: _Optional[int] = ...) -> None: ...

class Hashed(_message.Message):
    __slots__ = ("job", "timeline", "version", "stage", "files", "parameters", "fault")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    version: int
    stage: int
    files: _containers.RepeatedCompositeFieldContainer[StateFile]
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterHash]
    fault: str
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., files: _Optional[_Iterable[_Union[StateFile, _Mapping]]] = ..., parameters: _Optional[_Iterable[_Union[ParameterHash, _Mapping]]] = ..., fault: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("job", "code", "message", "hint")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    job: str
    code: str
    message: str
    hint: str
    def __init__(self, job: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class Logged(_message.Message):
    __slots__ = ("job", "time_unix_s", "level", "message")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    time_unix_s: float
    level: str
    message: str
    def __init__(self, job: _Optional[str] = ..., time_unix_s: _Optional[float] = ..., level: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Calibrated(_message.Message):
    __slots__ = ("multiply_adds_per_s", "up_bytes_per_s", "down_bytes_per_s", "receipt_s", "fault")
    MULTIPLY_ADDS_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_S_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    multiply_adds_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    receipt_s: float
    fault: str
    def __init__(self, multiply_adds_per_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., receipt_s: _Optional[float] = ..., fault: _Optional[str] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("epoch", "welcome", "load_stage", "route", "void", "average", "abort_round", "commit", "save_stage", "release", "evaluate", "follow", "admit", "take_pass", "cut_off", "use_relays", "exchange", "check", "hash_stage", "recheck", "recount", "calibrate", "more")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOAD_STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    ABORT_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    SAVE_STAGE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    TAKE_PASS_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    USE_RELAYS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    HASH_STAGE_FIELD_NUMBER: _ClassVar[int]
    RECHECK_FIELD_NUMBER: _ClassVar[int]
    RECOUNT_FIELD_NUMBER: _ClassVar[int]
    CALIBRATE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    welcome: Welcome
    load_stage: LoadStage
    route: Route
    void: Void
    average: Average
    abort_round: AbortRound
    commit: Commit
    save_stage: SaveStage
    release: Release
    evaluate: Evaluate
    follow: Follow
    admit: Admit
    take_pass: TakePass
    cut_off: CutOff
    use_relays: UseRelays
    exchange: Exchange
    check: Check
    hash_stage: HashStage
    recheck: Recheck
    recount: Recount
    calibrate: Calibrate
    more: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., load_stage: _Optional[_Union[LoadStage, _Mapping]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., void: _Optional[_Union[Void, _Mapping]] = ..., average: _Optional[_Union[Average, _Mapping]] = ..., abort_round: _Optional[_Union[AbortRound, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., save_stage: _Optional[_Union[SaveStage, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., take_pass: _Optional[_Union[TakePass, _Mapping]] = ..., cut_off: _Optional[_Union[CutOff, _Mapping]] = ..., use_relays: _Optional[_Union[UseRelays, _Mapping]] = ..., exchange: _Optional[_Union[Exchange, _Mapping]] = ..., check: _Optional[_Union[Check, _Mapping]] = ..., hash_stage: _Optional[_Union[HashStage, _Mapping]] = ..., recheck: _Optional[_Union[Recheck, _Mapping]] = ..., recount: _Optional[_Union[Recount, _Mapping]] = ..., calibrate: _Optional[_Union[Calibrate, _Mapping]] = ..., more: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("peer", "heartbeat_s", "pass_key", "unix_s", "cut_off", "relays")
    PEER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PASS_KEY_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    heartbeat_s: float
    pass_key: bytes
    unix_s: float
    cut_off: _containers.RepeatedCompositeFieldContainer[CutOff]
    relays: _containers.RepeatedCompositeFieldContainer[RelayAt]
    def __init__(self, peer: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., pass_key: _Optional[bytes] = ..., unix_s: _Optional[float] = ..., cut_off: _Optional[_Iterable[_Union[CutOff, _Mapping]]] = ..., relays: _Optional[_Iterable[_Union[RelayAt, _Mapping]]] = ...) -> None: ...

class TakePass(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class CutOff(_message.Message):
    __slots__ = ("peer", "unix_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    unix_s: float
    def __init__(self, peer: _Optional[str] = ..., unix_s: _Optional[float] = ...) -> None: ...

class RelayAt(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class UseRelays(_message.Message):
    __slots__ = ("relays",)
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    relays: _containers.RepeatedCompositeFieldContainer[RelayAt]
    def __init__(self, relays: _Optional[_Iterable[_Union[RelayAt, _Mapping]]] = ...) -> None: ...

class Calibrate(_message.Message):
    __slots__ = ("seconds_max",)
    SECONDS_MAX_FIELD_NUMBER: _ClassVar[int]
    seconds_max: float
    def __init__(self, seconds_max: _Optional[float] = ...) -> None: ...

class StateFile(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class LoadStage(_message.Message):
    __slots__ = ("job", "timeline", "stage", "split", "version", "spec_json", "files", "step_on", "join", "held")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    STEP_ON_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    stage: int
    split: _containers.RepeatedScalarFieldContainer[int]
    version: int
    spec_json: str
    files: _containers.RepeatedCompositeFieldContainer[StateFile]
    step_on: str
    join: int
    held: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., stage: _Optional[int] = ..., split: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., spec_json: _Optional[str] = ..., files: _Optional[_Iterable[_Union[StateFile, _Mapping]]] = ..., step_on: _Optional[str] = ..., join: _Optional[int] = ..., held: _Optional[int] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("job", "timeline", "join", "version", "agreed", "digest", "donors", "answered")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    join: int
    version: int
    agreed: int
    digest: str
    donors: _containers.RepeatedCompositeFieldContainer[Hop]
    answered: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., join: _Optional[int] = ..., version: _Optional[int] = ..., agreed: _Optional[int] = ..., digest: _Optional[str] = ..., donors: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., answered: _Optional[int] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("job", "timeline", "join", "version")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    join: int
    version: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., join: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("microbatch", "version", "hops", "tokens", "targets", "stamp")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    version: int
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    tokens: bytes
    targets: bytes
    stamp: bytes
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., version: _Optional[int] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., tokens: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., stamp: _Optional[bytes] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("microbatch", "version", "stage", "number", "hops", "tokens", "targets")
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    microbatch: Microbatch
    version: int
    stage: int
    number: int
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    tokens: bytes
    targets: bytes
    def __init__(self, microbatch: _Optional[_Union[Microbatch, _Mapping]] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., number: _Optional[int] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., tokens: _Optional[bytes] = ..., targets: _Optional[bytes] = ...) -> None: ...

class Recount(_message.Message):
    __slots__ = ("timeline", "step", "stage", "number", "unit", "start", "stop", "indexes")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    stage: int
    number: int
    unit: str
    start: int
    stop: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., stage: _Optional[int] = ..., number: _Optional[int] = ..., unit: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("batch", "hops", "tokens", "targets")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    batch: EvaluationBatch
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    tokens: bytes
    targets: bytes
    def __init__(self, batch: _Optional[_Union[EvaluationBatch, _Mapping]] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., tokens: _Optional[bytes] = ..., targets: _Optional[bytes] = ...) -> None: ...

class Void(_message.Message):
    __slots__ = ("timeline", "step", "attempt")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    attempt: int
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "incarnation", "address", "start", "stop", "digest", "stage", "microbatches", "group")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    address: str
    start: int
    stop: int
    digest: str
    stage: int
    microbatches: int
    group: str
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., digest: _Optional[str] = ..., stage: _Optional[int] = ..., microbatches: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class Average(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "members", "tokens", "timeout_s", "ahead")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    members: _containers.RepeatedCompositeFieldContainer[Member]
    tokens: int
    timeout_s: float
    ahead: bool
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., tokens: _Optional[int] = ..., timeout_s: _Optional[float] = ..., ahead: _Optional[bool] = ...) -> None: ...

class Envoy(_message.Message):
    __slots__ = ("peer", "incarnation", "address", "timeline", "tokens")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    address: str
    timeline: int
    tokens: int
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., timeline: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "envoys", "timeout_s")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ENVOYS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    envoys: _containers.RepeatedCompositeFieldContainer[Envoy]
    timeout_s: float
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., envoys: _Optional[_Iterable[_Union[Envoy, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Recheck(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round", "number", "owner", "verifier")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    number: int
    owner: str
    verifier: str
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., number: _Optional[int] = ..., owner: _Optional[str] = ..., verifier: _Optional[str] = ...) -> None: ...

class AbortRound(_message.Message):
    __slots__ = ("timeline", "step", "unit", "round")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    unit: str
    round: Round
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class UnitRound(_message.Message):
    __slots__ = ("unit", "round")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    unit: str
    round: Round
    def __init__(self, unit: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("timeline", "step", "version", "rounds", "learning_rate", "scale", "skip", "donors", "rebases")
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    REBASES_FIELD_NUMBER: _ClassVar[int]
    timeline: int
    step: int
    version: int
    rounds: _containers.RepeatedCompositeFieldContainer[UnitRound]
    learning_rate: float
    scale: float
    skip: bool
    donors: _containers.RepeatedCompositeFieldContainer[Hop]
    rebases: bool
    def __init__(self, timeline: _Optional[int] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[UnitRound, _Mapping]]] = ..., learning_rate: _Optional[float] = ..., scale: _Optional[float] = ..., skip: _Optional[bool] = ..., donors: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., rebases: _Optional[bool] = ...) -> None: ...

class SaveStage(_message.Message):
    __slots__ = ("job", "timeline", "version", "optimizer", "island", "again")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    version: int
    optimizer: bool
    island: int
    again: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., optimizer: _Optional[bool] = ..., island: _Optional[int] = ..., again: _Optional[int] = ...) -> None: ...

class HashStage(_message.Message):
    __slots__ = ("job", "timeline", "version", "optimizer")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    version: int
    optimizer: bool
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., optimizer: _Optional[bool] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("job", "reason")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class StoreChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: StoreHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[StoreHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class StoreHeader(_message.Message):
    __slots__ = ("job", "peer", "incarnation", "timeline", "version", "stage", "total_bytes", "path", "sha256")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    job: str
    peer: str
    incarnation: int
    timeline: int
    version: int
    stage: int
    total_bytes: int
    path: str
    sha256: str
    def __init__(self, job: _Optional[str] = ..., peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., timeline: _Optional[int] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., total_bytes: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("sha256", "held_bytes", "busy")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    held_bytes: int
    busy: bool
    def __init__(self, sha256: _Optional[str] = ..., held_bytes: _Optional[int] = ..., busy: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job", "timeline", "path", "start", "stop")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: int
    path: str
    start: int
    stop: int
    def __init__(self, job: _Optional[str] = ..., timeline: _Optional[int] = ..., path: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class FetchCall(_message.Message):
    __slots__ = ("request", "arrived")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    request: FetchRequest
    arrived: int
    def __init__(self, request: _Optional[_Union[FetchRequest, _Mapping]] = ..., arrived: _Optional[int] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
