"""Settings that every job of the product has alike, changed for one test."""

from __future__ import annotations

import pytest

from scheduler.brain.settings import DeadlineSettings, RebalanceSettings
from scheduler.jobs import brain_settings


@pytest.fixture
def late_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain_settings, "DEADLINES", DeadlineSettings(min_s=60.0, max_s=60.0))


@pytest.fixture
def late_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain_settings, "DEADLINES", DeadlineSettings(min_s=0.1))


@pytest.fixture
def moves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brain_settings, "REBALANCING", RebalanceSettings(interval_s=1.0, cooldown_s=1.0))
