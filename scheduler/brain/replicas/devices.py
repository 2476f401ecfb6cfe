"""Decides which devices may serve together, and where each stage's optimizer runs.

Replicas of a stage must stay equal bit for bit. Devices of one kind compute alike, so the optimizer runs on them. In a
stage with several kinds of devices all replicas run it on their CPU, which costs a copy of weights and gradient per
step. A probe (`Loaded.probe`) shows the bits that each replica really computes; if the probes differ, the job must not
start.

Stages that share a unit (first and last, with tied embeddings) hold the same weights, so they count as one here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.types import PeerId, UnitName


def device_kind(device: str) -> str:
    """The kind of a device, without its number: "cuda:1 NVIDIA H100" is "cuda NVIDIA H100"."""
    name, space, model = device.partition(" ")
    return name.partition(":")[0] + space + model


def step_together(stages: int, units: Mapping[UnitName, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """For each stage the stages that share weights with it, itself included, in order."""
    groups = [{stage} for stage in range(stages)]
    for members in units.values():
        joined = set().union(*(groups[stage] for stage in members))
        for stage in joined:
            groups[stage] = joined
    return tuple(tuple(sorted(group)) for group in groups)


def step_places(devices: Sequence[Sequence[str]], together: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Where the optimizer of each stage runs, "device" or "cpu"; `devices` has the replicas' devices per stage."""
    kinds = [{device_kind(device) for stage in group for device in devices[stage]} for group in together]
    return tuple("device" if len(found) == 1 else "cpu" for found in kinds)


def explain_probes(probes: Mapping[PeerId, str], devices: Mapping[PeerId, str], stages: tuple[int, ...]) -> str:
    """Why replicas with these probes cannot serve together; empty if they can."""
    alike: dict[str, list[PeerId]] = {}
    for peer in sorted(probes):
        alike.setdefault(probes[peer], []).append(peer)
    if len(alike) < 2:
        return ""
    camps = " against ".join(
        ", ".join(f"{peer} ({devices[peer] or 'unknown device'})" for peer in peers) for peers in alike.values()
    )
    if len(stages) == 1:
        where = f"stage {stages[0]}"
    else:
        where = f"stages {' and '.join(map(str, stages))}, which share the tied embedding,"
    return (
        f"the optimizer gives other bits on some replicas of {where} than on others: {camps}; "
        f"their weights would drift apart, so they cannot be mixed: let machines of one kind serve it"
    )
