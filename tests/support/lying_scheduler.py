"""A scheduler that answers every call at once, each field with the same lie."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm.types import PROTOCOL_VERSION
from swarm.wire import jobs_pb2, members_pb2

SERVICES = {
    service.full_name: service
    for module in (jobs_pb2, members_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
ANSWERS = 2  # of a stream
DEPTH_MAX = 5  # of messages in messages
_RANGES = {
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class Lie:
    """The value of all fields of a kind; `named` has those of some fields alone."""

    real: float = 0.5
    whole: int = 1  # as near to it as the field can hold
    text: str = "running"
    named: dict[str, str] = field(default_factory=dict)


class LyingScheduler(grpc.GenericRpcHandler):
    """Every method of the services for clients; `lie` is what it says next."""

    def __init__(self) -> None:
        self.lie = Lie()

    def service(self, handler_call_details: Any) -> Any:
        _, service, name = handler_call_details.method.split("/")
        method = SERVICES[service].methods_by_name[name]

        def answer(request: Any, context: Any) -> bytes:
            if method.client_streaming:
                list(request)
            return self._filled(method.output_type).SerializeToString()

        def answers(request: Any, context: Any) -> Iterator[bytes]:
            return (answer(request, context) for _ in range(ANSWERS))

        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(answer)
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        return kind(answers if method.server_streaming else answer)

    def _filled(self, descriptor: Descriptor, depth: int = 0) -> Any:
        message = GetMessageClass(descriptor)()
        for each in descriptor.fields:
            inner = each.message_type
            if inner is not None and depth == DEPTH_MAX:
                continue
            if inner is not None and inner.GetOptions().map_entry:
                getattr(message, each.name)["x"] = self._value(inner.fields_by_name["value"])
            elif inner is not None and each.is_repeated:
                getattr(message, each.name).extend([self._filled(inner, depth + 1)] * 2)
            elif inner is not None:
                getattr(message, each.name).CopyFrom(self._filled(inner, depth + 1))
            elif each.is_repeated:
                getattr(message, each.name).extend([self._value(each)] * 2)
            else:
                setattr(message, each.name, self._value(each))
        return message

    def _value(self, one: FieldDescriptor) -> Any:
        if one.name == "protocol":
            return PROTOCOL_VERSION
        if one.type == FieldDescriptor.TYPE_DOUBLE:
            return self.lie.real
        if one.type == FieldDescriptor.TYPE_STRING:
            return self.lie.named.get(one.name, self.lie.text)
        if one.type == FieldDescriptor.TYPE_BYTES:
            return b"x"
        if one.type == FieldDescriptor.TYPE_BOOL:
            return True
        least, most = _RANGES[one.type]
        return min(max(self.lie.whole, least), most)


@contextmanager
def lying_scheduler() -> Iterator[tuple[LyingScheduler, str]]:
    """The scheduler and its address; it speaks plaintext."""
    made = LyingScheduler()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((made,))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield made, address
        finally:
            server.stop(None).wait()
