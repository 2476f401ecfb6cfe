"""Inputs and outputs as short lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from scheduler.brain.inputs import Happened, Input, ReplicaRecord
from scheduler.brain.outputs import Note, Output, Released, Send
from swarm.messages import Member, ParameterHash, ParameterNorm, UnitSize
from swarm.types import EvaluationBatch, Hop, Microbatch, Round

TEXT_CHARACTERS_MAX = 200


def spell_input(happened: Input) -> str:
    """What happened."""
    if isinstance(happened, Happened):
        return f"{happened.peer} says {spell(happened.event)}"
    return spell(happened)


def spell_output(output: Output) -> str:
    """What was decided; empty if another output says the same."""
    match output:
        case Send(peer=peer, command=command):
            return f"to {peer}: {spell(command)}"
        case Note(level=level, message=message):
            return f"{level}: {message}"
        case Released():
            return ""  # Send(Release) came before
    return spell(output)


def spell(value: Any) -> str:
    """A value, without the fields that have their defaults."""
    match value:
        case Microbatch(step=step, index=index):
            return f"{step}.{index}"
        case EvaluationBatch(version=version, index=index):
            return f"v{version}.{index}"
        case Hop(peer=peer, attempt=attempt):
            return f"{peer}#{attempt}" if attempt else str(peer)
        case Round(epoch=epoch, number=number):
            return f"{epoch}.{number}"
        case Member(peer=peer, start=start, stop=stop):
            return f"{peer}[{start}:{stop}]"
        case ReplicaRecord(peer=peer, stage=stage):
            return f"{peer} at stage {stage}"
        case UnitSize(unit=name, elements=number) | ParameterNorm(name=name, squared_norm=number):
            return f"{name}: {number:g}"
        case ParameterHash(name=name):
            return name
        case str():
            return value if len(value) <= TEXT_CHARACTERS_MAX else f"{value[:TEXT_CHARACTERS_MAX]}..."
        case float():
            return f"{value:.6g}"
        case Mapping():
            return f"{{{', '.join(f'{key}: {spell(one)}' for key, one in value.items())}}}"
        case tuple() | list():
            return f"[{' '.join(map(spell, value))}]"
        case set() | frozenset():
            return f"{{{' '.join(map(spell, sorted(value)))}}}"
    if not is_dataclass(value):
        return str(value)
    told = [(one.name, getattr(value, one.name)) for one in fields(value) if getattr(value, one.name) != one.default]
    named = [f"{name}={spell(one)}" for name, one in told if name not in ("job", "timeline", "spec_json")]
    return f"{type(value).__name__}({', '.join(named)})"
