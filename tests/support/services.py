"""Programs of others that a fleet stands on, as processes of a test: PostgreSQL, Mosquitto, Prometheus.

They come as Debian packages. Where one is missing the test fails and says which to install; nothing is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psycopg
import trustme

from swarm.process.children import dying_with_parent

START_S_MAX = 120.0
POLL_S = 0.05
PORTS = range(20_000, 32_768)  # below those that Linux gives to whoever dials
# Debian keeps some of them off the PATH of people who do not run services.
PLACES = ("/usr/sbin", "/usr/local/sbin", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)))
PACKAGES = {
    "initdb": "postgresql",
    "mosquitto": "mosquitto",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
    "systemd-analyze": "systemd",
    "ip": "iproute2",
    "nft": "nftables",
}
UNPRIVILEGED = "nobody"


def program(name: str) -> str:
    """Where a program is; the test fails if its package is missing."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))
    if found is None:
        package = PACKAGES.get(name, PACKAGES["initdb"])
        raise AssertionError(f"{name} is missing; install it with: apt-get install --no-install-recommends {package}")
    return found


def free_port() -> int:
    """A port that stays free until its server listens, and while that starts anew."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(what: str, met: Any, timeout_s: float = START_S_MAX) -> Any:
    """What `met` gives, once that is true; it is asked again and again."""
    given_up_s = time.monotonic() + timeout_s
    while True:
        if found := met():
            return found
        assert time.monotonic() < given_up_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(POLL_S)


def whole_lines(log: Path) -> list[str]:
    """What a log says so far, without a line of which its process has written only the beginning."""
    return log.read_text(errors="replace").rpartition("\n")[0].splitlines()


def ready_in(log: Path, program: subprocess.Popen[str]) -> dict[str, Any]:
    """The line that a program prints when it can be used; empty until then."""
    assert program.poll() is None, log.read_text()[-3000:]
    return next((dict(json.loads(line)) for line in whole_lines(log) if '"swarm.ready/' in line), {})


def promtool(*arguments: str, stdin: str = "") -> str:
    """What promtool says; the test fails if it complains."""
    ran = subprocess.run([program("promtool"), *arguments], input=stdin, capture_output=True, text=True, timeout=60)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    return said


class Service:
    """A process that can be stopped and started again with the same data and the same port."""

    END = signal.SIGKILL

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self._command = command
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self.port = port

    def start(self) -> None:
        with self._log.open("a") as log:
            command = dying_with_parent(self._command)
            self._child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        child = self._child

        def is_up() -> bool:
            assert child.poll() is None, self._log.read_text()[-3000:]
            return self._is_up()

        until(f"{self._command} answers", is_up)

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def stop(self) -> None:
        """End it without warning: what it has promised to keep must be on its disk."""
        if self._child is not None:
            self._child.send_signal(self.END)
            self._child.wait(timeout=START_S_MAX)
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Postgres(Service):
    """A PostgreSQL server with an empty database. It refuses root, so there it runs as somebody without rights."""

    END = signal.SIGQUIT  # as if its machine had lost power: no connection is waited for, nothing is flushed

    def __init__(self, *settings: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="swarm-test-"))
        data, port, before = self._folder / "data", free_port(), []
        if os.geteuid() == 0:
            user = pwd.getpwnam(UNPRIVILEGED)
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            whom = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
            before = ["setpriv", *whom, "--pdeathsig=KILL"]
        make = [*before, program("initdb"), "--auth=trust", "--username=swarm", "--encoding=UTF8", "--no-sync"]
        made = subprocess.run([*make, str(data)], capture_output=True, text=True, cwd=self._folder, timeout=60)
        assert made.returncode == 0, made.stderr
        settings += ("listen_addresses=127.0.0.1", f"unix_socket_directories={self._folder}")
        command = [*before, program("postgres"), "-D", str(data), "-p", str(port)]
        super().__init__([*command, *(f"--{setting}" for setting in settings)], port, self._folder / "log")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://swarm@127.0.0.1:{self.port}/{database}"

    def _is_up(self) -> bool:
        # It listens before it is consistent again.
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url(), connect_timeout=2):
            return True
        return False

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)


class Mosquitto(Service):
    """A Mosquitto broker that asks for a password; over TLS if an authority is given."""

    def __init__(self, folder: Path, authority: trustme.CA | None = None) -> None:
        folder.mkdir()
        port, passwords, config = free_port(), folder / "passwords", folder / "mosquitto.conf"
        lines = [f"listener {port} 127.0.0.1", "allow_anonymous false", f"password_file {passwords}", "user root"]
        self.url = f"mqtt://swarm:secret@127.0.0.1:{port}"
        if authority is not None:
            authority.cert_pem.write_to_path(folder / "ca.pem")
            ours = authority.issue_cert("localhost")
            ours.cert_chain_pems[0].write_to_path(folder / "cert.pem")
            ours.private_key_pem.write_to_path(folder / "key.pem")
            lines += [f"cafile {folder / 'ca.pem'}", f"certfile {folder / 'cert.pem'}", f"keyfile {folder / 'key.pem'}"]
            self.url = f"mqtts://swarm:secret@localhost:{port}?ca={folder / 'ca.pem'}"
        config.write_text("\n".join(lines) + "\n")
        subprocess.run(
            [program("mosquitto_passwd"), "-b", "-c", str(passwords), "swarm", "secret"], check=True, timeout=30
        )
        super().__init__([program("mosquitto"), "-c", str(config)], port, folder / "log")


class Prometheus(Service):
    """A Prometheus server that scrapes twice a second; `scrape` and `rules` are parts of its configuration."""

    def __init__(self, folder: Path, scrape: Sequence[Mapping[str, Any]], rules: Sequence[Path] = ()) -> None:
        folder.mkdir()
        port, config = free_port(), folder / "prometheus.yml"
        every = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        # JSON is YAML.
        config.write_text(
            json.dumps({"global": every, "rule_files": [str(path) for path in rules], "scrape_configs": list(scrape)})
        )
        command = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        super().__init__([*command, f"--web.listen-address=127.0.0.1:{port}"], port, folder / "log")

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return "Ready" in fetch(f"http://127.0.0.1:{self.port}/-/ready")
        return False

    def query(self, expression: str) -> list[Any]:
        """The series that an expression has now: [{"metric": {...}, "value": [time, "number"]}]."""
        found: list[Any] = self._get("query", query=expression)["result"]
        return found

    def alerts(self) -> dict[str, str]:
        """Alerts by name: pending or firing."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self._get("alerts")["alerts"]}

    def targets(self) -> list[Any]:
        found: list[Any] = self._get("targets")["activeTargets"]
        return found

    def _get(self, what: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return json.load(answer)["data"]


def fetch(address: str) -> str:
    """What an address answers, also if that is a refusal."""
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
