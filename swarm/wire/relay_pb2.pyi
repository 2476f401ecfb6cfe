from swarm.wire import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Bytes(_message.Message):
    __slots__ = ("payload", "end")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    end: bool
    def __init__(self, payload: _Optional[bytes] = ..., end: _Optional[bool] = ...) -> None: ...

class ListenUp(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    def __init__(self, token: _Optional[bytes] = ...) -> None: ...

class ListenDown(_message.Message):
    __slots__ = ("connection", "sender", "job")
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    connection: str
    sender: str
    job: str
    def __init__(self, connection: _Optional[str] = ..., sender: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class RelayUp(_message.Message):
    __slots__ = ("hello", "carried")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    hello: RelayHello
    carried: _containers.RepeatedCompositeFieldContainer[Carried]
    def __init__(self, hello: _Optional[_Union[RelayHello, _Mapping]] = ..., carried: _Optional[_Iterable[_Union[Carried, _Mapping]]] = ...) -> None: ...

class RelayHello(_message.Message):
    __slots__ = ("protocol", "product", "address")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    product: str
    address: str
    def __init__(self, protocol: _Optional[int] = ..., product: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Carried(_message.Message):
    __slots__ = ("job", "sender", "to", "size_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: str
    sender: str
    to: str
    size_bytes: int
    def __init__(self, job: _Optional[str] = ..., sender: _Optional[str] = ..., to: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class RelayDown(_message.Message):
    __slots__ = ("welcome", "cut_off")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    CUT_OFF_FIELD_NUMBER: _ClassVar[int]
    welcome: _session_pb2.Welcome
    cut_off: _session_pb2.CutOff
    def __init__(self, welcome: _Optional[_Union[_session_pb2.Welcome, _Mapping]] = ..., cut_off: _Optional[_Union[_session_pb2.CutOff, _Mapping]] = ...) -> None: ...
