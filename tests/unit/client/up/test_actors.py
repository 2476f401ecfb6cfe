"""What is found out about a Ray cluster before stage servers start there; tests/real/test_ray.py has a real one."""

from __future__ import annotations

import socket
from unittest.mock import MagicMock

import pytest

from client.up.actors import CLIENT_TRIES, Cluster, _connect, connected, listening_host
from swarm.errors import InvalidConfig, UsageError


def test_the_scheduler_listens_on_loopback_if_all_nodes_are_here() -> None:
    assert listening_host("", ["127.0.0.1"]) == "127.0.0.1"
    assert listening_host("", ["127.0.0.1", "198.51.100.7"]) not in ("", "0.0.0.0")


def test_what_was_asked_for_is_taken_if_nodes_can_dial_it() -> None:
    assert listening_host("192.168.0.7", ["198.51.100.7"]) == "192.168.0.7"
    assert listening_host("127.0.0.1", ["127.0.0.1"]) == "127.0.0.1"
    for asked in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(UsageError, match=f"cannot dial {asked}") as caught:
            listening_host(asked, ["198.51.100.7"])
        assert ":7950" in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "gpus", "flags"),
    [
        ("auto", 4, "--device cuda"),
        ("auto", 3, "--device cpu"),
        ("cpu", 4, "--device cpu"),
        ("cuda", 0, "--device cuda"),
    ],
)
def test_a_gpu_is_used_if_there_is_one_for_each(asked: str, gpus: int, flags: str) -> None:
    """Nodes with GPUs that were asked for may come later."""
    ray = MagicMock()
    ray.cluster_resources.return_value = {"GPU": gpus}
    ray.nodes.return_value = [{"Alive": True}]
    Cluster(ray, 4, "127.0.0.1", asked).start([], {})
    given, _ = ray.remote.return_value.return_value.options.return_value.remote.return_value.run.remote.call_args[0]
    assert flags in " ".join(given)
    assert ray.remote.call_args.kwargs["num_gpus"] == ("cuda" in flags)


def test_a_device_that_ray_cannot_place_is_refused() -> None:
    for device in ("cuda:1", "mps"):
        with pytest.raises(UsageError, match=f"--device {device}"):
            Cluster(MagicMock(), 4, "127.0.0.1", device)


def test_memory_is_shared_by_the_servers_of_a_node_that_lives() -> None:
    """Ray also lists nodes that are gone: two servers of one node took 90 % of its memory each."""
    ray = MagicMock()
    ray.nodes.return_value = [{"Alive": True}, {"Alive": False}]
    Cluster(ray, 2, "127.0.0.1", "cpu").start([], {})
    given, _ = ray.remote.return_value.return_value.options.return_value.remote.return_value.run.remote.call_args[0]
    assert "45.00%" in given


def test_where_no_cluster_answers_that_is_said_at_once() -> None:
    """Ray itself took two minutes, and ended the process."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and nobody listens
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        for asked in (address, f"ray://{address}"):
            with (
                pytest.raises(InvalidConfig, match=f"no Ray cluster answers at {asked}"),
                connected(asked, count=1, listen_host="", device="cpu"),
            ):
                pass


def test_a_cluster_that_answers_is_asked_again_for_a_client_and_not_taken_for_none() -> None:
    """Ray's server failed to fork the client's process, and that was told as a cluster that does not answer."""
    said: list[str] = []

    def begin(logging_level: int) -> None:
        said.append("begin")
        if said.count("begin") <= failures:
            raise ConnectionError("ray client connection timeout")

    failures = CLIENT_TRIES - 1
    _connect(begin, "ray://10.0.0.1:10001", lambda: said.append("end"))
    assert said == ["begin", "end"] * failures + ["begin"]
    failures = 100
    for address, told, tries in (("ray://10.0.0.1:10001", "answers, but starts", CLIENT_TRIES), ("auto", "on this", 1)):
        said.clear()
        with pytest.raises(InvalidConfig, match=told):
            _connect(begin, address, lambda: said.append("end"))
        assert said == ["begin", "end"] * tries


def test_an_address_that_is_none_is_refused() -> None:
    for asked in ("somewhere", "http://10.0.0.1:8265", ":1"):
        with (
            pytest.raises(UsageError, match="--ray is auto, local"),
            connected(asked, count=1, listen_host="", device="cpu"),
        ):
            pass
