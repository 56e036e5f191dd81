"""The stand-in server itself: what it says, what it computes, and that each of its faults is what it claims."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
import requests
import tiny_model

STANDIN = Path(__file__).with_name("standin_server.py")
KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
FAST = {"scale": 100, "lengths": {"median": 30, "mean": 40, "cap": 80}, "stop_s": 0.0}


class Standin:
    """One running stand-in server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=HEADERS, timeout=3)

    def generate(self, ids: list[int], timeout: float = 3, **sampling: Any) -> requests.Response:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 100, "sampling_seed": 1, **sampling}}
        return requests.post(f"{self.url}/generate", json=body, headers=HEADERS, timeout=timeout)

    def metric(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"sglang:{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def log(self) -> list[dict[str, Any]]:
        return [
            orjson.loads(line) for path in sorted(self.folder.glob("requests-*")) for line in path.open("rb")
        ]


Start = Callable[..., Standin]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []
    config = tmp_path / "server.yaml"
    config.write_text(f'api-key: "{KEY}"\n')

    def make(
        *faults: dict[str, Any], ready: bool = True, flags: tuple[str, ...] = (), **more: Any
    ) -> Standin:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spec = {"folder": str(tmp_path / "standin"), **FAST, "faults": list(faults), **more}
        argv = [sys.executable, str(STANDIN), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--config", str(config), "--model-path", str(model), *flags]
        with (tmp_path / "server.log").open("ab") as log:
            process = subprocess.Popen(
                argv, env={**os.environ, "STANDIN": orjson.dumps(spec).decode()}, stdout=log, stderr=log
            )
        started.append(process)
        server = Standin(process, port, tmp_path / "standin")
        deadline = time.monotonic() + 10
        while ready and time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if server.get("/health").status_code == 200:
                    return server
            time.sleep(0.02)
        assert not ready, (tmp_path / "server.log").read_text()
        return server

    yield make
    for process in started:
        process.kill()
        process.wait()


def test_it_speaks_as_sglang_does(start: Start) -> None:
    server = start(slots=7, flags=("--max-running-requests", "512", "--enable-metrics"))
    info = server.get("/server_info").json()
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 7
    assert info["max_running_requests"] == 512
    answer = server.generate([5, 6, 7]).json()
    meta = answer["meta_info"]
    assert meta["completion_tokens"] == len(answer["output_ids"])
    assert meta["finish_reason"]["type"] == "stop"
    assert answer["output_ids"][-1] == meta["finish_reason"]["matched"]
    assert requests.get(f"{server.url}/server_info", timeout=3).status_code == 401
    assert server.metric("generation_tokens_total") == len(answer["output_ids"])
    assert server.metric("realtime_tokens_total") == pytest.approx(3 + len(answer["output_ids"]), abs=1)
    assert {entry["event"] for entry in server.log()} == {"ready", "start", "finish"}


def test_answers_depend_on_the_request_alone(start: Start) -> None:
    first = start()
    one, other = first.generate([5, 6]).json(), first.generate([5, 6], sampling_seed=2).json()
    second = start(slots=1)
    assert second.generate([5, 6]).json()["output_ids"] == one["output_ids"] != other["output_ids"]
    cut = second.generate([5, 6], max_new_tokens=8).json()
    assert cut["output_ids"] == one["output_ids"][:8]
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_a_prompt_too_long_is_refused_in_a_sentence(start: Start) -> None:
    refused = start(context=100).generate([5] * 90)
    assert refused.status_code == 400
    assert "maximum context length of 100 tokens" in refused.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_slot(start: Start) -> None:
    server = start(slots=1, scale=1)
    with pytest.raises(requests.Timeout):
        server.generate([5], timeout=0.2)
    time.sleep(0.1)
    assert server.metric("num_running_reqs") + server.metric("num_queue_reqs") == 0
    assert server.log()[-1]["event"] == "dropped"


def test_an_unknown_flag_is_refused_as_argparse_does(start: Start, tmp_path: Path) -> None:
    server = start(ready=False, flags=("--no-such-flag",))
    assert server.process.wait(5) == 2
    assert "unrecognized arguments: --no-such-flag" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("cause", ["oom", "port", "model"])
def test_crashing_at_the_start_leaves_the_cause_in_the_log(start: Start, tmp_path: Path, cause: str) -> None:
    server = start({"fault": "crash_at_start", "cause": cause, "s": 0}, ready=False)
    assert server.process.wait(5) == 1
    words = {"oom": "out of memory", "port": "address already in use", "model": "Can't load"}
    assert words[cause] in (tmp_path / "server.log").read_text()


def test_faults_of_the_kth_start_only(start: Start) -> None:
    fault = {"fault": "crash_at_start", "starts": [1], "s": 0}
    assert start(fault, ready=False).process.wait(5) == 1
    assert start(fault).generate([5]).ok


def test_it_dies_after_n_answers(start: Start) -> None:
    server = start({"fault": "dies", "answers": 2})
    assert [server.generate([i]).ok for i in (5, 6)] == [True, True]
    assert server.process.wait(3) == -signal.SIGKILL


def test_a_hung_server_stays_healthy_and_answers_nothing(start: Start) -> None:
    server = start({"fault": "hangs", "answers": 1})
    assert server.generate([5]).ok
    with pytest.raises(requests.Timeout):
        server.generate([6], timeout=0.5)
    assert server.get("/health").status_code == 200
    before = server.metric("realtime_tokens_total")
    time.sleep(0.1)
    assert server.metric("realtime_tokens_total") == before


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ({"fault": "http", "status": 429}, lambda reply: reply.status_code == 429),
        ({"fault": "html"}, lambda reply: reply.status_code == 200 and reply.text.startswith("<html>")),
        ({"fault": "no_ids"}, lambda reply: reply.ok and "output_ids" not in reply.json()),
        ({"fault": "abort"}, lambda reply: reply.json()["meta_info"]["finish_reason"]["type"] == "abort"),
    ],
)
def test_wrong_answers(
    start: Start, fault: dict[str, Any], check: Callable[[requests.Response], bool]
) -> None:
    server = start({**fault, "requests": [1]})
    assert check(server.generate([5]))
    assert len(server.generate([5]).json()["output_ids"]) > 1


@pytest.mark.parametrize("kind", ["close", "empty", "truncated"])
def test_broken_answers(start: Start, kind: str) -> None:
    server = start({"fault": kind, "requests": [1]})
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError, ValueError)):
        server.generate([5]).json()
    assert server.generate([5]).ok


def test_poison_kills_by_its_token_alone(start: Start, model: Path) -> None:
    import tokenizers

    token = tiny_model.MARKERS["poison"]
    poison = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(token)
    server = start({"fault": "poison", "token": token})
    assert poison is not None
    assert server.generate([5]).ok
    with pytest.raises(requests.ConnectionError):
        server.generate([5, poison])
    assert server.process.wait(3) == -signal.SIGKILL


def test_busy_means_503_and_work_goes_on(start: Start) -> None:
    server = start({"fault": "busy_503"}, scale=1)
    assert server.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, [5])
        time.sleep(0.2)
        assert server.get("/health").status_code == 503
        assert answer.result().ok
    assert server.get("/health").status_code == 200


def test_metrics_vanish_and_answers_come(start: Start) -> None:
    server = start({"fault": "metrics_vanish", "answers": 1})
    assert server.generate([5]).ok
    assert server.get("/metrics").status_code == 404
    assert server.generate([6]).ok


def test_it_ignores_sigterm_and_leaves_children_on_its_port(start: Start) -> None:
    server = start({"fault": "ignores_term"}, {"fault": "leaves_children", "count": 2})
    server.process.terminate()
    time.sleep(0.2)
    assert server.process.poll() is None
    server.process.kill()
    server.process.wait()
    port = server.url.rpartition(":")[2]
    found = subprocess.run(
        ["pgrep", "-f", "--", f"--port {port} "], capture_output=True, text=True, check=True
    )
    children = [int(pid) for pid in found.stdout.split()]
    assert len(children) == 2
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("127.0.0.1", int(port)))
    for child in children:
        os.kill(child, signal.SIGKILL)
