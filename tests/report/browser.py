"""A headless Chromium, driven through chromedriver's HTTP (no Selenium): open a page, ask it, take a picture."""

import base64
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str | None:
    """Why there is no browser here; None where there is one."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return None
    return "No Chromium here: apt-get install chromium chromium-driver, to open the pages of the report."


@dataclass(frozen=True)
class Browser:
    """One window."""

    session: str

    def post(self, path: str, body: dict[str, object]) -> object:
        answer = requests.post(f"{self.session}/{path}", json=body, timeout=60).json()["value"]
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def devtools(self, command: str, **params: object) -> object:
        return self.post("goog/cdp/execute", {"cmd": command, "params": params})

    def look(self, width: int, height: int, *, dark: bool) -> None:
        """The size and the colour scheme of the pages opened from now on."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        self.post("url", {"url": page.resolve().as_uri()})

    def ask(self, script: str) -> object:
        return self.post("execute/sync", {"script": script, "args": []})

    def messages(self) -> list[str]:
        """What the browser's console said since the last call."""
        answer = self.post("se/log", {"type": "browser"})
        return [str(entry["message"]) for entry in answer] if isinstance(answer, list) else []

    def picture(self, path: Path) -> None:
        size = self.ask("return [innerWidth, document.documentElement.scrollHeight]")
        assert isinstance(size, list)
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        answer = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        assert isinstance(answer, dict)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it and its driver end with the context."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        started = next(line for line in driver.stdout if "was started successfully on port" in line)
        address = f"http://127.0.0.1:{int(started.rsplit(maxsplit=1)[-1].rstrip('.'))}"
        options = {"args": [*SWITCHES, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        body = {"capabilities": {"alwaysMatch": wanted}}
        answer = requests.post(f"{address}/session", json=body, timeout=120).json()["value"]
        session = f"{address}/session/{answer['sessionId']}"
        try:
            yield Browser(session)
        finally:
            requests.delete(session, timeout=30)
    finally:
        driver.terminate()
        driver.wait(timeout=10)
