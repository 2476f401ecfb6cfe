"""Where a person's identities lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.pki.authority import Authority
from swarm.pki.identity import issue
from swarm.pki.names import Principal, Role
from swarm.pki.profiles import SCHEDULER_FILE, find_profile, memberships, profile_folder, profiles_folder


def test_the_profile_of_a_scheduler_is_found_at_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path))
    assert profile_folder("127.0.0.1:7950") == tmp_path / "127.0.0.1-7950"
    assert profile_folder("[::1]:7950") == tmp_path / "--1-7950"
    authority = Authority.new(0.0)
    made = issue(authority, Principal(authority.cluster, Role.ADMIN, "me"), 0.0)
    made.save(profile_folder("a:1"))
    assert find_profile("a:1") == made
    assert find_profile("a:2") is None


def test_profiles_are_where_settings_are_unless_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_PROFILES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiles_folder().name == "profiles"
    assert tmp_path in profiles_folder().parents


def test_memberships_are_the_schedulers_of_all_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PROFILES", str(tmp_path / "profiles"))
    assert memberships() == []
    authority = Authority.new(0.0)
    made = issue(authority, Principal(authority.cluster, Role.ADMIN, "me"), 0.0)
    for address in ("10.77.0.1:7950", "gpu-box.lan:7950", "[::1]:7950", "[fd00::2]:7950"):
        made.save(profile_folder(address))
    (profile_folder("[fd00::2]:7950") / SCHEDULER_FILE).write_text("[fd00::2]:7950")
    (tmp_path / "profiles" / "empty-7950").mkdir()
    assert sorted(memberships()) == ["10.77.0.1:7950", "[fd00::2]:7950", "gpu-box.lan:7950"]
