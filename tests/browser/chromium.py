"""A system Chromium, driven over its own protocol with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = (
    "These tests drive a system Chromium, and none was found: install one (apt-get install chromium) or name it with "
    "CHROMIUM=/path/to/chromium."
)


def find() -> str:
    """The browser that `CHROMIUM` names, or the first known one on the path; one sentence where there is none."""
    named = os.environ.get("CHROMIUM")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        raise SystemExit(f"{MISSING} (CHROMIUM={named})" if named else MISSING)
    return found


class Browser:
    """One page of a headless browser: open files, run scripts, press keys, take pictures."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.complaints: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="squisher-browser-")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                   "--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={self._profile}",
                   f"--window-size={width},{height}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen([find(), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(page for page in json.load(answer) if page["type"] == "page")
        self._socket = _Socket(port, target["webSocketDebuggerUrl"].split(f":{port}", 1)[1])
        self._number = 0
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _port(self) -> int:
        file = Path(self._profile, "DevToolsActivePort")
        for _ in range(600):
            if file.exists() and file.read_text().strip():
                return int(file.read_text().split()[0])
            if self._process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"The browser {find()} did not start.")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; what the page complains of meanwhile is kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.complaints.append(json.dumps(parameters["args"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(
            ("file:", "about:", "data:")
        ):
            self.complaints.append(f"asked the network for {parameters['request']['url']}")

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self.complaints.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(600):
            if self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
                return
            time.sleep(0.05)
        raise RuntimeError(f"{path} did not load.")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, as a person would."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int, scale: float = 1, mobile: bool = False) -> None:
        """Give the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    def prefer(self, scheme: str) -> None:
        """Let the system prefer `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def media(self, media: str) -> None:
        """Show the page as on `screen` or in `print`."""
        self.call("Emulation.setEmulatedMedia", media=media)

    def picture(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """A PNG of what is visible, or of a part of the page."""
        area = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        answer = self.call("Page.captureScreenshot", format="png", **area)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self, path: Path) -> None:
        """What would be printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def close(self) -> None:
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)
        shutil.rmtree(self._profile, ignore_errors=True)


class _Socket:
    """As much of a WebSocket as the protocol needs: text frames, masked on the way out."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass

    def send(self, text: str) -> None:
        data = text.encode()
        head = bytes([0x81]) + (
            bytes([0x80 | len(data)]) if len(data) < 126
            else bytes([0xFE]) + struct.pack(">H", len(data)) if len(data) < 1 << 16
            else bytes([0xFF]) + struct.pack(">Q", len(data))
        )  # fmt: skip
        self._socket.sendall(head + bytes(4) + data)  # a mask of zeros is a mask

    def receive(self) -> str:
        parts = []
        while True:
            first, second = self._file.read(2)
            length = second & 0x7F
            if length >= 126:
                size, form = (2, ">H") if length == 126 else (8, ">Q")
                length = struct.unpack(form, self._file.read(size))[0]
            payload = self._file.read(length)
            if first & 0x0F in (0, 1):
                parts.append(payload)
                if first & 0x80:
                    return b"".join(parts).decode()

    def close(self) -> None:
        self._file.close()
        self._socket.close()


if __name__ == "__main__":
    find()
