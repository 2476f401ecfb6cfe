"""The weights of a dozen small jobs are those that were recorded before the code was last rearranged.

Torch and its libraries choose their kernels by the processor. Hashes that are to hold on every x86-64 need the kernels
that every one of them has; `PORTABLE` asks for them and must be in the environment before torch is loaded. Square roots
differ all the same: MKL makes them from the approximation of the processor, and these differ between makers. So
there is a set of hashes for each; the second lacks a job that came when no such processor was at hand. Where no set
fits, record one with the code of before: `python -m tests.simulation.test_golden_weights`. It also adds the jobs that a
set lacks. A change that means to train otherwise removes the old sets.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden_weights.json")
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}


def computed() -> dict[str, str]:
    """The sha256 of each job's weights, as this code and the portable kernels compute them."""
    command = [sys.executable, "-m", "tests.simulation.golden_weights"]
    done = subprocess.run(command, env={**os.environ, **PORTABLE}, check=True, stdout=subprocess.PIPE, text=True)
    hashes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return hashes


def test_the_weights_are_what_they_always_were() -> None:
    recorded = json.loads(GOLDEN.read_text())
    assert platform.machine() in recorded, "record the hashes on this kind of processor, with the code of before"
    found = computed()
    assert any(hashes.items() <= found.items() for hashes in recorded[platform.machine()])


if __name__ == "__main__":
    kept = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    sets = kept.setdefault(platform.machine(), [])
    found = computed()
    sets[:] = [*(held for held in sets if not held.items() <= found.items()), found]
    GOLDEN.write_text(json.dumps(kept, indent=2) + "\n")
