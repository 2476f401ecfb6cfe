"""`swarm login`, `swarm token`, `swarm identity`: join a swarm, invite and revoke members."""

from __future__ import annotations

import getpass
import re
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from client.connection import dial, identity_for
from client.shell import Shell
from client.views import FittedTable
from swarm.errors import UsageError
from swarm.pki.files import write_private
from swarm.pki.identity import Application
from swarm.pki.joining import JOINS_FILE
from swarm.pki.joining import join as join_swarm
from swarm.pki.names import MEMBERS, PEOPLE, Role, check_name, check_role, verb_of
from swarm.pki.profiles import SCHEDULER_FILE, profile_folder
from swarm.pki.tokens import read_line
from swarm.text import duration, is_loopback, seconds
from swarm.wire import members_pb2 as pb
from swarm.wire.jobs_pb2 import FreePeerRequest


def login(
    context: typer.Context,
    join: Annotated[
        str, typer.Option(metavar="LINE", envvar="SWARM_JOIN", help="The line that swarm token create printed.")
    ] = "",
    join_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same, from a file.", show_default=False)
    ] = None,
    name: Annotated[str, typer.Option(help="Your name in this swarm.", show_default="your login")] = "",
) -> int:
    """Become a member: keep a key and a certificate for the scheduler that the line leads to."""
    shell: Shell = context.obj
    line = read_line(join, join_file)
    if line is None:
        raise UsageError("missing --join LINE", hint="an admin prints one: swarm token create --role submitter")
    own = check_name(name or _login_name())
    joined = join_swarm(line, own, Application(own), verb="login")
    folder = profile_folder(joined.scheduler)
    joined.identity.save(folder)
    write_private(folder / JOINS_FILE, line.address.encode())
    write_private(folder / SCHEDULER_FILE, joined.scheduler.encode())
    if shell.json:
        principal = joined.identity.principal
        shell.data({"scheduler": joined.scheduler, "role": principal.role, "name": principal.name})
    shell.say(f"you are {joined.identity.principal} at {joined.scheduler}; your key is in {folder}")
    shell.say(f"try: swarm ls --scheduler {joined.scheduler}, or set SWARM_SCHEDULER={joined.scheduler}")
    return 0


def token(
    context: typer.Context,
    action: Annotated[
        Literal["create", "ls", "revoke"], typer.Argument(help="create: print a line to join with; ls; revoke ID.")
    ] = "ls",
    id: Annotated[str, typer.Argument(metavar="[ID]", help="revoke: which one.", show_default=False)] = "",
    role: Annotated[str, typer.Option(help=f"create: one of {', '.join(MEMBERS)}.", show_default=False)] = "",
    ttl: Annotated[str, typer.Option(help="create: how long it can be used, such as 15m, 2h or 7d.")] = "15m",
    uses: Annotated[int, typer.Option(min=1, max=1000, help="create: how many may join with it.")] = 1,
    name: Annotated[
        str,
        typer.Option(
            help="create: names it is for, such as gpu-*. A stage server is named HOST-xxxxxx.", show_default="any"
        ),
    ] = "",
) -> int:
    """Let others join: create a token, list those that wait to be used, or revoke one."""
    shell: Shell = context.obj
    check_proved(shell)
    if action == "create":
        if not role:
            raise UsageError("missing --role", hint=f"one of: {', '.join(MEMBERS)}")
        request = pb.CreateTokenRequest(role=check_role(role), ttl_s=_seconds(ttl), uses=uses, names=name)
        with dial(shell) as scheduler:
            made = scheduler.call("CreateToken", request)
        if shell.json:
            shell.data({"line": made.line} | _token_values(made.token))
        else:
            print(made.line, flush=True)
        command = _joining(Role(made.token.role), made.line)
        shell.say(f"good for {duration(_seconds(ttl))}; on the other machine: {command}")
        return 0
    with dial(shell) as scheduler:
        if action == "revoke":
            tokens = [scheduler.call("RevokeToken", pb.RevokeTokenRequest(id=_given(id, "ID")))]
        else:
            tokens = scheduler.call("ListTokens", pb.ListTokensRequest()).tokens
    if shell.json:
        shell.data([_token_values(token) for token in tokens])
    elif action == "revoke":
        shell.say(f"token {tokens[0].id} is good no more; who has joined with it stays: swarm identity ls")
    elif not tokens:
        shell.say("no token waits to be used; make one with: swarm token create --role stage-server")
    else:
        shell.out.print(_token_table(tokens))
    return 0


def identity(
    context: typer.Context,
    action: Annotated[
        Literal["ls", "show", "revoke", "release"],
        typer.Argument(help="ls: all members; show: yourself; revoke NAME; release NAME: end a quarantine."),
    ] = "ls",
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]",
            help="revoke: NAME, or ROLE/NAME; release: name of a stage server.",
            show_default=False,
        ),
    ] = "",
    reason: Annotated[str, typer.Option(help="revoke: the reason that a refused member is told.")] = "",
) -> int:
    """List the members of the swarm, show who you are, take a member out at once, or give a stage server stages again
    that was quarantined for wrong numbers."""
    shell: Shell = context.obj
    if action == "release":
        return _release(shell, _given(name, "NAME"))
    check_proved(shell)
    if action == "show":
        return _show_self(shell)
    with dial(shell) as scheduler:
        if action == "revoke":
            members = [scheduler.call("RevokeMember", pb.RevokeMemberRequest(name=_given(name, "NAME"), reason=reason))]
        else:
            members = scheduler.call("ListMembers", pb.ListMembersRequest()).members
    if shell.json:
        shell.data([_member_values(member) for member in members])
    elif action == "revoke":
        one = members[0]
        shell.say(f"{one.role} {one.name} is out; its certificate is refused from now on{_after(one.role)}")
    else:
        shell.out.print(_member_table(members))
    return 0


def _release(shell: Shell, name: str) -> int:
    with dial(shell) as scheduler:
        freed = scheduler.call("FreePeer", FreePeerRequest(peer=name)).peer
    if shell.json:
        shell.data({"name": freed})
    shell.say(f"stage server {freed} is given stages again; nothing is held against it any more")
    return 0


def _joining(role: Role, line: str) -> str:
    """What the invited member types. Others must reach a stage server and a relay: on another machine than the
    scheduler's these listen at its address on the way there, which others may not reach."""
    command = f"swarm {verb_of(role)} --join LINE"
    if role not in (Role.STAGE_SERVER, Role.RELAY) or is_loopback(line.partition("#")[0].rpartition(":")[0]):
        return command
    if role is Role.RELAY:
        return f"{command} (it must be reached by all; by another address: --listen HOST:PORT)"
    return f"{command} (reached by another address: --listen HOST:PORT; behind a NAT: --via-relay)"


def _after(role: str) -> str:
    """What becomes of the work of a member that was taken out."""
    if role == Role.STAGE_SERVER:
        return ", its work is done by others"
    return ", its jobs go on" if role in PEOPLE else ""


def check_proved(shell: Shell) -> None:
    """UsageError with --insecure."""
    if shell.insecure:
        raise UsageError("a scheduler with --insecure takes everybody and has no members", hint="leave --insecure out")


def _show_self(shell: Shell) -> int:
    identity = identity_for(shell)
    assert identity is not None
    ends_s = identity.ends_unix_s - time.time()
    principal = identity.principal
    if shell.json:
        shell.data({"role": principal.role, "name": principal.name, "swarm": principal.cluster, "ends_s": ends_s})
    else:
        shell.out.print(f"{principal} of swarm {principal.cluster}", markup=False, highlight=False)
        shell.say(f"the certificate in {profile_folder(shell.scheduler)} ends in {duration(ends_s)}; use renews it")
    return 0


def _seconds(text: str) -> float:
    """The seconds of --ttl; UsageError if it is no time span."""
    found = seconds(text)
    if found is None:
        raise UsageError(f'--ttl is a time such as 15m, 2h or 7d, not "{text[:40]}"')
    return found


def _given(value: str, what: str) -> str:
    if not value:
        raise UsageError(f"missing argument {what}", hint="list them with: ls")
    return value


def _login_name() -> str:
    try:
        login = getpass.getuser()
    except OSError:
        login = ""
    return re.sub(r"[^a-z0-9]+", "-", login.lower()).strip("-")[:63] or "somebody"


def _token_values(token: pb.TokenView) -> dict[str, object]:
    return {
        "id": token.id,
        "role": token.role,
        "names": token.names,
        "uses_left": token.uses_left,
        "expires_unix_s": token.expires_unix_s,
        "created_by": token.created_by,
    }


def _member_values(member: pb.MemberView) -> dict[str, object]:
    return {
        "role": member.role,
        "name": member.name,
        "state": member.state,
        "certificate_ends_unix_s": member.ends_unix_s,
        "invited_by": member.invited_by,
        "reason": member.reason,
    }


def _token_table(tokens: list[pb.TokenView]) -> FittedTable:
    columns = ("ID", "ROLE", "NAMES", "USES", "EXPIRES IN", "MADE BY")
    rows = []
    for token in tokens:
        left = duration(token.expires_unix_s - time.time())
        rows.append((token.id, token.role, token.names, str(token.uses_left), left, token.created_by))
    return FittedTable(columns, [tuple(map(Text, row)) for row in rows], dropped_first=("USES", "NAMES"))


def _member_table(members: list[pb.MemberView]) -> FittedTable:
    columns = ("ROLE", "NAME", "STATE", "CERTIFICATE", "INVITED BY", "REASON")
    rows = []
    for member in members:
        left_s = member.ends_unix_s - time.time()
        ends = f"{duration(left_s)} left" if left_s > 0 else "ended"
        rows.append((member.role, member.name, member.state, ends, member.invited_by, member.reason or "-"))
    return FittedTable(columns, [tuple(map(Text, row)) for row in rows], dropped_first=("INVITED BY", "CERTIFICATE"))
