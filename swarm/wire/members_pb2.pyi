from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RenewRequest(_message.Message):
    __slots__ = ("csr_pem",)
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    csr_pem: bytes
    def __init__(self, csr_pem: _Optional[bytes] = ...) -> None: ...

class IssueRequest(_message.Message):
    __slots__ = ("csr_pem", "role", "name")
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    csr_pem: bytes
    role: str
    name: str
    def __init__(self, csr_pem: _Optional[bytes] = ..., role: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("pem", "ca_pem")
    PEM_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    pem: bytes
    ca_pem: bytes
    def __init__(self, pem: _Optional[bytes] = ..., ca_pem: _Optional[bytes] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("role", "ttl_s", "uses", "names")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    role: str
    ttl_s: float
    uses: int
    names: str
    def __init__(self, role: _Optional[str] = ..., ttl_s: _Optional[float] = ..., uses: _Optional[int] = ..., names: _Optional[str] = ...) -> None: ...

class TokenLine(_message.Message):
    __slots__ = ("line", "token")
    LINE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    line: str
    token: TokenView
    def __init__(self, line: _Optional[str] = ..., token: _Optional[_Union[TokenView, _Mapping]] = ...) -> None: ...

class TokenView(_message.Message):
    __slots__ = ("id", "role", "names", "uses_left", "expires_unix_s", "created_by")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    USES_LEFT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    names: str
    uses_left: int
    expires_unix_s: float
    created_by: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., names: _Optional[str] = ..., uses_left: _Optional[int] = ..., expires_unix_s: _Optional[float] = ..., created_by: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenView]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenView, _Mapping]]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberList(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberView]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberView, _Mapping]]] = ...) -> None: ...

class MemberView(_message.Message):
    __slots__ = ("role", "name", "state", "ends_unix_s", "invited_by", "reason")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    INVITED_BY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    state: str
    ends_unix_s: float
    invited_by: str
    reason: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[str] = ..., ends_unix_s: _Optional[float] = ..., invited_by: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RevokeMemberRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityView(_message.Message):
    __slots__ = ("swarm", "pins", "ca_pem", "ends_unix_s")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    swarm: str
    pins: _containers.RepeatedScalarFieldContainer[str]
    ca_pem: bytes
    ends_unix_s: float
    def __init__(self, swarm: _Optional[str] = ..., pins: _Optional[_Iterable[str]] = ..., ca_pem: _Optional[bytes] = ..., ends_unix_s: _Optional[float] = ...) -> None: ...
