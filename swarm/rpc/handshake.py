"""Explains failed connections: turns gRPC's text about a TLS handshake into an error for people.

gRPC has one status for all such failures (UNAVAILABLE), and quotes TLS in its text. It tells neither the name of the
answering machine nor its clock: the certificate shown at the address does (`with_times`).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from typing import TypeVar

from swarm.errors import AnotherAnswers, ClocksDiffer, InvalidConfig, NotAdmitted, SwarmError, WrongSwarm
from swarm.pki import keys
from swarm.pki.authority import CLOCK_SLACK_S
from swarm.text import utc

LOOK_S_MAX = 3.0
Error = TypeVar("Error", bound=SwarmError)

# (what gRPC says, the error, its message after the address, its hint)
_Row = tuple[str, type[SwarmError], str, str]
_TABLE: tuple[_Row, ...] = (
    (
        "certificate is not yet valid",
        ClocksDiffer,
        "shows a certificate that is not good yet, as here it is {now}",
        "set the clock of this machine, or of that one",
    ),
    (
        "certificate has expired",
        ClocksDiffer,
        "shows a certificate that has ended, as here it is {now}",
        "set the clock that is wrong; if both are right, restart what runs there",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        WrongSwarm,
        "is of another swarm",
        "the address is wrong, somebody stands in between, or its scheduler was set up anew: then join again",
    ),
    (
        "Hostname Verification",
        AnotherAnswers,
        "is of this swarm, and somebody else than was meant",
        "the address is wrong, or was given to another process since: check --announce",
    ),
    (
        "WRONG_VERSION_NUMBER",
        NotAdmitted,
        "speaks no TLS",
        "if it was started with --insecure, add --insecure here too; else it is none of ours",
    ),
    (
        "ALPN",
        NotAdmitted,
        "speaks TLS, but not gRPC",
        "is it the address of --join-listen, or of the metrics? Name the one of --listen",
    ),
)
_CLOSED = "Socket closed"
_CAUSES = (  # of the operating system; what a peer or gRPC says itself stays as it is
    "Connection refused",
    "Connection reset by peer",
    "Connection timed out",
    "Broken pipe",
    "Network is unreachable",
    "Network is down",
    "No route to host",
    "Host is down",
    "Host is unreachable",
    "Permission denied",
    "Cannot assign requested address",
    "Address family not supported by protocol",
    "Too many open files",
    "Domain name not found",
)


def explained(details: str, address: str, now_unix_s: float) -> SwarmError | None:
    """The error behind gRPC's text about a connection that was never made; None if there was just no answer."""
    for said, kind, message, hint in _TABLE:
        if said in details:
            return kind(f"what answers at {address} {message.format(now=utc(now_unix_s))}", hint=hint)
    if "failed to connect" in details and _CLOSED in details:
        return SwarmError(
            f"what answers at {address} closed the connection at once",
            hint=f"it does not take this certificate: its clock differs (here it is {utc(now_unix_s)}), or it was set "
            "up anew; or only one of both sides has --insecure",
        )
    return None


def cause_of(details: str) -> str:
    """What went wrong according to gRPC's text about a connection, which repeats addresses and names its own parts.

    The operating system's words if it has some, else what follows the last address; whole if it has neither.
    """
    said = [(details.rfind(cause), cause) for cause in _CAUSES if cause in details]
    if said:
        return max(said)[1][0].lower() + max(said)[1][1:]
    return re.sub(r"^.*\bip(?:v4|v6):\S+:\d+: +", "", details, flags=re.DOTALL).strip() or details


def with_times(error: Error, address: str, look: Callable[..., str] = ssl.get_server_certificate) -> Error:
    """The same error; if clocks differ, with the time in the certificate shown at the address. It blocks."""
    if error.code == ClocksDiffer.code:
        host, _, port = address.rpartition(":")
        try:
            shown = keys.read_certificate(look((host.strip("[]"), int(port)), timeout=LOOK_S_MAX).encode())
        except (OSError, ValueError, InvalidConfig):
            return error
        made_unix_s = keys.begins(shown).timestamp() + CLOCK_SLACK_S
        error.message += f", and by the clock of who signs it was made at {utc(made_unix_s)}"
        error.args = (error.message,)
    return error
