"""What a call of the client ends with."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from client.connection import Scheduler


def taken_back_too_late(error: BaseException) -> Any:
    """A call that waits in a condition, as gRPC's do; the signal comes before its lock is taken back."""

    def call(request: object, **options: object) -> object:
        condition = threading.Condition()
        with condition:
            condition.release()
            raise error

    return call


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_that_hides_behind_a_lock_is_what_the_call_ends_with(error: BaseException) -> None:
    with Scheduler("127.0.0.1:1", timeout_s=1.0) as scheduler:
        scheduler._stub = SimpleNamespace(Get=taken_back_too_late(error))
        with pytest.raises(type(error)) as caught:
            scheduler.get("job")
    assert caught.value is error


def test_another_failure_of_a_lock_is_shown_as_it_is() -> None:
    with Scheduler("127.0.0.1:1", timeout_s=1.0) as scheduler:
        scheduler._stub = SimpleNamespace(Get=taken_back_too_late(ValueError("odd")))
        with pytest.raises(RuntimeError, match="cannot release un-acquired lock"):
            scheduler.get("job")
