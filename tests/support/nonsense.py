"""What a replica may say of things that do not exist: each event with one field at a time made something absurd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from swarm.types import EvaluationBatch, JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire.messages import (
    Accumulated,
    Averaged,
    Calibrated,
    Checked,
    Committed,
    Evaluated,
    EvaluationUndelivered,
    Event,
    Failed,
    Forwarded,
    Hashed,
    Heartbeat,
    Hello,
    Leaving,
    Loaded,
    Logged,
    ParameterHash,
    ParameterNorm,
    Rechecked,
    Recounted,
    ReportedCell,
    RoundFailed,
    Saved,
    StateFile,
    Undelivered,
    UnitSize,
)
from tests.support.obedient import JOB, MICROBATCHES, STEPS

A = PeerId("a")  # who says all that
S0 = UnitName("stage-0")
INTEGERS = (0, -1, 1, 2, MICROBATCHES, STEPS, 4, 2**31, 2**63 - 1)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 1e308)
TEXTS = ("", "nobody", "x" * 10_000)
M = Microbatch(1, 0, 1)
SAID: tuple[Event, ...] = (
    Hello(A, 1, 1, "0", "at a", "", "cpu", 1, 1, -1, JOB, 1, 0, (ReportedCell(M, 1, True, True, 1.0),), 0, 2, 0),
    Heartbeat(1),
    Loaded(JOB, 1, 0, 0, "stage 0 version 0", (UnitSize(S0, 1000),), "probe", 0),
    Accumulated(M, 0, 1, True, 1.0, 0.1, 0.2, 0.0),
    Averaged(1, 0, S0, Round(3, 1), "mean", (ParameterNorm("w", 4.0),), 0.1),
    RoundFailed(1, 0, S0, Round(3, 1), "why", "b"),
    Committed(1, 0, 1, 0, "digest"),
    Saved(JOB, 1, 2, 0, (ParameterHash("w0", "float32", (1,), "00"),)),
    Failed(JobId("another"), "E0001", "message", "hint"),
    Logged(JOB, 0.0, "info", "line"),
    Leaving("why"),
    Evaluated(EvaluationBatch(1, 1, 0), 1, 2.0),
    Calibrated(4e14, 1e6, 2e6, 0.05),
    Undelivered(M, 1, PeerId("d"), 1, "why"),
    EvaluationUndelivered(EvaluationBatch(1, 1, 0), 1, PeerId("d"), 1, "why"),
    Forwarded(M, 0, 1),
    Checked(M, 0, 1, True, 1.0, ("x", "y", "g", "dx")),
    Hashed(JOB, 1, 2, 0, (StateFile("model/0", 1, "00"),), (ParameterHash("w0", "float32", (1,), "00"),)),
    Recounted(1, 0, 1, "sum"),
    Rechecked(1, 0, S0, Round(3, 1), 1, ("1", "2", "3"), "mean", "mean"),
)


def variants(value: Any) -> Iterator[Any]:
    """The value with one field at a time, at any depth, made something absurd."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            for odd in variants(getattr(value, field.name)):
                yield replace(value, **{field.name: odd})
    elif isinstance(value, tuple):
        yield ()
        yield value * 1000
        for odd in itertools.chain.from_iterable(map(variants, value)):
            yield (odd,)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from INTEGERS
    elif isinstance(value, float):
        yield from FLOATS
    elif isinstance(value, Enum):  # other words do not pass the wire
        yield from type(value)
    elif isinstance(value, bytes):
        yield from (text.encode() for text in TEXTS)
    else:
        yield from (type(value)(text) for text in TEXTS)


# A gradient that is not finite is no nonsense: where the microbatch is this replica's, its step is skipped.
NONSENSE = [
    odd for event in SAID for odd in variants(event) if getattr(odd, "finite", True) or isinstance(odd, Checked)
]
