"""Which server a run needs, and which one it finds."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.frozen_model import freeze

from draftmill import config as settings
from draftmill import serving
from draftmill.fleet.slots import Slot

KEY = "a-secret-key-of-this-test"


class Stranger(BaseHTTPRequestHandler):
    """A server that somebody else runs: SGLang, by its one route."""

    def do_GET(self) -> None:
        known = self.path == "/model_info" and self.headers["Authorization"] == f"Bearer {KEY}"
        self.send_response(200 if known else 404)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_proxy_never_sees_the_key_of_an_attached_server(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    found = serving.dialect(address, KEY)
    assert found is not None and found.name == "sglang"


def test_servers_share_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all cores of the machine: a Slurm job or a container may have few of them."""
    freeze(tmp_path / "model")
    pair = (Slot("cpu0"), Slot("cpu1"))
    monkeypatch.setattr(serving, "slots", lambda _operation: pair)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)))
    spec = serving.server_spec(
        settings.resolve({"model": {"path": "none"}}), tmp_path, pair[0], {"flags": []}
    )
    assert spec.threads == 3
