"""The adapter and a real SGLang: one server on the CPU, started by the adapter's own command."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import tokenizers
from tests.sglang.installation import COMMAND, CONTEXT, ENVIRONMENT, FLAGS, MODEL

from draftmill.engines import Completion, Facts, Refused, ServerSpec, Transient
from draftmill.engines import sglang as adapter
from draftmill.engines.sglang import SGLang
from draftmill.errors import UserError

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]  # a start may take minutes

KEY = "a1b2c3d4e5f6a7b8"
START_S = 600
END_OF_TURN = 2  # <|im_end|>
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
GREEDY: dict[str, Any] = {
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": 48, "min_new_tokens": 0,
    "stop": [], "stop_token_ids": [], "stop_regex": [], "logit_bias": {}, "ignore_eos": False, "seed": 7,
}  # fmt: skip


@dataclass(frozen=True)
class Running:
    address: str
    process: psutil.Process
    facts: Facts
    folder: Path
    start_s: float

    def post(self, prompt_ids: list[int], key: str = KEY, **sampling: Any) -> Completion:
        route, body = SGLang().request(prompt_ids, GREEDY | sampling)
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.post(self.address + route, json=body, headers=headers, timeout=START_S)
        return SGLang().completion(reply.status_code, reply.content)

    def log(self) -> str:
        return (self.folder / "server.log").read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def spec() -> ServerSpec:
    return ServerSpec(
        engine="sglang",
        model_path=str(MODEL),
        context_length=CONTEXT,
        flags=FLAGS,
        capacity=24,
        threads=1,
        env={**ENVIRONMENT, adapter.COMMAND_VARIABLE: COMMAND},
    )


@pytest.fixture(scope="module")
def server(spec: ServerSpec, folder: Path) -> Iterator[Running]:
    port = free_port()
    (folder / "key").write_text(KEY)
    launch = SGLang().launch(spec, port, folder / "key", folder)
    address = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with (folder / "server.log").open("wb") as log:
        started = subprocess.Popen(
            launch.argv,
            env={**os.environ, **launch.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        facts = None
        while facts is None:
            text = (folder / "server.log").read_text(errors="replace")
            assert started.poll() is None, SGLang().likely_cause(text) + text[-4000:]
            assert time.monotonic() < began + START_S, text[-4000:]
            time.sleep(0.5)
            facts = SGLang().facts(address, KEY)
        taken = time.monotonic() - began
        print(f"\nSGLang {facts.version} was ready after {taken:.1f} s")
        yield Running(address, psutil.Process(started.pid), facts, folder, taken)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def question(tokenizer: tokenizers.Tokenizer) -> list[int]:
    return list(tokenizer.encode(QUESTION, add_special_tokens=False).ids)


def test_facts(server: Running) -> None:
    assert server.facts.version == "0.5.23"
    assert (server.facts.capacity, server.facts.asked_capacity) == (24, 24)
    assert server.facts.kv_tokens == 16384
    assert server.facts.state_slots is None  # no recurrent state in this model
    assert adapter.capacity_in_log(server.log()) == server.facts.capacity


def test_the_key_shows_nowhere_but_in_a_private_file(server: Running) -> None:
    family = [server.process, *server.process.children(recursive=True)]
    assert len(family) > 1
    assert all(KEY not in " ".join(process.cmdline()) for process in family)
    assert KEY not in str(server.facts)
    assert KEY not in adapter.redact(server.log())
    (secret,) = server.folder.glob("sglang-*.yaml")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_http_answers_on_the_loopback_only(server: Running) -> None:
    port = int(server.address.rpartition(":")[2])
    listening = [
        connection.laddr
        for process in [server.process, *server.process.children(recursive=True)]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [where.ip for where in listening if where.port == port] == ["127.0.0.1"]
    open_to_all = [where for where in listening if where.ip not in ("127.0.0.1", "::1")]
    assert len(open_to_all) <= 1  # torch's rendezvous store; documented


def test_ids_in_ids_out_with_the_stop_token(
    server: Running, question: list[int], tokenizer: tokenizers.Tokenizer
) -> None:
    done = server.post(question)
    assert done.finish_reason == "stop"
    assert done.output_ids[-1] == END_OF_TURN
    assert "Paris" in tokenizer.decode(done.output_ids)


def test_a_limit_cuts_and_says_so(server: Running, question: list[int]) -> None:
    done = server.post(question, max_tokens=3)
    assert (len(done.output_ids), done.finish_reason) == (3, "length")


def test_the_prefix_cache_is_counted(server: Running, question: list[int]) -> None:
    server.post(question, max_tokens=1)
    assert server.post(question, max_tokens=1).cached_tokens > 0


def test_stop_strings_stop_tokens_and_ignoring_the_end(server: Running, question: list[int]) -> None:
    plain = server.post(question).output_ids
    assert server.post(question, stop=["capital of"]).output_ids == plain[:3]
    assert server.post(question, stop_token_ids=[plain[2]]).output_ids == plain[:3]
    assert server.post(question, stop_regex=["capital o."]).output_ids == plain[:3]
    assert len(server.post(question, min_new_tokens=20).output_ids) >= 20
    beyond = server.post(question, ignore_eos=True, max_tokens=len(plain) + 4)
    assert (len(beyond.output_ids), beyond.finish_reason) == (len(plain) + 4, "length")


def test_sampling_parameters_have_an_effect(server: Running, question: list[int]) -> None:
    plain = server.post(question).output_ids
    banned = server.post(question, logit_bias={str(plain[0]): -100.0}).output_ids
    assert banned[0] != plain[0]
    drawn = {server.post(question, temperature=5.0, max_tokens=8, seed=seed).output_ids for seed in range(4)}
    assert len(drawn) > 1
    one_choice = {
        server.post(question, temperature=5.0, top_k=1, max_tokens=8, seed=seed).output_ids for seed in (1, 2)
    }
    assert one_choice == {plain[:8]}


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 500, 8), (CONTEXT - 100, 200)])
def test_what_does_not_fit_the_context_is_refused(
    server: Running, question: list[int], length: int, max_tokens: int
) -> None:
    overlong = (question * (length // len(question) + 1))[:length]
    with pytest.raises(Refused, match="context length"):
        server.post(overlong, max_tokens=max_tokens)


def test_a_wrong_key_is_no_fault_of_the_prompt(server: Running, question: list[int]) -> None:
    with pytest.raises(Transient, match="API key"):
        server.post(question, key="wrong")
    assert SGLang().facts(server.address, "wrong") is None


def test_counters_move_with_answers(server: Running, question: list[int]) -> None:
    def generated() -> float:
        text = SGLang().metrics(server.address, KEY)
        return sum(
            float(n) for n in re.findall(r'realtime_tokens_total\{[^}]*mode="decode"[^}]*\} (\S+)', text)
        )

    before = generated()
    server.post(question, ignore_eos=True, max_tokens=40)
    deadline = time.monotonic() + 60  # the counters are written in intervals
    while generated() < before + 30 and time.monotonic() < deadline:
        server.post(question, ignore_eos=True, max_tokens=8)
    assert generated() >= before + 30


def test_many_at_once(server: Running, question: list[int]) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(lambda _: server.post(question, ignore_eos=True), range(16)))
    tokens = sum(len(done.output_ids) for done in answers)
    print(f"\n16 requests at once: {tokens / (time.monotonic() - began):.0f} output tokens/s")
    assert tokens == 16 * GREEDY["max_tokens"]


def test_the_installed_version_knows_its_flags(spec: ServerSpec) -> None:
    known = adapter.known_flags(spec.env)
    assert (
        adapter.settle(["--mamba-scheduler-strategy", "extra_buffer"], known)[0]
        == "--mamba-radix-cache-strategy"
    )
    with pytest.raises(UserError, match="did you mean --mem-fraction-static"):
        adapter.settle(["--mem-fraction-statik", "0.9"], known)


def test_a_failed_start_is_explained(spec: ServerSpec, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    gone = replace(spec, model_path=str(tmp_path / "no-model"))
    launch = SGLang().launch(gone, free_port(), tmp_path / "key", tmp_path)
    ended = subprocess.run(
        launch.argv,
        env={**os.environ, **launch.env},
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ended.returncode != 0
    assert f"There is no model at {tmp_path / 'no-model'}" in SGLang().likely_cause(ended.stderr)
