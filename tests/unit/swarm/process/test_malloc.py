"""Tuning malloc works here and harms nowhere."""

import platform
import subprocess
import sys

import pytest

from swarm.process import malloc


def test_freed_buffers_stay_with_the_process() -> None:
    """In a process of its own, because the setting lasts: page faults of repeated large buffers before and after."""
    program = """
import resource
from swarm.process.malloc import tune_malloc
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bytes(b"x" * (8 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
untuned = faults()
agreed = tune_malloc()
faults()
print(agreed, untuned, faults())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    agreed, _untuned, tuned = done.stdout.split()
    assert agreed == str(platform.libc_ver()[0] == "glibc")
    assert agreed == "False" or int(tuned) < 1000  # 50 buffers of 2048 pages each


def test_other_platforms_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert malloc.tune_malloc() is False
