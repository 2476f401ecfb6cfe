"""What every test leaves behind: nothing.

Limits on time are for hangs: connections and pings of the tests' own process wait far longer than the product's.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

from tests.support.golden import Golden, golden_of  # noqa: E402  # rewritten like all that is there

# One thread for torch, here and in the processes that tests start: several tests run side by side, and threads that
# spin on busy cores take minutes for what one does in a second.
os.environ["OMP_NUM_THREADS"] = "1"

# No test reads or writes the profiles of whoever runs it.
os.environ["SWARM_PROFILES"] = os.path.join(tempfile.gettempdir(), f"swarm-test-profiles-{os.getpid()}")

settings.register_profile("any machine", deadline=None)  # how long an example takes is the machine's
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: the processes that tests start would not hear Ctrl-C either.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Torch and its friends live for ever: looking through them took a seventh of the time of simulated systems."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_sessionfinish() -> None:
    shutil.rmtree(os.environ["SWARM_PROFILES"], ignore_errors=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares texts with those that were recorded for the test (tests/support/golden.py)."""
    return golden_of(request.path.with_suffix(".txt"), request.node.name.removeprefix("test_").replace("_", " "))


@pytest.fixture(autouse=True)
def connections_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens is refused at once; who listens may be held up by this machine for as long as it likes."""
    monkeypatch.setattr("swarm.rpc.channel.CONNECT_S_MAX", 60.0)
    monkeypatch.setattr("swarm.rpc.channel.KEEPALIVE_TIMEOUT_MS", 60_000)
    monkeypatch.setattr("swarm.rpc.channel.HANDSHAKE_S_MAX", 600.0)


@pytest.fixture(autouse=True)
def logs_are_as_before() -> Iterator[None]:
    """Commands that a test runs in its own process set up logging; the next test must not write to their streams."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
