"""The llama.cpp adapter against its real server with the embedded model."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from draftmill import config as settings
from draftmill import model
from draftmill.chat import ChatTemplate
from draftmill.engines import Completion, Engine, Launch, Refused, ServerSpec, Transient, load
from draftmill.engines.llamacpp import LlamaCpp
from draftmill.errors import UserError
from draftmill.telemetry import parse_prometheus
from draftmill.tokens import Tokenizer

CONTEXT = 256
KEY = "a-secret-key-of-this-test"
CONFIG = settings.resolve({})
ENGINE: Engine = LlamaCpp()


def sampling(**changes: Any) -> dict[str, Any]:
    """Everything that is sent with a turn, greedy unless told."""
    return {
        **settings.sampling(CONFIG, {}), "adapter": False, "seed": 1, "temperature": 0.0, "max_tokens": 24, **changes,
    }  # fmt: skip


@dataclass
class Running:
    address: str
    launch: Launch
    process: "subprocess.Popen[bytes]"
    log: Path
    tokenizer: Tokenizer
    template: ChatTemplate

    def prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(self.template.render([{"role": "user", "content": text}]))

    def post(self, prompt_ids: list[int], key: str = KEY, **changes: Any) -> requests.Response:
        route, body = ENGINE.request(prompt_ids, sampling(**changes))
        headers = {"Authorization": f"Bearer {key}"}
        return requests.post(self.address + route, json=body, headers=headers, timeout=120)

    def ask(self, prompt_ids: list[int], **changes: Any) -> Completion:
        reply = self.post(prompt_ids, **changes)
        return ENGINE.completion(reply.status_code, reply.content)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, spec: ServerSpec, port: int) -> tuple[Launch, "subprocess.Popen[bytes]", Path]:
    key_file = folder / "key"
    key_file.write_text(KEY)
    launch = ENGINE.launch(spec, port, key_file, folder)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.argv, env={**os.environ, **launch.env}, stdout=output, stderr=subprocess.STDOUT
        )
    return launch, process, log


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("llamacpp")
    location = model.locate(CONFIG["model"])
    assert location is not None
    frozen = folder / "model"
    model.freeze(CONFIG["model"], location, frozen)
    spec = ServerSpec("llamacpp", str(location), CONTEXT, capacity=2, threads=1)
    port = free_port()
    launch, process, log = start(folder, spec, port)
    try:
        deadline = time.monotonic() + 120
        while ENGINE.facts(f"http://127.0.0.1:{port}", KEY) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Running(
            f"http://127.0.0.1:{port}",
            launch,
            process,
            log,
            Tokenizer.load(frozen),
            ChatTemplate.load(frozen),
        )
    finally:
        process.kill()
        process.wait()


# --- what the server says of itself


def test_the_facts_are_the_effective_ones(running: Running) -> None:
    facts = ENGINE.facts(running.address, KEY)
    assert facts is not None
    assert facts.capacity == 2 and facts.kv_tokens == 2 * CONTEXT
    assert facts.version.startswith("xllamacpp ") and KEY not in json.dumps(facts.flags)


def test_a_server_that_is_not_there_has_no_facts() -> None:
    assert ENGINE.facts(f"http://127.0.0.1:{free_port()}", KEY) is None


def test_a_wrong_key_is_refused_everywhere(running: Running) -> None:
    assert running.post(running.prompt("hi"), key="wrong").status_code == 401
    assert ENGINE.facts(running.address, "wrong") is None
    with pytest.raises(requests.HTTPError):
        ENGINE.metrics(running.address, "")
    with pytest.raises(Transient, match="401"):
        running.ask(running.prompt("hi"), key="wrong")


def test_a_proxy_never_sees_the_key(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert ENGINE.facts(running.address, KEY) is not None
    assert "llamacpp:" in ENGINE.metrics(running.address, KEY)


def test_the_key_is_on_no_command_line_and_in_no_log(running: Running) -> None:
    assert not any(KEY in word for word in running.launch.argv) and KEY not in str(running.launch.env)
    assert KEY not in Path(f"/proc/{running.process.pid}/cmdline").read_text()
    assert KEY not in running.log.read_text(errors="replace")


def test_it_listens_on_the_loopback_only(running: Running) -> None:
    port = int(running.address.rpartition(":")[2])
    listening = [
        words[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in (Path(table).read_text().splitlines()[1:] if Path(table).exists() else [])
        if (words := line.split())[3] == "0A" and words[1].endswith(f":{port:04X}")
    ]
    assert listening == [f"0100007F:{port:04X}"]


def test_the_metrics_count_what_was_sampled(running: Running) -> None:
    def sample() -> Any:
        return parse_prometheus(ENGINE.metrics(running.address, KEY), 0.0)

    before = sample()
    answer = running.ask(running.prompt("Count to five."), ignore_eos=True, max_tokens=16)
    deadline = time.monotonic() + 60
    while sample().generation_tokens - (before.generation_tokens or 0) < len(answer.output_ids):
        assert time.monotonic() < deadline, "the counter never moved"
        time.sleep(0.1)
    assert sample().running == 0


# --- ids in, ids out


def test_greedy_answers_repeat_and_are_what_the_ids_say(running: Running) -> None:
    prompt = running.prompt("Name three colors.")
    first, second = running.ask(prompt), running.ask(prompt)
    assert first.output_ids == second.output_ids
    assert "Red" in running.tokenizer.decode(first.output_ids)


def test_the_ids_sent_are_the_ids_that_count_not_their_text(running: Running) -> None:
    """The same text from other ids is another prompt: nothing is tokenised anew."""
    whole = running.prompt("international")
    text = running.tokenizer.decode(whole)
    split = [i for char in text for i in running.tokenizer.encode(char)]
    assert running.tokenizer.decode(split) == text and split != whole
    route, body = ENGINE.request(split[:200], sampling(max_tokens=1))
    reply = requests.post(
        running.address + route, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )
    assert reply.json()["tokens_evaluated"] == len(split[:200])


def test_a_stop_token_is_among_the_ids(running: Running) -> None:
    (stop,) = running.tokenizer.encode("<|im_end|>")
    answer = running.ask(running.prompt("Say only: yes"), max_tokens=150)
    assert answer.finish_reason == "stop" and answer.output_ids[-1] == stop
    assert stop not in answer.output_ids[:-1]


def test_a_cut_answer_has_exactly_max_tokens_and_no_stop(running: Running) -> None:
    for most in (1, 7):
        answer = running.ask(running.prompt("Tell me a long story."), max_tokens=most)
        assert answer.finish_reason == "length" and len(answer.output_ids) == most


def test_a_stop_word_ends_the_answer_and_its_tokens_stay(running: Running) -> None:
    prompt = running.prompt("Count: one two three four five six seven")
    free = running.ask(prompt, max_tokens=40)
    words = running.tokenizer.decode(free.output_ids).split()
    word = words[min(4, len(words) - 1)]
    answer = running.ask(prompt, max_tokens=40, stop=[word])
    assert answer.finish_reason == "stop"
    assert word in running.tokenizer.decode(answer.output_ids)
    assert answer.output_ids == free.output_ids[: len(answer.output_ids)]


def test_ignore_eos_runs_on(running: Running) -> None:
    answer = running.ask(running.prompt("Say only: yes"), max_tokens=100, ignore_eos=True)
    assert answer.finish_reason == "length" and len(answer.output_ids) == 100


def test_a_seed_decides_a_sampled_answer(running: Running) -> None:
    prompt = running.prompt("Invent a name for a cat.")
    answers = [
        running.ask(prompt, temperature=1.5, seed=seed, top_k=-1, max_tokens=12).output_ids
        for seed in (5, 5, 6, 7)
    ]
    assert answers[0] == answers[1] and len(set(answers)) > 1


def test_a_cached_prompt_is_counted(running: Running) -> None:
    prompt = running.prompt("A sentence that nobody else in this file asks about, long enough to be kept.")
    running.ask(prompt, max_tokens=1)
    assert 0 < running.ask(prompt, max_tokens=1).cached_tokens <= len(prompt)


# --- what is refused


def test_an_overlong_prompt_is_refused_and_never_cut(running: Running) -> None:
    prompt = (running.prompt("word " * 400))[: CONTEXT + 50]
    assert len(prompt) > CONTEXT
    with pytest.raises(Refused, match="context"):
        running.ask(prompt)


def test_a_prompt_that_fills_the_context_is_refused_too(running: Running) -> None:
    """No room is left for a single token."""
    prompt = running.prompt("word " * 400)[:CONTEXT]
    with pytest.raises(Refused):
        running.ask(prompt)


def test_the_server_serves_on_after_refusals(running: Running) -> None:
    with pytest.raises(Refused):
        running.ask(running.prompt("word " * 400))
    assert running.ask(running.prompt("hi"), max_tokens=2).output_ids


def test_a_server_that_is_gone_is_transient_for_what_it_half_said() -> None:
    for status, body in (
        (200, b'{"tokens": [1, 2'), (200, b""), (502, b"<html>bad gateway</html>"), (200, b"[]"), (200, b'"busy"'),
        (503, b'{"error": {"message": "Loading model"}}'), (500, b'{"error": {"message": "oops"}}'), (200, b'{"error": 1}'),
    ):  # fmt: skip
        with pytest.raises(Transient):
            ENGINE.completion(status, body)


# --- the names of things


def test_every_sampling_parameter_reaches_the_server_under_its_own_name(running: Running) -> None:
    """The server tells with each answer what it sampled with."""
    asked = sampling(
        temperature=0.75, top_p=0.5, top_k=17, min_p=0.25, repetition_penalty=1.25, frequency_penalty=0.5,
        presence_penalty=0.125, seed=99, max_tokens=3, stop=["qq"],
    )  # fmt: skip
    route, body = ENGINE.request(running.prompt("hi"), asked)
    reply = requests.post(
        running.address + route, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )
    used = reply.json()["generation_settings"]
    expected = {
        "temperature": 0.75, "top_p": 0.5, "top_k": 17, "min_p": 0.25, "repeat_penalty": 1.25, "frequency_penalty": 0.5,
        "presence_penalty": 0.125, "seed": 99, "n_predict": 3, "stop": ["qq"], "ignore_eos": False,
    }  # fmt: skip
    assert {name: used[name] for name in expected} == expected
    assert used["samplers"] == ["penalties", "top_k", "top_p", "min_p", "temperature"]
    assert used["dry_multiplier"] == 0 and used["xtc_probability"] == 0 and used["mirostat"] == 0


def test_all_tokens_is_zero_here() -> None:
    assert ENGINE.request([1], sampling(top_k=-1))[1]["top_k"] == 0


def test_nothing_that_decides_an_answer_is_dropped_in_silence() -> None:
    """Every sampling key of the config is sent, or refused as soon as it is set."""
    neutral = sampling()
    for name in settings.sampling(CONFIG, {}):
        changed = {**neutral, name: {"bool": True, "int": 5, "float": 0.5, "list": [1], "dict": {"1": 1}}.get(
            type(neutral[name]).__name__, "x")}  # fmt: skip
        if changed[name] == neutral[name]:
            continue
        try:
            assert ENGINE.request([1], changed) != ENGINE.request([1], neutral), name
        except UserError as refusal:
            assert f"sampling.{name} is not supported" in str(refusal)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_token_ids", [1]), ("min_new_tokens", 3), ("stop_regex", ["a+"]), ("logit_bias", {"1": 2.0})],
)
def test_what_llama_cpp_lacks_is_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"sampling\.{name} is not supported"):
        ENGINE.request([1], sampling(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "half"), ("quantization", "fp8"), ("kv_cache_dtype", "q8_0"), ("state_dtype", "bfloat16"),
        ("adapters", ["lora"]), ("overrides", {"rope_theta": 1}), ("flags", ["--enable-fp32-lm-head"]),
        ("load_format", "dummy"),
    ],
)  # fmt: skip
def test_numerics_that_llama_cpp_lacks_are_refused(name: str, value: object) -> None:
    """Each is part of the key: answers made without it must not stand under it."""
    with pytest.raises(UserError, match=rf"model\.{name} "):
        ENGINE.numerics_flags({**CONFIG["model"], name: value})
    assert ENGINE.numerics_flags(CONFIG["model"]) == ()


def test_an_unknown_server_flag_is_a_sentence(tmp_path: Path) -> None:
    spec = ServerSpec("llamacpp", "some.gguf", CONTEXT, flags=("--mem-fraction-static",))
    with pytest.raises(
        UserError, match=r"has --mem-fraction-static, which the llamacpp engine does not know"
    ):
        ENGINE.launch(spec, 1, tmp_path / "key", tmp_path)


def test_the_engine_is_known_by_its_name() -> None:
    assert load("llamacpp").name == "llamacpp"


# --- starts that fail


def test_a_broken_model_ends_the_process_and_its_log_names_the_cause(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(1000))
    _, process, log = start(tmp_path, ServerSpec("llamacpp", str(broken), CONTEXT, threads=1), free_port())
    assert process.wait(120) != 0
    assert "GGUF file is broken" in ENGINE.likely_cause(log.read_text(errors="replace"))


def test_a_taken_port_ends_the_process_and_its_log_names_the_cause(running: Running, tmp_path: Path) -> None:
    port = int(running.address.rpartition(":")[2])
    path = json.loads(running.launch.argv[-1])["model"]
    _, process, log = start(tmp_path, ServerSpec("llamacpp", path, CONTEXT, capacity=1, threads=1), port)
    try:
        assert process.wait(120) != 0
    finally:
        process.kill()
        process.wait()
    assert "port is taken" in ENGINE.likely_cause(log.read_text(errors="replace"))


def test_sigterm_ends_the_server(tmp_path: Path, running: Running) -> None:
    path = shutil.copyfile(json.loads(running.launch.argv[-1])["model"], tmp_path / "model.gguf")
    port = free_port()
    _, process, _ = start(tmp_path, ServerSpec("llamacpp", str(path), 64, capacity=1, threads=1), port)
    deadline = time.monotonic() + 120
    while ENGINE.facts(f"http://127.0.0.1:{port}", KEY) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) is not None
