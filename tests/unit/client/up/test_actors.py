"""What is decided about a Ray cluster before and while stage servers start there; tests/real/test_ray.py has a real
one."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path

import pytest

from client.up.actors import (
    CLIENT_TRIES,
    _connect,
    answer,
    check_versions,
    connected,
    device_for,
    listening_host,
    remove_stale,
)
from swarm.errors import IncompatibleVersion, InvalidConfig, UsageError
from swarm.process.lifecycle import lock_folder
from swarm.types import PROTOCOL_VERSION

OWN = {"127.0.0.1", "10.0.0.1"}


def listening(asked: str, *nodes: str) -> str:
    return listening_host(asked, list(nodes), OWN, lambda node: f"10.0.0.1 to {node}")


def test_the_scheduler_listens_on_loopback_if_all_nodes_are_here() -> None:
    assert listening("", "127.0.0.1") == "127.0.0.1"
    assert listening("", "10.0.0.1", "10.0.0.1") == "127.0.0.1"


def test_it_listens_at_the_address_that_leads_to_other_nodes() -> None:
    assert listening("", "10.0.0.1", "10.0.0.2") == "10.0.0.1 to 10.0.0.2"


def test_what_was_asked_for_is_taken_if_nodes_can_dial_it() -> None:
    assert listening("192.168.0.7", "10.0.0.2") == "192.168.0.7"
    assert listening("127.0.0.1", "10.0.0.1") == "127.0.0.1"
    for asked in ("127.0.0.1", "localhost", "0.0.0.0"):
        with pytest.raises(UsageError, match=f"cannot dial {asked}") as caught:
            listening(asked, "10.0.0.2")
        assert "--listen 10.0.0.1 to 10.0.0.2:7950" in caught.value.hint


def test_a_gpu_is_used_if_there_is_one_for_each() -> None:
    assert device_for("auto", 4, 4) == "cuda"
    assert device_for("auto", 4, 3) == "cpu"
    assert device_for("cpu", 4, 4) == "cpu"
    assert device_for("cuda", 4, 0) == "cuda"  # such nodes may come
    for asked in ("cuda:1", "mps"):
        with pytest.raises(UsageError, match=f"--device {asked}"):
            device_for(asked, 4, 4)


def test_a_node_with_another_version_is_named_with_the_command_that_helps() -> None:
    ours = {"node": "10.0.0.2", "product": metadata.version("swarm-stages"), "protocol": str(PROTOCOL_VERSION)}
    check_versions(ours)
    for key, value in (("product", "0.0.1"), ("protocol", "1")):
        with pytest.raises(IncompatibleVersion, match=r"10\.0\.0\.2") as caught:
            check_versions(ours | {key: value})
        assert value in caught.value.message
        assert "pip install" in caught.value.hint


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


def test_the_folder_of_an_actor_that_was_killed_goes_and_no_other(tmp_path: Path) -> None:
    """A private key stayed behind."""
    for name in ("swarm-ray-killed", "swarm-ray-alive", "swarm-up-other", "far"):
        (tmp_path / name / "data").mkdir(parents=True)
    (tmp_path / "swarm-ray-begun").mkdir()  # its server has not started
    (tmp_path / "swarm-ray-link").symlink_to(tmp_path / "far")
    with lock_folder(tmp_path / "swarm-ray-alive"):
        remove_stale(tmp_path)
    kept = {"swarm-ray-alive", "swarm-ray-begun", "swarm-ray-link", "swarm-up-other", "far"}
    assert {path.name for path in tmp_path.iterdir()} == kept


async def test_whoever_waits_for_an_actor_can_be_cancelled_and_ray_does_not_notice() -> None:
    """Ray's client for ray://HOST:PORT printed a traceback about futures that were cancelled."""

    class Asked:
        def __init__(self) -> None:
            self.given: Future[str] = Future()

        def future(self) -> Future[str]:
            return self.given

    never, later, lost = Asked(), Asked(), Asked()
    waiting = [asyncio.create_task(answer(one)) for one in (never, later, lost)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    later.given.set_result("here")
    lost.given.set_exception(OSError("gone"))
    given = await asyncio.gather(*waiting, return_exceptions=True)
    assert given[1] == "here"
    assert [type(given[0]), type(given[2])] == [asyncio.CancelledError, OSError]
    never.given.set_result("it may still be given")
    await asyncio.sleep(0)
