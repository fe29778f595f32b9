"""The demo in a process of its own, and a headless Chromium, driven by its own protocol, that notes every request."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page; ``requests`` are the addresses that it asked for."""

    def __init__(self, connection: Any):
        self._connection, self._number = connection, 0
        self.requests: list[str] = []
        for domain in ("Network", "Page", "DOM", "Runtime"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=30))
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            elif message.get("method") == "Network.webSocketCreated":
                self.requests.append(message["params"]["url"])
            elif message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def run(self, script: str) -> Any:
        """Returns the value of an expression."""
        return self.command("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, address: str) -> None:
        """Goes to an address."""
        self.command("Page.navigate", url=address)

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Waits until the page shows a text."""
        until = time.monotonic() + seconds
        while text not in (shown := self.run("document.body ? document.body.innerText : ''")):
            assert time.monotonic() < until, f"{text!r} is not in {shown!r}"
            time.sleep(0.1)

    def choose_file(self, path: Path) -> None:
        """Gives a file to the page's only input for files."""
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector="input[type=file]")["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def write(self, selector: str, text: str) -> None:
        """Writes into a field, in place of what stands there."""
        self.run(f"document.querySelector({selector!r}).select()")
        self.command("Input.insertText", text=text)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Changes the window."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Writes the whole page to a PNG file."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts a browser with a fresh profile; skips the test where there is none."""
    client = pytest.importorskip("websockets.sync.client")
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    flags = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    )
    process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with client.connect(_page_address(profile), max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(30)


def _page_address(profile: Path) -> str:
    """Returns where the page of a browser that has just started is driven from."""
    until = time.monotonic() + 60
    while not (found := profile / "DevToolsActivePort").exists() or not found.read_text().strip():
        assert time.monotonic() < until, "the browser does not start"
        time.sleep(0.1)
    port = found.read_text().split()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        return next(page["webSocketDebuggerUrl"] for page in json.load(answer) if page["type"] == "page")


@contextlib.contextmanager
def served(*arguments: object) -> Iterator[str]:
    """Runs ``lit-het demo`` in a process of its own; yields the address that it names."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "lit_het.cli.main", "demo", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        said = ""
        while not (found := re.search(r"http://\S+", said)):
            line = process.stderr.readline()
            assert line, f"the demo ended: {said}"
            said += line
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def assert_fits_and_contacts_no_other_machine(page: Browser, address: str, folder: Path) -> None:
    """Looks at a page in a wide and in a small, dark window, and at what it has asked for until now."""
    for width, dark in ((1100, False), (390, True)):
        page.look(width, 800, dark=dark)
        page.screenshot(folder / f"{width}.png")
        assert page.run("document.documentElement.scrollWidth") <= width  # nothing is cut off
        with Image.open(folder / f"{width}.png") as shot:
            assert (np.asarray(shot.convert("L"))[2, 2] < 128) == dark
    assert page.requests
    host = address.removeprefix("http://")
    assert not [request for request in page.requests if re.match(rf"(https?|wss?)://(?!{host}/)", request)]
