"""A person looks at the page in Chromium while a job trains: it moves, shows who was killed, and all can use it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from swarm.wire import jobs_pb2 as pb
from tests.support.browser import Browser
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.services import until
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(900)
TAB, ENTER = "\ue004", "\ue007"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two stages of two replicas, and a job that trains for ever."""
    folder = tmp_path_factory.mktemp("fleet")
    with Cluster(folder, "--grace", "30") as fleet:
        fleet.add_servers(4)
        for name in ("first", "second"):  # the second waits
            changes: dict[str, object] = {"pipeline__stages": 2, "training__steps": 1_000_000}
            changes |= {"data__validation_ratio": 0.01, "training__eval_every_steps": 4}
            spec = small_spec(write_text(folder), **changes).model_copy(update={"name": name})
            spec = resolved(spec)
            job = fleet.submit(spec, Tokens.make(folder / "tokens", spec).manifest).id
            if name == "first":
                fleet.wait_for_step(job, 3)
        yield fleet


@pytest.fixture
def browser(fleet: Cluster, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path) as browser:
        browser.look()
        browser.open(f"http://{fleet.scheduler.ready['http']}/")
        until("the page is live", lambda: browser.text("#link") == "live")
        yield browser


def step(browser: Browser) -> int:
    return int(browser.text("#figures dd span") or 0)


def points(browser: Browser, chart: str) -> int:
    return int(browser.run("return document.querySelector(arguments[0] + ' polyline')?.points.length ?? 0", chart))


def health(browser: Browser, peer: str) -> str:
    script = """
    const one = [...document.querySelectorAll('.replica')].find((node) => node.dataset.key === arguments[0]);
    return one ? one.querySelector('.badge').textContent : '';
    """
    return str(browser.run(script, peer))


def test_the_page_moves_while_a_job_trains(fleet: Cluster, browser: Browser) -> None:
    first = step(browser)
    assert first > 0
    drawn = points(browser, "#loss")
    until("more steps are shown", lambda: step(browser) > first + 3)
    until("the curve grows", lambda: points(browser, "#loss") > drawn)
    assert points(browser, "#speed") > 0
    assert (browser.count(".stage"), browser.count(".replica")) == (2, 4)
    assert browser.count("#timeline rect") > 4
    assert "No. 1 in the queue" in browser.text("#jobs")
    assert "evaluation after step" in browser.text("#news")
    assert browser.complaints() == [], "nothing breaks its policy, nothing is missing"


def test_another_job_is_chosen_with_the_keyboard_and_stays_in_the_address(browser: Browser) -> None:
    second = next(name for name in browser.texts("#jobs a") if name.startswith("second"))
    focus = "return document.activeElement.textContent"
    for _ in range(10):
        browser.press(TAB)
        if browser.run(focus) == second:
            break
    assert browser.run(focus) == second
    browser.press(ENTER)
    until("the second job is shown", lambda: browser.text("#job-title") == second)
    until("its title has the focus", lambda: browser.run(focus) == second)
    assert browser.run("return location.hash") == f"#job={second}"
    assert browser.run("return document.querySelector('#jobs [aria-current] a').textContent") == second
    assert browser.run("return document.querySelector('#steps-section').hidden"), "a job that waits has no steps"


def test_the_page_has_headings_landmarks_and_tables_that_say_what_they_are(browser: Browser) -> None:
    headings = browser.levels()
    assert headings[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(headings)), headings
    assert browser.count("main, header, footer") == 3
    assert browser.unnamed() == 0
    without_role = browser.count("table.cards :is(td, th, tr, tbody, thead):not([role])")
    assert without_role == 0, "shown as cards, they are a table only by their roles"
    assert browser.count("table:not(:has(caption))") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(browser: Browser, dark: bool) -> None:
    browser.look(dark=dark)
    until("the stages are drawn", lambda: browser.count(".replica"))
    contrasts = browser.contrasts()
    assert len(contrasts) > 60
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_a_phone_shows_all_without_scrolling_sideways(browser: Browser) -> None:
    browser.look(width=375, height=700)
    until("the stages are drawn", lambda: browser.count(".replica"))
    assert browser.run("return document.documentElement.scrollWidth") <= 375


def test_who_prefers_less_motion_sees_nothing_glide(browser: Browser) -> None:
    glides = "return getComputedStyle(document.querySelector('.load span')).transitionDuration"
    until("the stages are drawn", lambda: browser.count(".replica"))
    assert browser.run(glides) == "0.3s"
    browser.look(calm=True)
    assert browser.run(glides) == "0s"


def test_a_stage_server_that_is_killed_appears_and_the_page_says_why(fleet: Cluster, browser: Browser) -> None:
    (job,) = [view for view in fleet.jobs.List(pb.ListRequest(), timeout=60).jobs if view.state == "running"]
    victim = job.stages[0].peers[0]
    assert health(browser, victim) == "serving"
    before = step(browser)
    fleet.servers[victim].kill(signal.SIGSTOP)
    until("it is suspect", lambda: health(browser, victim) == "suspect")
    fleet.servers[victim].kill(signal.SIGKILL)
    until("it is gone", lambda: health(browser, victim) == "")
    assert f"{victim} (stage 0) is gone" in browser.text("#news")
    pool = f"return document.querySelector('#pool tr[data-key=\"{victim}\"] .badge').textContent"
    assert browser.run(pool) == "gone"
    until("the job trains on", lambda: step(browser) > before + 3)


def test_a_page_that_hears_nothing_dials_anew_and_lives_again(fleet: Cluster, browser: Browser) -> None:
    fleet.scheduler.kill(signal.SIGSTOP)
    try:
        browser.run("heard_ms = -1e9")  # as if the last news were long ago
        until("it dials anew", lambda: browser.text("#link") != "live" or browser.run("return stream.readyState") == 0)
    finally:
        fleet.scheduler.kill(signal.SIGCONT)
    until("it is live again", lambda: browser.text("#link") == "live")
