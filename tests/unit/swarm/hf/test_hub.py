"""What a person reads while the hub does not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event
from types import SimpleNamespace

import huggingface_hub
import pytest

from swarm.errors import NotCached
from swarm.hf import hub


def test_a_hub_that_does_not_answer_is_told_in_one_line() -> None:
    """Twelve raw lines of a library came before the error that says what to do."""
    told = hub._OneLine()

    def passes(text: str, level: int = logging.WARNING) -> str:
        record = logging.LogRecord("x", level, "x", 1, text, (), None)
        return record.getMessage() if told.filter(record) else ""

    assert passes("cannot use the cache") == "cannot use the cache"
    assert "does not answer: tries again" in passes("'[Errno 111] Connection refused' thrown while requesting HEAD x")
    for _ in range(5):
        assert passes("Retrying in 1s [Retry 1/5].") == passes("HTTP Error 503 thrown while requesting HEAD x") == ""
    assert passes("'x' thrown", logging.ERROR) == "'x' thrown"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Lets `answer` be what a call of the hub does; nothing is in the cache."""

    def use(answer: Callable[[str], None]) -> None:
        session = SimpleNamespace(head=lambda url, timeout: answer(url))
        monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://me:SECRET@mirror")
    monkeypatch.setattr(hub, "BETWEEN_ATTEMPTS_S", 0.0)
    monkeypatch.setattr(hub, "CHECK_S_MAX", 60.0)
    return use


def test_the_password_of_a_mirror_is_never_told(asked: Callable[[Callable[[str], None]], None]) -> None:
    def refuse(url: str) -> None:
        raise ConnectionError(f"no answer from {url}")

    asked(refuse)
    with pytest.raises(NotCached) as error:
        hub.check_answers("acme/none", "main", "config.json", "this")
    assert error.value.message.endswith("the hub at https://…@mirror does not answer: no answer from https://…@mirror")


def test_one_lost_call_refuses_no_job(asked: Callable[[Callable[[str], None]], None]) -> None:
    calls: list[str] = []

    def answer(url: str) -> None:
        calls.append(url)
        if len(calls) < 2:
            raise ConnectionError

    asked(answer)
    hub.check_answers("acme/none", "main", "config.json", "this")
    assert len(calls) == 2


def test_a_name_server_that_hangs_is_waited_for_only_so_long(
    asked: Callable[[Callable[[str], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time limits of HTTP clients begin with the address."""
    found = Event()

    def hang(url: str) -> None:
        assert found.wait(60.0)

    asked(hang)
    monkeypatch.setattr(hub, "CHECK_S_MAX", 0.1)
    with pytest.raises(NotCached, match=r"nothing came within 0\.1 s"):
        hub.check_answers("acme/none", "main", "config.json", "this")
    found.set()
