"""A headless Chromium for tests, driven over WebDriver: JSON over HTTP, so it needs no library."""

from __future__ import annotations

import base64
import json
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from swarm.process.children import dying_with_parent
from tests.support.services import free_port, program, until

CALL_S_MAX = 120.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars")


# Whatever has text, with the contrast between it and what is behind it (WCAG 2, relative luminance).
CONTRASTS = """
const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
function behind(node) {
  for (let at = node; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const is_seen = node.getClientRects().length && !node.closest(".hidden, script, noscript");
  if (!walker.currentNode.textContent.trim() || !is_seen) continue;
  const style = getComputedStyle(node);
  const ink = rgba(node.closest("svg") ? style.fill : style.color);
  const [high, low] = [luminance(ink), luminance(behind(node))].sort((a, b) => b - a);
  found.push([(high + 0.05) / (low + 0.05), walker.currentNode.textContent.trim().slice(0, 40)]);
}
return found;
"""


class Browser:
    """One window; use as a context manager. The test fails if Chromium or its driver is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._session = ""

    def __enter__(self) -> Self:
        driver = [program("chromedriver"), f"--port={self._port}"]
        with (self._folder / "chromedriver.log").open("w") as log:
            self._driver = subprocess.Popen(dying_with_parent(driver), stdout=log, stderr=log)
        options = {"binary": program("chromium"), "args": [*FLAGS, f"--user-data-dir={self._folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            until("chromedriver answers", self._is_ready)
            opened = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._driver.kill()
            raise
        self._session = f"/session/{opened['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=10)

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, calm: bool = False) -> None:
        """The size of the window, and what its user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        prefers = {"color-scheme": "dark" if dark else "light", "reduced-motion": "reduce" if calm else "no-preference"}
        features = [{"name": f"prefers-{name}", "value": value} for name, value in prefers.items()]
        self._cdp("Emulation.setDeviceMetricsOverride", size)
        self._cdp("Emulation.setEmulatedMedia", {"features": features})

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script gives that runs as the body of a function in the page."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """The text that is seen there; empty if there is nothing."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def press(self, key: str) -> None:
        """A key, for the element that has the focus."""
        typed = {
            "type": "key",
            "id": "keyboard",
            "actions": [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")],
        }
        self._call("POST", f"{self._session}/actions", {"actions": [typed]})

    def contrasts(self) -> list[tuple[float, str]]:
        """Of each text that is seen its contrast, and how it begins."""
        return [(float(ratio), str(text)) for ratio, text in self.run(CONTRASTS)]

    def levels(self) -> list[int]:
        """The levels of the headings that are shown, in their order."""
        return [
            int(level)
            for level in self.run(
                "return [...document.querySelectorAll('h1, h2, h3, h4, h5')]"
                ".filter((node) => node.getClientRects().length).map((node) => node.tagName[1])"
            )
        ]

    def unnamed(self) -> int:
        """How many sections and articles have no heading of their own."""
        return self.count(
            "section, article", "(node) => !document.getElementById(node.getAttribute('aria-labelledby'))"
        )

    def count(self, selector: str, where: str = "() => true") -> int:
        """How many elements there are for which a function of JavaScript is true."""
        return int(self.run(f"return [...document.querySelectorAll(arguments[0])].filter({where}).length", selector))

    def texts(self, selector: str) -> list[str]:
        """What the elements say."""
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)", selector))

    def complaints(self) -> list[str]:
        """What the browser had to say about the page since it was last asked."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def picture(self, path: Path) -> None:
        """Save a PNG of what is seen."""
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def _cdp(self, command: str, values: dict[str, Any]) -> None:
        self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": values})

    def _is_ready(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _call(self, method: str, path: str, values: dict[str, Any] | None = None) -> Any:
        body = None if values is None else json.dumps(values).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_S_MAX) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()[:2000]) from None
