from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VersionReply(_message.Message):
    __slots__ = ("product", "protocol", "epoch")
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    product: str
    protocol: int
    epoch: int
    def __init__(self, product: _Optional[str] = ..., protocol: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("sha256", "tokens", "size_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    tokens: int
    size_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ShardList(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class ShardChunk(_message.Message):
    __slots__ = ("shard", "payload", "resumes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    shard: Shard
    payload: bytes
    resumes: bool
    def __init__(self, shard: _Optional[_Union[Shard, _Mapping]] = ..., payload: _Optional[bytes] = ..., resumes: _Optional[bool] = ...) -> None: ...

class PutShardReply(_message.Message):
    __slots__ = ("sha256", "held_bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    held_bytes: int
    def __init__(self, sha256: _Optional[str] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("spec_json", "shards", "token_dtype", "vocabulary_size", "unigram_entropy", "tokenizer_files", "end_of_text", "files")
    class TokenizerFilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    UNIGRAM_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FILES_FIELD_NUMBER: _ClassVar[int]
    END_OF_TEXT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    token_dtype: str
    vocabulary_size: int
    unigram_entropy: float
    tokenizer_files: _containers.ScalarMap[str, bytes]
    end_of_text: int
    files: _containers.RepeatedCompositeFieldContainer[JobFile]
    def __init__(self, spec_json: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., token_dtype: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., unigram_entropy: _Optional[float] = ..., tokenizer_files: _Optional[_Mapping[str, bytes]] = ..., end_of_text: _Optional[int] = ..., files: _Optional[_Iterable[_Union[JobFile, _Mapping]]] = ...) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("spec_json",)
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    spec_json: str
    def __init__(self, spec_json: _Optional[str] = ...) -> None: ...

class JobFile(_message.Message):
    __slots__ = ("path", "sha256", "size_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: str
    size_bytes: int
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("job", "reason", "no_checkpoint")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    job: str
    reason: str
    no_checkpoint: bool
    def __init__(self, job: _Optional[str] = ..., reason: _Optional[str] = ..., no_checkpoint: _Optional[bool] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("job", "spec_json")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    job: str
    spec_json: str
    def __init__(self, job: _Optional[str] = ..., spec_json: _Optional[str] = ..., **kwargs) -> None: ...

class RemovedView(_message.Message):
    __slots__ = ("id", "freed_bytes", "left")
    ID_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    id: str
    freed_bytes: int
    left: str
    def __init__(self, id: _Optional[str] = ..., freed_bytes: _Optional[int] = ..., left: _Optional[str] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class Waste(_message.Message):
    __slots__ = ("kind", "name", "size_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    size_bytes: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("waste",)
    WASTE_FIELD_NUMBER: _ClassVar[int]
    waste: _containers.RepeatedCompositeFieldContainer[Waste]
    def __init__(self, waste: _Optional[_Iterable[_Union[Waste, _Mapping]]] = ...) -> None: ...

class CheckpointsRequest(_message.Message):
    __slots__ = ("job", "verify")
    JOB_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    job: str
    verify: bool
    def __init__(self, job: _Optional[str] = ..., verify: _Optional[bool] = ...) -> None: ...

class CheckpointView(_message.Message):
    __slots__ = ("step", "created_unix_s", "size_bytes", "weights_sha256", "loss", "optimizer", "fault")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    step: int
    created_unix_s: float
    size_bytes: int
    weights_sha256: str
    loss: float
    optimizer: bool
    fault: str
    def __init__(self, step: _Optional[int] = ..., created_unix_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., weights_sha256: _Optional[str] = ..., loss: _Optional[float] = ..., optimizer: _Optional[bool] = ..., fault: _Optional[str] = ...) -> None: ...

class CheckpointList(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointView]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointView, _Mapping]]] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("job", "every", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    every: int
    after: int
    def __init__(self, job: _Optional[str] = ..., every: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class StepView(_message.Message):
    __slots__ = ("step", "loss", "grad_norm", "learning_rate", "tokens", "skipped", "committed_unix_s", "evaluation_loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool
    committed_unix_s: float
    evaluation_loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., grad_norm: _Optional[float] = ..., learning_rate: _Optional[float] = ..., tokens: _Optional[int] = ..., skipped: _Optional[bool] = ..., committed_unix_s: _Optional[float] = ..., evaluation_loss: _Optional[float] = ...) -> None: ...

class StepList(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepView]
    def __init__(self, steps: _Optional[_Iterable[_Union[StepView, _Mapping]]] = ...) -> None: ...

class TraceRequest(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class StepTrace(_message.Message):
    __slots__ = ("job", "step", "every", "begin_unix_s", "spans")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    every: int
    begin_unix_s: float
    spans: _containers.RepeatedCompositeFieldContainer[StepSpan]
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., every: _Optional[int] = ..., begin_unix_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[StepSpan, _Mapping]]] = ...) -> None: ...

class StepSpan(_message.Message):
    __slots__ = ("name", "track", "begin_s", "duration_s", "stage", "index", "attempt", "beside")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    name: str
    track: str
    begin_s: float
    duration_s: float
    stage: int
    index: int
    attempt: int
    beside: bool
    def __init__(self, name: _Optional[str] = ..., track: _Optional[str] = ..., begin_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., stage: _Optional[int] = ..., index: _Optional[int] = ..., attempt: _Optional[int] = ..., beside: _Optional[bool] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("all", "state", "limit")
    ALL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    all: bool
    state: str
    limit: int
    def __init__(self, all: _Optional[bool] = ..., state: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class JobList(_message.Message):
    __slots__ = ("jobs", "troubles")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobView]
    troubles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobView, _Mapping]]] = ..., troubles: _Optional[_Iterable[str]] = ...) -> None: ...

class StageView(_message.Message):
    __slots__ = ("stage", "layers", "peers", "microbatches")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    stage: int
    layers: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    microbatches: int
    def __init__(self, stage: _Optional[int] = ..., layers: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., microbatches: _Optional[int] = ...) -> None: ...

class JobView(_message.Message):
    __slots__ = ("id", "name", "state", "reason", "since_unix_s", "created_unix_s", "step", "steps", "loss", "learning_rate", "grad_norm", "tokens_per_s", "eta_s", "tokens", "unigram_entropy", "stages", "microbatches_committed", "microbatches_in_flight", "microbatches_replayed", "weights_sha256", "spec_json", "error_code", "hint", "evaluation_loss", "evaluation_step", "checkpoint_step", "skipped_steps", "owner", "islands", "priority", "times_s", "peer_s", "lost_steps", "lost", "checkpoint_unix_s")
    class TimesSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNIGRAM_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ISLANDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    PEER_S_FIELD_NUMBER: _ClassVar[int]
    LOST_STEPS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    state: str
    reason: str
    since_unix_s: float
    created_unix_s: float
    step: int
    steps: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    eta_s: float
    tokens: int
    unigram_entropy: float
    stages: _containers.RepeatedCompositeFieldContainer[StageView]
    microbatches_committed: int
    microbatches_in_flight: int
    microbatches_replayed: int
    weights_sha256: str
    spec_json: str
    error_code: str
    hint: str
    evaluation_loss: float
    evaluation_step: int
    checkpoint_step: int
    skipped_steps: int
    owner: str
    islands: _containers.RepeatedCompositeFieldContainer[IslandView]
    priority: int
    times_s: _containers.ScalarMap[str, float]
    peer_s: float
    lost_steps: int
    lost: str
    checkpoint_unix_s: float
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., since_unix_s: _Optional[float] = ..., created_unix_s: _Optional[float] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., grad_norm: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., tokens: _Optional[int] = ..., unigram_entropy: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[StageView, _Mapping]]] = ..., microbatches_committed: _Optional[int] = ..., microbatches_in_flight: _Optional[int] = ..., microbatches_replayed: _Optional[int] = ..., weights_sha256: _Optional[str] = ..., spec_json: _Optional[str] = ..., error_code: _Optional[str] = ..., hint: _Optional[str] = ..., evaluation_loss: _Optional[float] = ..., evaluation_step: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., skipped_steps: _Optional[int] = ..., owner: _Optional[str] = ..., islands: _Optional[_Iterable[_Union[IslandView, _Mapping]]] = ..., priority: _Optional[int] = ..., times_s: _Optional[_Mapping[str, float]] = ..., peer_s: _Optional[float] = ..., lost_steps: _Optional[int] = ..., lost: _Optional[str] = ..., checkpoint_unix_s: _Optional[float] = ...) -> None: ...

class IslandView(_message.Message):
    __slots__ = ("island", "peers", "step", "exchanges", "waits_for", "state", "microbatches", "microbatches_per_s")
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_PER_S_FIELD_NUMBER: _ClassVar[int]
    island: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    step: int
    exchanges: int
    waits_for: str
    state: str
    microbatches: int
    microbatches_per_s: float
    def __init__(self, island: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., exchanges: _Optional[int] = ..., waits_for: _Optional[str] = ..., state: _Optional[str] = ..., microbatches: _Optional[int] = ..., microbatches_per_s: _Optional[float] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("state", "stage")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    state: str
    stage: int
    def __init__(self, state: _Optional[str] = ..., stage: _Optional[int] = ...) -> None: ...

class PeerView(_message.Message):
    __slots__ = ("id", "state", "reason", "since_unix_s", "address", "http_address", "device", "threads", "memory_bytes", "job", "stage", "pace_s", "outstanding", "product", "incarnation", "island", "slow_bfloat16", "site", "links", "host_bytes", "multiply_adds_per_s", "up_bytes_per_s", "down_bytes_per_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PACE_S_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    SLOW_BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MULTIPLY_ADDS_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    reason: str
    since_unix_s: float
    address: str
    http_address: str
    device: str
    threads: int
    memory_bytes: int
    job: str
    stage: int
    pace_s: float
    outstanding: int
    product: str
    incarnation: int
    island: str
    slow_bfloat16: bool
    site: str
    links: _containers.RepeatedCompositeFieldContainer[LinkView]
    host_bytes: int
    multiply_adds_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., since_unix_s: _Optional[float] = ..., address: _Optional[str] = ..., http_address: _Optional[str] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., job: _Optional[str] = ..., stage: _Optional[int] = ..., pace_s: _Optional[float] = ..., outstanding: _Optional[int] = ..., product: _Optional[str] = ..., incarnation: _Optional[int] = ..., island: _Optional[str] = ..., slow_bfloat16: _Optional[bool] = ..., site: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkView, _Mapping]]] = ..., host_bytes: _Optional[int] = ..., multiply_adds_per_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ...) -> None: ...

class LinkView(_message.Message):
    __slots__ = ("to", "bytes_per_s", "receipt_s")
    TO_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_S_FIELD_NUMBER: _ClassVar[int]
    to: str
    bytes_per_s: float
    receipt_s: float
    def __init__(self, to: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., receipt_s: _Optional[float] = ...) -> None: ...

class PeerList(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerView]
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerView, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class FreePeerRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class FreePeerReply(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: str
    def __init__(self, peer: _Optional[str] = ...) -> None: ...

class DrainView(_message.Message):
    __slots__ = ("peer", "waits_for")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    peer: PeerView
    waits_for: str
    def __init__(self, peer: _Optional[_Union[PeerView, _Mapping]] = ..., waits_for: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("about", "microbatch")
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    about: str
    microbatch: MicrobatchName
    def __init__(self, about: _Optional[str] = ..., microbatch: _Optional[_Union[MicrobatchName, _Mapping]] = ...) -> None: ...

class MicrobatchName(_message.Message):
    __slots__ = ("step", "index")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    step: int
    index: int
    def __init__(self, step: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("kind", "id", "facts")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: str
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[str] = ..., facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("topic", "text", "numbers")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    text: str
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, topic: _Optional[str] = ..., text: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job", "follow", "tail", "peer", "stage", "level", "since_unix_s", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    follow: bool
    tail: int
    peer: str
    stage: int
    level: str
    since_unix_s: float
    after: int
    def __init__(self, job: _Optional[str] = ..., follow: _Optional[bool] = ..., tail: _Optional[int] = ..., peer: _Optional[str] = ..., stage: _Optional[int] = ..., level: _Optional[str] = ..., since_unix_s: _Optional[float] = ..., after: _Optional[int] = ...) -> None: ...

class LogEntry(_message.Message):
    __slots__ = ("time_unix_s", "level", "peer", "stage", "message", "number")
    TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    time_unix_s: float
    level: str
    peer: str
    stage: int
    message: str
    number: int
    def __init__(self, time_unix_s: _Optional[float] = ..., level: _Optional[str] = ..., peer: _Optional[str] = ..., stage: _Optional[int] = ..., message: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("payload", "answer_bytes", "dial_port", "word")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIAL_PORT_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    answer_bytes: int
    dial_port: int
    word: bytes
    def __init__(self, payload: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ..., dial_port: _Optional[int] = ..., word: _Optional[bytes] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("payload", "unix_s", "caller", "fault")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    unix_s: float
    caller: str
    fault: str
    def __init__(self, payload: _Optional[bytes] = ..., unix_s: _Optional[float] = ..., caller: _Optional[str] = ..., fault: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("job", "step", "start", "arrived")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: str
    start: int
    arrived: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[str] = ..., start: _Optional[int] = ..., arrived: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: FileHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[FileHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FileHeader(_message.Message):
    __slots__ = ("path", "size_bytes", "sha256", "step")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    path: str
    size_bytes: int
    sha256: str
    step: int
    def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...
