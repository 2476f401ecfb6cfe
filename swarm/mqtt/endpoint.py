"""Where a broker is, and how to log in there: the URL that a person gives.

mqtt://[user:password@]HOST[:1883]
mqtts://[user:password@]HOST[:8883][?ca=FILE][&cert=FILE&key=FILE]

Over mqtts the broker's certificate must be for HOST, and signed by an authority of this machine or the one in `ca`. A
broker that asks for a certificate of ours gets `cert`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from swarm.errors import InvalidConfig

HINT = "write it as mqtt://HOST:PORT, or mqtts://HOST:PORT?ca=FILE for TLS; for example mqtt://127.0.0.1:1883"
_PORTS = {"mqtt": 1883, "mqtts": 8883}
_NO_PORT = re.compile(r"(?<=[^/:]):(?!//|[0-9]{1,5}$)[^\]/]*$")
_BEHIND_HOST = re.compile(r"(?<![:/])/(?!/)|[?#]")


class _Socket(ssl.SSLSocket):
    """Closed if its handshake fails: paho forgets it, and the bus tries again for as long as it runs."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM; "" is the authorities of this machine, and no certificate of ours."""

    ca: str = ""
    cert: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Read the files anew, as they may have been renewed; InvalidConfig if one cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.sslsocket_class = _Socket
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except OSError as error:  # an SSLError is one
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            reason = error.strerror or str(error)
            raise InvalidConfig(f"{files} of the broker's URL cannot be used: {reason}", hint=HINT) from None
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A broker."""

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    @property
    def shown(self) -> str:
        """Its URL without the credentials."""
        return f"{'mqtt' if self.tls is None else 'mqtts'}://{self.host}:{self.port}"


def parse_url(url: str) -> Endpoint:
    """The parts of a broker's URL; InvalidConfig if it is none, or names files that cannot be used."""
    try:
        parts = urlsplit(url)
        port = parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:  # its text may hold a part of the password
        raise InvalidConfig(f'broker URL "{_shown(url)}" is not valid', hint=HINT) from None
    wanted = {"ca", "cert", "key"} if parts.scheme == "mqtts" else set()
    is_known = options.keys() <= wanted and ("cert" in options or "key" not in options)
    is_plain = parts.path in ("", "/") and not parts.fragment
    if parts.scheme not in _PORTS or not parts.hostname or not is_plain or not is_known:
        raise InvalidConfig(f'broker URL "{_shown(url)}" is not valid', hint=HINT)
    tls = Tls(**options) if parts.scheme == "mqtts" else None
    if tls is not None:
        tls.context()
    return Endpoint(
        parts.hostname,
        _PORTS[parts.scheme] if port is None else port,
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        tls,
    )


def _shown(url: str) -> str:
    """Scheme and host of what was given as a URL: in what stands before and behind them there may be a password."""
    scheme, mark, _ = url.rpartition("@")[0].partition("://") if "@" in url else ("", "", "")
    host, *rest = _BEHIND_HOST.split(url.rpartition("@")[2].removeprefix("//"), maxsplit=1)
    return f"{scheme if mark else ''}{mark}{_NO_PORT.sub(':…', host)}{'…' if any(rest) else ''}"
