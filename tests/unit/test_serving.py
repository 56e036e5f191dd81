"""Which server a run needs, and which one it finds."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from draftmill import serving

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
