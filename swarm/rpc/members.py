"""A member's own calls of the Members service: for a newer certificate, or for one that it vouches for.

All calls block; a process with an event loop makes them on a thread.
"""

from __future__ import annotations

from typing import Any

import grpc

from swarm.pki.identity import Application, Identity
from swarm.pki.names import Role, scheduler_of
from swarm.rpc.channel import connect_sync, translate, with_times
from swarm.wire import members_pb2 as pb
from swarm.wire import members_pb2_grpc


def renewed(address: str, identity: Identity, timeout_s: float) -> Identity:
    """A certificate for the same name and a new key; SchedulerUnreachable, Revoked."""
    application = Application(identity.principal.name)
    return _granted(
        address, identity, application, "Renew", pb.RenewRequest(csr_pem=application.request_pem), timeout_s
    )


def vouched(address: str, admin: Identity, role: Role, name: str, timeout_s: float) -> Identity:
    """A certificate for another name, on the word of an admin; SchedulerUnreachable, RoleForbids."""
    application = Application(name)
    request = pb.IssueRequest(csr_pem=application.request_pem, role=role, name=name)
    return _granted(address, admin, application, "Issue", request, timeout_s)


def _granted(
    address: str, caller: Identity, application: Application, method: str, request: Any, timeout_s: float
) -> Identity:
    channel = connect_sync(address, caller, scheduler_of(caller.cluster).dns)
    try:
        stub: Any = members_pb2_grpc.MembersStub(channel)  # type: ignore[no-untyped-call]  # generated code
        certificate: pb.Certificate = getattr(stub, method)(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise with_times(translate(error, address), address) from error
    finally:
        channel.close()
    return application.granted(certificate.pem, certificate.ca_pem)
