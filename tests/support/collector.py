"""An OpenTelemetry collector that keeps what it is sent: OTLP over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


class Collector(service.TraceServiceServicer):
    """Use as a context manager; `spans` are those that came so far, `services` who sent them."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(1))
        service.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        for sender in request.resource_spans:
            about = {attribute.key: attribute.value.string_value for attribute in sender.resource.attributes}
            self.services.add(about["service.name"])
            self.spans += [span for scope in sender.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()
