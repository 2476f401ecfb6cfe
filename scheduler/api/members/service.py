"""Answers `swarm token` and `swarm identity`, and renews certificates: the Members service."""

from __future__ import annotations

from typing import Any

import grpc.aio

from scheduler.api.views import named
from scheduler.brain.members.enrolment import Member, Token
from scheduler.storage.members.book import Members
from swarm.errors import NotAdmitted
from swarm.pki.names import check_role
from swarm.rpc import channel
from swarm.rpc.guard import CALLER, Caller
from swarm.wire import members_pb2 as pb
from swarm.wire import members_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@channel.answers
class MemberService(members_pb2_grpc.MembersServicer):
    """`join_address` is where tokens lead to."""

    def __init__(self, members: Members, join_address: str) -> None:
        self._members = members
        self._join_address = join_address

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.Certificate:
        pem = await self._members.renew(_caller(), request.csr_pem)
        return pb.Certificate(pem=pem, ca_pem=self._members.authority.pem)

    async def Issue(self, request: pb.IssueRequest, context: Context) -> pb.Certificate:
        by = str(_caller().principal)
        pem = await self._members.issue(request.csr_pem, check_role(request.role), request.name, by)
        return pb.Certificate(pem=pem, ca_pem=self._members.authority.pem)

    async def CreateToken(self, request: pb.CreateTokenRequest, context: Context) -> pb.TokenLine:
        line, token = await self._members.create_token(
            check_role(request.role),
            request.ttl_s,
            request.uses,
            request.names,
            str(_caller().principal),
            self._join_address,
        )
        return pb.TokenLine(line=str(line), token=_token_view(token))

    async def ListTokens(self, request: pb.ListTokensRequest, context: Context) -> pb.TokenList:
        return pb.TokenList(tokens=map(_token_view, self._members.tokens()))

    async def RevokeToken(self, request: pb.RevokeTokenRequest, context: Context) -> pb.TokenView:
        return _token_view(await self._members.revoke_token(request.id))

    async def ListMembers(self, request: pb.ListMembersRequest, context: Context) -> pb.MemberList:
        return pb.MemberList(members=map(_member_view, self._members.members()))

    async def RevokeMember(self, request: pb.RevokeMemberRequest, context: Context) -> pb.MemberView:
        return _member_view(await self._members.revoke(request.name, request.reason))

    async def ShowAuthority(self, request: pb.AuthorityRequest, context: Context) -> pb.AuthorityView:
        authority = self._members.authority
        return pb.AuthorityView(
            swarm=authority.cluster,
            pins=[authority.pin],
            ca_pem=authority.pem,
            ends_unix_s=authority.ends_unix_s,
        )


def _caller() -> Caller:
    caller = CALLER.get()
    if caller is None:
        raise NotAdmitted(
            "this scheduler takes plaintext from anybody and has no members", hint="start it without --insecure"
        )
    return caller


def _token_view(token: Token) -> pb.TokenView:
    return named(pb.TokenView, token)


def _member_view(member: Member) -> pb.MemberView:
    return named(pb.MemberView, member, state="revoked" if member.is_revoked else "active")
