"""SGLang's adapter against what a real SGLang said: recordings/sglang-0.5.23-cpu."""

from __future__ import annotations

import gzip
import json
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftmill import config, engines
from draftmill.engines import Refused, ServerSpec, Transient
from draftmill.engines import sglang as adapter
from draftmill.engines.sglang import SGLang
from draftmill.errors import UserError

RECORDED = Path(__file__).parents[1] / "recordings"
CPU = RECORDED / "sglang-0.5.23-cpu"
KEY = "recordedkey123"


def unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


REPLIES: dict[str, dict[str, Any]] = json.loads((CPU / "replies.json").read_text("utf-8"))
LOGS: dict[str, str] = json.loads(unpacked(CPU / "logs.json.gz"))
HELP = unpacked(CPU / "help.txt.gz").decode()
KNOWN = adapter.parse_help(HELP)
MODEL = config.resolve({"prompts": {"files": ["x.jsonl"]}})["model"] | {"path": "some/folder"}
SAMPLING = {
    **config.sampling(config.resolve({"prompts": {"files": ["x.jsonl"]}}), {}),
    "max_tokens": 64,
    "seed": 2**31 - 1,
}


def answer(name: str) -> engines.Completion:
    return SGLang().completion(REPLIES[name]["status"], REPLIES[name]["body"].encode())


# --- answers


def test_an_answer_ends_with_its_stop_token() -> None:
    done = answer("stop_token")
    assert done.output_ids == (504, 3575, 282, 4649, 314, 7042, 30, 2)
    assert done.finish_reason == "stop"
    assert done.queue_s > 0


def test_a_cut_answer_says_length_and_counts_the_cache() -> None:
    done = answer("length")
    assert (done.output_ids, done.finish_reason, done.cached_tokens) == ((504, 3575, 282), "length", 15)


def test_a_stop_string_ends_an_answer_with_the_tokens_that_hold_it() -> None:
    assert answer("stop_string").output_ids == (504, 3575, 282)
    assert answer("stop_string").finish_reason == "stop"


def test_more_answers_are_read() -> None:
    assert answer("ignore_eos").finish_reason == "length" and len(answer("ignore_eos").output_ids) == 16
    assert len(answer("min_new_tokens").output_ids) >= 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "prompt_too_long",
            "The input (6400 tokens) is longer than the model's context length (4096 tokens).",
        ),
        ("total_too_long", "exceeds the model's maximum context length"),
        ("pool_too_small", "exceeds the maximum allowed length (2042 tokens)"),
        ("unknown_parameter", "unknown field `foo`"),
        ("bad_top_p", "top_p must be in (0, 1]"),
        ("bad_type", "invalid type"),
        ("bad_ids", "elements must be int"),
        ("no_ids", "input_ids cannot be empty"),
        ("no_such_adapter", "LoRA is not enabled"),
    ],
)
def test_what_will_never_be_answered_is_refused_in_the_servers_words(name: str, words: str) -> None:
    with pytest.raises(Refused) as refusal:
        answer(name)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) <= 500


@pytest.mark.parametrize("name", ["queue_full", "aborted_waiting", "aborted_running"])
def test_a_busy_or_stopping_server_is_asked_again(name: str) -> None:
    with pytest.raises(Transient):
        answer(name)


def test_a_wrong_key_says_where_to_look() -> None:
    with pytest.raises(Transient, match=r"API key .*key file"):
        answer("wrong_key")


GOOD = json.loads(REPLIES["stop_token"]["body"])


def changed(**changes: object) -> bytes:
    meta = GOOD["meta_info"] | {k: v for k, v in changes.items() if k != "output_ids"}
    return json.dumps(
        GOOD | {"meta_info": meta} | {k: v for k, v in changes.items() if k == "output_ids"}
    ).encode()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, REPLIES["stop_token"]["body"].encode()[:-40]),
        (200, b""),
        (200, b"<html><body>It works!</body></html>"),
        (200, b"[]"),
        (200, b'{"text": "The capital"}'),
        (200, changed(output_ids=None)),
        (200, changed(output_ids=[])),
        (200, changed(output_ids=[504, "3575"])),
        (200, changed(output_ids=[504, True, 2, 3, 4, 5, 6, 7])),
        (200, changed(output_ids=[504, -1, 2, 3, 4, 5, 6, 7])),
        (200, changed(output_ids=[504, 3575])),  # fewer than completion_tokens
        (200, changed(finish_reason=None)),
        (200, changed(finish_reason={"type": "mystery"})),
        (400, b"<html>400 Bad Request</html>"),
        (400, b"{}"),
        (
            400,
            b'{"error": {"message": "Request is disconnected from the client side (type 1). Abort request"}}',
        ),
        (408, b""),
        (429, b'{"error": "slow down"}'),
        (500, b"Internal Server Error"),
        (
            500,
            b'{"object":"error","message":"Out of memory even after retracting all other requests","code":500}',
        ),
        (502, b"\xff\xfe bad gateway"),
        (503, b'{"error": {"message": "shutting down"}}'),
        (404, b'{"detail": "Not Found"}'),
        (302, b""),
    ],
)
def test_whatever_is_not_a_whole_answer_is_asked_again(status: int, body: bytes) -> None:
    with pytest.raises(Transient):
        SGLang().completion(status, body)


def test_an_abort_for_length_is_refused() -> None:
    too_long = {
        "type": "abort",
        "message": "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens).",
    }
    with pytest.raises(Refused, match="5000 tokens"):
        SGLang().completion(200, changed(finish_reason=too_long))


# --- requests


def test_every_parameter_goes_out_under_its_own_name() -> None:
    route, body = SGLang().request([1, 2, 3], SAMPLING | {"stop": ["END"], "repetition_penalty": 1.2})
    assert route == "/generate"
    assert body["input_ids"] == [1, 2, 3]
    assert "lora_path" not in body
    assert body["sampling_params"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.2, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "max_new_tokens": 64, "min_new_tokens": 0, "stop": ["END"], "stop_token_ids": [], "stop_regex": [],
        "logit_bias": None, "ignore_eos": False, "sampling_seed": 2**31 - 1, "n": 1,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip


def test_only_parameters_that_this_version_has_are_sent() -> None:
    allowed = REPLIES["unknown_parameter"]["body"]  # its message lists them
    assert all(f"`{name}`" in allowed for name in SGLang().request([1], SAMPLING)[1]["sampling_params"])


def test_no_sampling_parameter_of_the_config_is_forgotten() -> None:
    read: set[str] = set()

    class Recorder(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

    SGLang().request([1], Recorder(SAMPLING))
    assert read == set(SAMPLING)


def test_the_runs_adapter_is_asked_for() -> None:
    flags = SGLang().numerics_flags(MODEL | {"adapters": ["some/lora"]})
    assert flags == ("--lora-paths", "target=some/lora")
    assert SGLang().request([1], SAMPLING | {"adapter": True})[1]["lora_path"] == "target"


# --- flags


def test_the_plain_model_block_needs_no_flags() -> None:
    assert SGLang().numerics_flags(MODEL) == ()


def test_the_model_block_becomes_flags_that_the_real_version_knows() -> None:
    model = MODEL | {
        "path": "org/name",
        "revision": "0" * 40,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "state_dtype": "bfloat16",
        "load_format": "dummy",
        "overrides": {"b": 1, "a": {"x": 2}},
        "trust_remote_code": True,
        "flags": ["--enable-fp32-lm-head"],
    }
    flags = SGLang().numerics_flags(model)
    assert adapter.settle(flags, KNOWN) == flags
    assert flags == (
        "--dtype", "bfloat16", "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3",
        "--mamba-ssm-dtype", "bfloat16", "--load-format", "dummy",
        "--json-model-override-args", '{"a": {"x": 2}, "b": 1}', "--trust-remote-code",
        "--revision", "0" * 40, "--enable-fp32-lm-head",
    )  # fmt: skip


@pytest.mark.parametrize("path", ["embedded", "models/some.gguf"])
def test_a_gguf_file_is_not_for_sglang(path: str) -> None:
    with pytest.raises(UserError, match="GGUF"):
        SGLang().numerics_flags(MODEL | {"path": path})


def test_two_adapters_are_no_target_model() -> None:
    with pytest.raises(UserError, match="one target model"):
        SGLang().numerics_flags(MODEL | {"adapters": ["a", "b"]})


def test_help_names_flags_and_values_but_its_prose_does_not() -> None:
    assert KNOWN["--mamba-radix-cache-strategy"] == ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
    assert KNOWN["--tp-size"] == KNOWN["--tensor-parallel-size"] == ()
    assert {
        "--api-key",
        "--config",
        "--model-path",
        "--max-running-requests",
        "--enable-metrics",
    } <= KNOWN.keys()
    prose = "usage: sglang [--old OLD]\n  --new NEW             Use it with --other and\n                        --more.\n"
    assert adapter.parse_help(prose) == {"--new": ()}


def test_an_unknown_flag_names_its_nearest() -> None:
    with pytest.raises(
        UserError, match="does not know the flag --mem-fraction; did you mean --mem-fraction-static"
    ):
        adapter.settle(["--mem-fraction", "0.9"], KNOWN)


def test_a_value_that_the_version_lacks_is_named() -> None:
    with pytest.raises(
        UserError, match="takes no 'extra_lazy' for --mamba-radix-cache-strategy; it takes auto"
    ):
        adapter.settle(["--mamba-radix-cache-strategy=extra_lazy"], KNOWN)


@pytest.mark.parametrize(
    ("asked", "known", "settled"),
    [
        ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy", "--mamba-radix-cache-strategy"),
        ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy", "--mamba-scheduler-strategy"),
        ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-max-bs-decode"),
    ],
)
def test_a_renamed_flag_goes_by_the_name_that_is_known(asked: str, known: str, settled: str) -> None:
    assert adapter.settle([asked, "4"], {known: ()}) == (settled, "4")
    assert adapter.settle([asked + "=4"], {known: ()}) == (settled + "=4",)


# --- starting


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command that answers --help as 0.5.23 does; the file it returns counts how often it was asked."""
    (tmp_path / "help.txt").write_text(HELP)
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys\nhere = pathlib.Path(__file__).parent\n"
        "with (here / 'asked').open('a') as file: file.write('x')\n"
        "assert sys.argv[1:] == ['--help']\nprint((here / 'help.txt').read_text())\n"
    )
    monkeypatch.setenv(adapter.COMMAND_VARIABLE, f"{sys.executable} {program}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "asked"


def spec(**changes: Any) -> ServerSpec:
    return replace(ServerSpec(engine="sglang", model_path="models/x", context_length=4096), **changes)


def started(tmp_path: Path, **changes: Any) -> tuple[engines.Launch, list[str]]:
    (tmp_path / "key").write_text(KEY + "\n")
    launch = SGLang().launch(spec(**changes), 30000, tmp_path / "key", tmp_path / "run")
    return launch, list(launch.argv[2:])


@pytest.mark.usefixtures("installed")
def test_a_server_on_one_gpu(tmp_path: Path) -> None:
    launch, words = started(tmp_path, gpus=("GPU-aa",), numerics=("--dtype", "bfloat16"), threads=3)
    secret = tmp_path / "run" / "sglang-30000.yaml"
    assert words == [
        "--config", str(secret), "--model-path", "models/x", "--host", "127.0.0.1", "--port", "30000",
        "--enable-metrics", "--context-length", "4096", "--log-level-http", "warning", "--dtype", "bfloat16",
    ]  # fmt: skip
    assert launch.env == {"CUDA_VISIBLE_DEVICES": "GPU-aa", "OMP_NUM_THREADS": "3"}
    assert KEY not in " ".join([*launch.argv, *launch.env.values()])


@pytest.mark.usefixtures("installed")
def test_the_key_lies_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    secret = tmp_path / "run" / "sglang-30000.yaml"
    secret.write_text("left by an earlier start")
    secret.chmod(0o644)
    started(tmp_path, gpus=("GPU-aa",))
    assert secret.read_text() == f'api-key: "{KEY}"\n'
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.usefixtures("installed")
def test_two_gpus_share_the_model_and_a_capacity_is_passed_on(tmp_path: Path) -> None:
    launch, words = started(tmp_path, gpus=("GPU-aa", "GPU-bb"), capacity=96)
    assert words[words.index("--tp-size") + 1] == "2"
    assert words[words.index("--max-running-requests") + 1] == "96"
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"


@pytest.mark.usefixtures("installed")
def test_the_users_own_figure_counts(tmp_path: Path) -> None:
    _, words = started(
        tmp_path, gpus=("a", "b"), capacity=96, flags=("--max-running-requests", "8", "--dp-size", "2")
    )
    assert words.count("--max-running-requests") == 1 and words[-4:-2] == ["--max-running-requests", "8"]
    assert "--tp-size" not in words


@pytest.mark.usefixtures("installed")
def test_on_the_cpu(tmp_path: Path) -> None:
    launch, words = started(tmp_path, flags=("--device", "cpu"), env={"X": "1"})
    assert launch.env == {"X": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    assert "--tp-size" not in words
    with pytest.raises(UserError, match=r"no GPU.*--device cpu"):
        started(tmp_path)


@pytest.mark.usefixtures("installed")
def test_old_names_and_unknown_flags_before_any_start(tmp_path: Path) -> None:
    _, words = started(tmp_path, gpus=("a",), flags=("--mamba-scheduler-strategy", "no_buffer"))
    assert words[-2:] == ["--mamba-radix-cache-strategy", "no_buffer"]
    with pytest.raises(UserError, match="did you mean --disable-radix-cache"):
        started(tmp_path, gpus=("a",), flags=("--disable-radix-cash",))


def test_the_installed_version_is_asked_once(installed: Path, tmp_path: Path) -> None:
    adapter._ask.cache_clear()
    started(tmp_path, gpus=("a",))
    started(tmp_path, gpus=("a",), flags=("--disable-radix-cache",))
    assert installed.read_text() == "x"


def test_the_answer_is_kept_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (tmp_path / "site" / "sglang-1.2.3.dist-info").mkdir()
    (tmp_path / "site" / "sglang-1.2.3.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 1.2.3\n")
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "print('options:\\n  --model-path P  text\\n  --new {a,b}  text')"
    )
    monkeypatch.delenv(adapter.COMMAND_VARIABLE, raising=False)
    place = {"PYTHONPATH": str(tmp_path / "site"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    known = {"--model-path": (), "--new": ("a", "b")}
    adapter._ask.cache_clear()
    assert adapter.known_flags(place) == known
    (package / "launch_server.py").write_text("raise SystemExit('not asked again')")
    adapter._ask.cache_clear()
    assert adapter.known_flags(place) == known


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/no/such/python -m sglang.launch_server", "cannot be asked.*No such file"),
        (f"{sys.executable} -S -m sglang.launch_server", "SGLang cannot be started: SGLang is not installed"),
        (f"{sys.executable} -c print(1)", "lists no flags of SGLang"),
    ],
)
def test_an_sglang_that_is_not_there(command: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        adapter.known_flags({adapter.COMMAND_VARIABLE: command})


# --- what a server says of itself


class Server(HTTPServer):
    pages: dict[str, tuple[int, bytes]]
    key: str


class Pages(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        open_to_all = self.path in ("/health", "/metrics")
        if not open_to_all and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, body = 401, b'{"error":"Unauthorized"}'
        else:
            status, body = self.server.pages.get(self.path, (404, b'{"detail":"Not Found"}'))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    """Answers with what the real one answered, on a port of the loopback."""
    serving = Server(("127.0.0.1", 0), Pages)
    serving.key = KEY
    serving.pages = {
        "/health": (200, b""),
        "/server_info": (200, unpacked(CPU / "server_info.json.gz")),
        "/metrics": (200, unpacked(CPU / "metrics.prom.gz")),
    }
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield serving
    serving.shutdown()
    thread.join()
    serving.server_close()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_facts_of_the_real_server(server: Server) -> None:
    facts = SGLang().facts(address(server), KEY)
    assert facts is not None
    assert (facts.version, facts.capacity, facts.asked_capacity) == ("0.5.23", 1, 1)
    assert (facts.kv_tokens, facts.state_slots) == (16384, None)
    assert facts.flags["device"] == "cpu" and facts.flags["schedule_policy"] == "fcfs"


def test_facts_are_stored_without_secrets(server: Server) -> None:
    facts = SGLang().facts(address(server), KEY)
    assert facts is not None
    assert KEY in server.pages["/server_info"][1].decode()  # the server itself tells it, twice
    assert KEY not in json.dumps(facts.flags)
    assert facts.flags["api_key"] == "[redacted]"


def info(server: Server, **changes: Any) -> None:
    changed_info = json.loads(server.pages["/server_info"][1]) | changes
    server.pages["/server_info"] = (200, json.dumps(changed_info).encode())


def test_capacity_is_the_effective_figure_over_all_ranks(server: Server) -> None:
    info(
        server,
        dp_size=2,
        max_running_requests=256,
        internal_states=[{"effective_max_running_requests_per_dp": 44}] * 2,
    )
    facts = SGLang().facts(address(server), KEY)
    assert facts is not None
    assert (facts.capacity, facts.asked_capacity, facts.kv_tokens) == (88, 256, 2 * 16384)


def test_an_older_version_is_read_from_its_log(server: Server, tmp_path: Path) -> None:
    info(server, internal_states=[{}], version="0.4.6")
    server.pages["/get_server_info"] = server.pages.pop("/server_info")
    with pytest.raises(UserError, match=r"SGLang 0\.4\.6 .*newer"):
        SGLang().facts(address(server), KEY)
    log = tmp_path / "server.log"
    log.write_bytes(unpacked(RECORDED / "extra.startup.log.gz"))
    facts = SGLang().facts(address(server), KEY, log)
    assert facts is not None and facts.capacity == 44


def test_state_slots_come_from_the_metrics_of_one_rank(server: Server) -> None:
    server.pages["/metrics"] = (200, unpacked(RECORDED / "extra.prom.gz"))
    facts = SGLang().facts(address(server), KEY)
    assert facts is not None and facts.state_slots == 224


@pytest.mark.parametrize("status", [503, 500, 404])
def test_a_server_that_is_not_ready_has_no_facts(server: Server, status: int) -> None:
    server.pages["/health"] = (status, b"")
    assert SGLang().facts(address(server), KEY) is None


def test_nobody_there_has_no_facts() -> None:
    assert SGLang().facts("http://127.0.0.1:1", KEY) is None


def test_a_server_of_somebody_else_is_not_ours(server: Server) -> None:
    assert SGLang().facts(address(server), "another") is None


def test_a_proxy_never_sees_the_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    assert SGLang().facts(address(server), KEY) is not None


def test_metrics_are_passed_on_as_they_are(server: Server) -> None:
    assert "sglang:num_running_reqs" in SGLang().metrics(address(server), KEY)


# --- logs


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("unknown_flag", "does not know --no-such-flag 3"),
        ("bad_value", "argument --kv-cache-dtype: invalid choice: 'fp9'"),
        ("no_cuda", "no usable GPU"),
        ("no_kernel", "compiled kernel"),
        ("no_model", "There is no model at .models/nope"),
        ("no_sglang", "not installed"),
        ("port_taken", "The port is taken"),
        ("crash", "IndexError: index out of range in self"),
    ],
)
def test_a_failed_start_names_its_likely_cause(log: str, words: str) -> None:
    assert words in SGLang().likely_cause(LOGS[log])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.", "GPU ran out of memory"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "leave no memory"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "compiled kernel",
        ),
        ("RuntimeError: Found no NVIDIA driver on your system.", "no usable GPU"),
        ("RuntimeError: Cannot find any model weights with `models/x`", "no weights in models/x"),
    ],
)
def test_causes_that_this_machine_cannot_show(line: str, words: str) -> None:
    assert words in SGLang().likely_cause(f"Traceback (most recent call last):\n  File x\n{line}\n")


def test_a_refused_flag_pair() -> None:
    log = unpacked(RECORDED / "nobuf-refused.log.gz").decode()
    assert "add --disable-overlap-schedule" in SGLang().likely_cause(log)


@pytest.mark.parametrize("log", ["ready", "extra"])
def test_a_good_start_shows_no_cause(log: str) -> None:
    text = LOGS[log] if log in LOGS else unpacked(RECORDED / "extra.startup.log.gz").decode()
    assert SGLang().likely_cause(text) == ""
    assert not SGLang().start_failed(text)


def test_a_lost_start_is_seen_while_the_process_lives_on() -> None:
    assert SGLang().start_failed(LOGS["port_taken"].partition("Initialization failed")[0])
    assert SGLang().start_failed(LOGS["crash"])


def test_the_capacity_in_a_real_log() -> None:
    assert adapter.capacity_in_log(LOGS["ready"]) == 1
    assert adapter.capacity_in_log("no such line") is None


@pytest.mark.parametrize(
    "text",
    [
        LOGS["ready"],
        "args: --api-key recordedkey123 --port 1",
        "ServerArgs(api_key='recordedkey123', admin_api_key=None)",
        '{"api_key": "recordedkey123"}',
        "--admin-api-key=recordedkey123",
    ],
)
def test_no_log_keeps_a_key(text: str) -> None:
    assert KEY in text
    assert KEY not in adapter.redact(text)
    assert KEY not in adapter.redact(text, KEY)


def test_what_is_no_key_stays() -> None:
    assert adapter.redact("api_key=None, port=1") == "api_key=None, port=1"
