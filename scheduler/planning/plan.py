"""The plan: a document that says how to cut a job, which peer serves which stage, and what that is predicted to do.

Equal facts and an equal seed give equal bytes: figures have four digits, names stand in order, and nothing depends on
the clock. `facts_hash` names what a plan was made of, the pool and the job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scheduler.planning.pool import PeerPool, PoolPeer
from swarm.errors import InvalidConfig
from swarm.job.spec import JobSpec
from swarm.text import counted, printable, spoken_duration
from swarm.text_file import read_small

SCHEMA = "swarm.plan/1"
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a plan is predicted to do: by the bound, or by a play of it, whose ± is `spread` (a ratio).

    Below: a play has ended early, as it could not reach these tokens/s.
    """

    by: Literal["bound", "played", "below"]
    tokens_per_s: float
    step_s: float
    idle_ratio: float | None  # of what the peers of all stages could compute; None: only first steps were played
    price_per_hour: float | None = None  # None: the price of a peer is not known
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The layers of each stage, and the names of its peers; of several islands the stages of each, one by one.

    `overlap` counts the microbatches of a step that use weights one step old. With `recompute` forward is computed
    again for backward.
    """

    split: tuple[int, ...]
    places: tuple[tuple[str, ...], ...]
    microbatch_sequences: int
    overlap: int = 0
    recompute: bool = False
    predicted: Predicted | None = None
    reasons: tuple[str, ...] = ()
    facts_hash: str = ""
    seed: int = 0

    @property
    def islands(self) -> int:
        return len(self.places) // len(self.split)

    @property
    def is_stopped(self) -> bool:
        """Whether Ctrl-C ended the planning."""
        return any(reason.startswith("stopped: ") for reason in self.reasons)

    @property
    def peers(self) -> frozenset[str]:
        return frozenset(name for place in self.places for name in place)


def facts_hash(pool: PeerPool, spec: JobSpec) -> str:
    """A name for the facts of a plan; `spec` is resolved."""
    links = {f"{a}>{b}": asdict(link) for (a, b), link in pool.links.items()}
    facts = {"peers": [asdict(peer) for peer in pool.peers], "links": links, "job": spec.model_dump(mode="json")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def rounded(value: float) -> float:
    """The value with as many digits as a plan has."""
    return float(f"{value:.{DIGITS}g}")


def spoken_s(seconds: float) -> str:
    """A time span in a sentence, in milliseconds where it is too short to be told in seconds."""
    return f"{1e3 * seconds:.2g} ms" if 0.0 < seconds < 0.095 else spoken_duration(seconds)


def predicted_by_bound(used: Sequence[PoolPeer], tokens: int, flops: float, step_s: float) -> Predicted:
    """What these peers do if a step of so many tokens takes so long; `flops`: multiply-adds of a token."""
    busy = tokens * flops / step_s / sum(peer.speed for peer in used)
    prices = [peer.price_per_hour for peer in used if peer.price_per_hour is not None]
    price = rounded(sum(prices)) if len(prices) == len(used) else None
    return Predicted("bound", rounded(tokens / step_s), rounded(step_s), rounded(max(0.0, 1.0 - busy)), price)


def document(plan: Plan, job: str) -> dict[str, Any]:
    """The plan of the job of this name as plain values, for JSON."""
    values = asdict(plan)
    predicted = values["predicted"] or {}
    values["predicted"] = {
        key: rounded(value) if isinstance(value, float) else value for key, value in predicted.items()
    } or None
    return {"schema": SCHEMA, "job": job, **values}


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    schema_: Literal["swarm.plan/1"] = Field(alias="schema")
    job: str
    split: tuple[int, ...] = Field(min_length=1)
    places: tuple[tuple[str, ...], ...]
    microbatch_sequences: int = Field(ge=1)
    overlap: int = Field(ge=0)
    recompute: bool
    predicted: Predicted | None
    reasons: tuple[str, ...]
    facts_hash: str
    seed: int


def read_plan(path: Path, spec: JobSpec) -> Plan:
    """The plan in a file with what `swarm plan -o json` printed; InvalidConfig unless it is of this job and model."""
    hint = "write one with: swarm plan JOB --pool FILE -o json > plan.json"
    try:
        values = json.loads(read_small(path), parse_constant=_refuse)
        found = _Document.model_validate(values)
    except FileNotFoundError:
        raise InvalidConfig(f"there is no file {path}", hint=hint) from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        raise InvalidConfig(f"{path} is no plan: {key or 'it'}: {fault['msg'].lower()}", hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"{path} is no plan: {error}", hint=hint) from None
    if not found.places or len(found.places) % len(found.split) or not all(found.places):
        raise InvalidConfig(f"{path} is no plan: it has other places than stages, or an empty one", hint=hint)
    if found.job != spec.name:
        raise InvalidConfig(f"{path} is a plan of job {printable(found.job[:40])}, not of {spec.name}", hint=hint)
    if (layers := sum(found.split)) != spec.layers:
        told = f"{path}: the plan is of a model of {counted(layers, 'layer')}, this job has {spec.layers}"
        raise InvalidConfig(told, hint=hint)
    plan = Plan(**{name: getattr(found, name) for name in Plan.__dataclass_fields__})
    most = spec.limits.max_replicas * len(plan.places)
    if most and len(plan.peers) > most:
        told = f"{path}: the plan has {counted(len(plan.peers), 'peer')}, limits.max_replicas allows {most}"
        raise InvalidConfig(told, hint=hint)
    return plan


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")
