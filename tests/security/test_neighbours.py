"""Another login of the machine sees nothing of a swarm on loopback, unless somebody let it in by name."""

from __future__ import annotations

from pathlib import Path

from tests.support.neighbours import ask_as
from tests.support.processes import Cluster

PAGE = ("/", "/page.js", "/events", "/metrics", "/sd")


def test_every_http_port_asks_whose_its_caller_is(tmp_path: Path) -> None:
    with Cluster(tmp_path, broker="embedded") as cluster:
        closed, let_in = cluster.add_servers(1) + cluster.add_servers(1, "--http-user", "nobody")
        ports = {peer: process.ready["http"] for peer, process in cluster.servers.items()}
        asked = [(cluster.scheduler.ready["http"], path) for path in PAGE] + [(ports[closed], "/metrics")]
        for address, path in asked:
            status, text = ask_as(address, path)
            assert (status, "login nobody may not look" in text) == (403, True), (address, path)
            assert ask_as(address, path, login=0)[0] == 200, (address, path)
            assert ask_as(address, "/healthz") == (200, "ok\n")
        assert ask_as(ports[let_in], "/metrics")[0] == 200
