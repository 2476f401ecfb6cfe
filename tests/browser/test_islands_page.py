"""A person looks at the page of a job with islands: each has its stages, its steps and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.browser import Browser
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.services import fetch, until
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two islands of two stages, which exchange every second step."""
    folder = tmp_path_factory.mktemp("islands")
    with Cluster(folder, "--grace", "2") as fleet:
        fleet.add_servers(4)
        changes: dict[str, object] = {
            "islands__count": 2,
            "averaging__mode": "diloco",
            "outer__every_steps": 2,
            "pipeline__stages": 2,
            "training__steps": 100_000,
            "training__global_batch_sequences": 8,
        }
        spec = small_spec(write_text(folder), **changes)
        spec = resolved(spec)
        job = fleet.submit(spec, Tokens.make(folder / "tokens", spec).manifest).id
        fleet.wait_for_step(job, 3)
        yield fleet


@pytest.fixture
def browser(fleet: Cluster, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"http://{fleet.scheduler.ready['http']}/")
        until("the islands are drawn", lambda: browser.count(".island") == 2)
        yield browser


def exchanges(browser: Browser) -> int:
    return int(browser.text(".island > p").split(", ")[1].split()[0])


def test_each_island_has_its_stages_and_says_how_far_it_is(browser: Browser) -> None:
    assert browser.texts(".island > h4") == ["Island 0", "Island 1"]
    stages = "return [...document.querySelectorAll('.island')].map((one) => one.querySelectorAll('.stage h5').length)"
    assert browser.run(stages) == [2, 2]
    served = "return [...document.querySelectorAll('.stage')].map((one) => one.querySelectorAll('.replica').length)"
    assert browser.run(served) == [1, 1, 1, 1]
    before = exchanges(browser)
    until("they exchange", lambda: exchanges(browser) > before)
    assert "stage 1 in island 1\nof " in browser.text("#pool")
    until("a link is measured", lambda: "bit/s" in browser.text("#pool"))
    assert browser.complaints() == []


def test_prometheus_is_told_how_far_each_island_is(fleet: Cluster) -> None:
    """The series of the dashboard's panels; a fleet without islands has none of them."""
    url = f"http://{fleet.scheduler.ready['http']}/metrics"
    found = dict.fromkeys(("swarm_island_peers", "swarm_island_step", "swarm_island_outer_steps"), 0.0)

    def told() -> bool:
        samples = [sample for family in text_string_to_metric_families(fetch(url)) for sample in family.samples]
        for sample in samples:
            if sample.name in found and sample.labels["island"] == "1":
                found[sample.name] = sample.value
        return found["swarm_island_peers"] == 2.0 and found["swarm_island_outer_steps"] >= 1.0

    until("both stage servers and an exchange are counted", told)
    assert found["swarm_island_step"] >= 2.0
    told_too = {"swarm_island_state", "swarm_island_wait_seconds_total", "swarm_outer_exchange_seconds_bucket"}
    assert told_too <= {
        sample.name for family in text_string_to_metric_families(fetch(url)) for sample in family.samples
    }


def test_the_steps_of_each_island_are_drawn_with_its_outer_steps(browser: Browser) -> None:
    names = browser.texts("#timeline text")
    assert [name for name in names if name.startswith("Island")] == ["Island 0", "Island 1"]
    until("outer steps of both are among them", lambda: browser.texts("#timeline text").count("outer") >= 2)
    assert browser.count("#timeline rect") > 4
    rows = {"outer of island 0", "outer of island 1"}
    until("so they are in the table", lambda: rows <= set(browser.texts("#steps tbody th")))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_and_a_phone_shows_it_without_scrolling_sideways(browser: Browser, dark: bool) -> None:
    browser.look(dark=dark)
    assert [found for found in browser.contrasts() if found[0] < 4.5] == []
    browser.look(width=375, height=700, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") <= 375
    levels = browser.levels()
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    assert browser.unnamed() == 0
