"""What a person reads while the hub does not answer."""

from __future__ import annotations

import logging

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


def test_the_password_of_a_mirror_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Down:
        def head(self, url: str, timeout: float) -> None:
            raise ConnectionError(f"no answer from {url}")

    monkeypatch.setattr(huggingface_hub, "get_session", Down)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://me:SECRET@mirror")
    with pytest.raises(NotCached) as error:
        hub.check_answers("acme/none", "main", "config.json", "this")
    assert error.value.message.endswith("the hub at https://…@mirror does not answer: no answer from https://…@mirror")
