"""Joining a swarm with a line that one of its admins gave out.

    GET  /v1/ca      over TLS that proves nothing yet  -> the authority, whose key the line names
    POST /v1/join    over TLS that it vouches for: the secret, a request -> certificate, whom to trust, where
    POST /v1/renew   the same, with a certificate that has ended in the place of the secret

Only an authority with that key is trusted. So a man in the middle learns no secret. The second answer comes from the
scheduler itself.

A member that was away until its certificate ended comes back with it: the request is signed with the key of that
certificate, and the answer is a younger certificate for the same key. So a request that somebody recorded is worth
nothing without the key. Not chosen: a call of the Members service, as its port admits no certificate that has ended.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from swarm.errors import (
    ERROR_BY_CODE,
    ClocksDiffer,
    InvalidConfig,
    NotAdmitted,
    SchedulerUnreachable,
    WrongSwarm,
)
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S, cluster_of, pin_of
from swarm.pki.identity import Application, Identity
from swarm.pki.names import Role, scheduler_of
from swarm.pki.tokens import JoinLine
from swarm.text import is_address, spoken_duration, utc

CA_PATH, JOIN_PATH, RENEW_PATH = "/v1/ca", "/v1/join", "/v1/renew"
JOINS_FILE = "joins"  # beside an identity: HOST:PORT where it joined
DEFAULT_JOIN_PORT = 7949
ANSWER_BYTES_MAX = 64 << 10
CALL_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    identity: Identity
    scheduler: str  # HOST:PORT


def join(
    line: JoinLine, name: str, application: Application, wall_s: Callable[[], float] = time.time, *, verb: str = ""
) -> Joined:
    """Become a member; blocking. `name` may be empty if the token fixes it. A line for another command of `swarm` than
    `verb` is refused, and can still be used there.

    The same application may be handed in again if the answer was lost. Raises SchedulerUnreachable, WrongSwarm,
    ClocksDiffer, or the scheduler's error (BadToken, Refused).
    """
    asked = {"id": line.id, "secret": line.secret, "name": name, "csr": application.request_pem.decode(), "verb": verb}
    answer = _ask(line.address, line.pin, "token", JOIN_PATH, asked, wall_s)
    identity = application.granted(_text(answer, "certificate").encode(), _text(answer, "ca").encode())
    if identity.principal.role is Role.SCHEDULER:
        raise NotAdmitted(f"{line.address} answered with a certificate that is not for a member")
    scheduler = _text(answer, "scheduler")
    if not is_address(scheduler):  # it names the folder of the profile
        raise NotAdmitted(f"{line.address} answered with an address of its scheduler that is none")
    return Joined(identity, scheduler)


def renew_ended(scheduler: str, folder: Path, held: Identity, wall_s: Callable[[], float] = time.time) -> Identity:
    """A certificate in the place of `held`, which has ended, for the same key; blocking.

    It is asked for where `folder`, which keeps `held`, says that it joined, and else beside the scheduler at HOST:PORT.
    Raises SchedulerUnreachable, WrongSwarm, ClocksDiffer, or the scheduler's error (CertificateEnded, Revoked).
    """
    application = Application(held.principal.name, held.key_pem)
    asked = {"certificate": held.certificate_pem.decode(), "csr": application.request_pem.decode()}
    unreached: list[SchedulerUnreachable] = []
    for address in _joins(scheduler, folder):
        try:
            answer = _ask(address, held.pin, "certificate", RENEW_PATH, asked, wall_s)
        except SchedulerUnreachable as error:
            unreached.append(error)
            continue
        identity = application.granted(_text(answer, "certificate").encode(), _text(answer, "ca").encode())
        if identity.principal != held.principal:
            raise NotAdmitted(f"{address} answered with a certificate of {identity.principal}, not {held.principal}")
        return identity
    told = unreached[0] if unreached else SchedulerUnreachable(f"{scheduler} is no address")
    raise SchedulerUnreachable(f"the certificate of {held.principal} has ended, and {told.message}", hint=told.hint)


def _joins(scheduler: str, folder: Path) -> list[str]:
    """Where a scheduler may take joins, the likelier address first."""
    try:
        kept = (folder / JOINS_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        kept = ""
    usual = f"{scheduler.rpartition(':')[0]}:{DEFAULT_JOIN_PORT}"
    return [address for address in dict.fromkeys((kept, usual)) if is_address(address)]


def _ask(
    address: str, pin: str, source: str, path: str, asked: dict[str, str], wall_s: Callable[[], float]
) -> dict[str, Any]:
    """The answer of a server that proves to be the swarm of the pin; `source` says where the pin comes from."""
    unproved = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unproved.check_hostname = False
    unproved.verify_mode = ssl.CERT_NONE
    answer, there_unix_s = _call(address, unproved, "GET", CA_PATH)
    try:
        authority = keys.read_certificate(_text(answer, "ca").encode(errors="replace"))
        shown = pin_of(authority)
    except InvalidConfig:
        authority, shown = None, "nobody"
    if authority is None or shown != pin:
        raise WrongSwarm(
            f"{address} is not the swarm of the {source}: its authority is {shown[:8]}…, the {source} wants {pin[:8]}…",
            hint="the address is wrong, or somebody stands in between; the secret was not sent",
        )
    _check_clocks(address, wall_s(), there_unix_s)
    # This certificate alone: others may have come with it.
    proved = ssl.create_default_context(cadata=keys.certificate_pem(authority).decode())
    return _call(address, proved, "POST", path, asked, scheduler_of(cluster_of(authority)).dns)[0]


class _Connection(http.client.HTTPSConnection):
    """HTTPS to an address whose certificate must bear a name that is not the address."""

    def __init__(self, address: str, context: ssl.SSLContext, server_name: str) -> None:
        host, _, port = address.rpartition(":")
        super().__init__(host.strip("[]"), int(port), timeout=CALL_S_MAX, context=context)
        self._tls, self._server_name = context, server_name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name or None)


def _call(
    address: str,
    context: ssl.SSLContext,
    method: str,
    path: str,
    body: dict[str, str] | None = None,
    server_name: str = "",
) -> tuple[dict[str, Any], float | None]:
    """The answer, and its time by the answering machine's clock."""
    connection = _Connection(address, context, server_name)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"} if body else {})
        with connection.getresponse() as reply:
            content = reply.read(ANSWER_BYTES_MAX + 1)
    except ssl.SSLCertVerificationError as error:
        raise WrongSwarm(
            f"{address} could not prove that it is the swarm of the token: {error.verify_message}",
            hint="the address is wrong, somebody stands in between, or clocks differ; the secret was not sent",
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise SchedulerUnreachable(
            f"nobody takes joins at {address}: {error or type(error).__name__}",
            hint="check that the scheduler runs, and that this machine reaches its --join-listen address",
        ) from error
    finally:
        connection.close()
    try:
        answer = json.loads(content) if len(content) <= ANSWER_BYTES_MAX else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise SchedulerUnreachable(f"what answers at {address} takes no joins", hint="is it the --join-listen address?")
    if reply.status != http.HTTPStatus.OK:
        kind = ERROR_BY_CODE.get(str(answer.get("code")), NotAdmitted)
        raise kind(str(answer.get("message", reply.reason))[:1000], hint=str(answer.get("hint", ""))[:1000])
    return answer, _date(reply.getheader("Date", ""))


def _date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _check_clocks(address: str, here_unix_s: float, there_unix_s: float | None) -> None:
    """ClocksDiffer if certificates that are made there would not be good here."""
    if there_unix_s is not None and abs(here_unix_s - there_unix_s) > CLOCK_SLACK_S:
        apart = spoken_duration(abs(here_unix_s - there_unix_s))
        raise ClocksDiffer(
            f"clocks differ by {apart}: here it is {utc(here_unix_s)}, at {address} {utc(there_unix_s)}",
            hint="set the clock that is wrong, then try again; the secret was not sent",
        )


def _text(answer: dict[str, Any], key: str) -> str:
    value = answer.get(key)
    if not isinstance(value, str):
        raise SchedulerUnreachable(f"the answer to the join lacks {key}", hint="both sides need the same version")
    return value
