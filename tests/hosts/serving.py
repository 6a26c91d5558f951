"""A llama-server of a test's own: on a free port of 127.0.0.1, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Seconds for a server to come up (its shaders are compiled on the first run) and for one request.
START, REQUEST = 300, 120
#: Seconds for a server to end after it was asked to.
STOP = 60


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Server:
    """A running server, or `ggml-async run` with one behind it."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The open response of a GET, or of a POST of JSON; a context manager."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=REQUEST)

    def complete(self, prompt: str, n: int, **more: Any) -> dict[str, Any]:
        """One completion; greedy, nothing kept from the request before."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True, **more}
        with self.request("/completion", body) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, prompt: str, n: int) -> list[tuple[float, dict[str, Any]]]:
        """The events of a streamed completion, each with the time of its arrival (seconds, monotonic)."""
        body = {
            "prompt": prompt,
            "n_predict": n,
            "temperature": 0.0,
            "cache_prompt": False,
            "ignore_eos": True,
            "stream": True,
        }
        found = []
        with self.request("/completion", body) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    found.append((time.monotonic(), json.loads(line[6:])))
        return found

    def wait_until_up(self) -> None:
        end = time.monotonic() + START
        while time.monotonic() < end:
            assert self.process.poll() is None, (
                f"the server ended with {self.process.returncode}:\n{self.text()[-3000:]}"
            )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError), self.request("/health"):
                return
            time.sleep(0.1)
        raise AssertionError(f"the server did not come up:\n{self.text()[-3000:]}")

    def text(self) -> str:
        """What was printed so far, stdout and stderr together."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, number: int = signal.SIGTERM, group: bool = False) -> int:
        """Signals the process, or like a terminal all of its group, and returns its exit code."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(STOP)


@contextlib.contextmanager
def serving(
    command: Callable[[Sequence[str]], Sequence[str | Path]], env: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """Starts command(["--host", ..., "--port", ...]) in a session of its own; nothing of it is alive afterwards."""
    port = free_port()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command(["--host", "127.0.0.1", "--port", str(port)])],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=dict(env), start_new_session=True,
        )  # fmt: skip
    server = Server(process, port, log)
    try:
        server.wait_until_up()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP)
