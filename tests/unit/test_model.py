"""A model is frozen with the tokenizer its server uses, and an identity that tells models apart."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import tiny_model

from draftmill import config as settings
from draftmill import model, prompts
from draftmill.chat import ChatTemplate
from draftmill.engines import ServerSpec
from draftmill.engines.llamacpp import LlamaCpp
from draftmill.errors import UserError
from draftmill.model import Model
from draftmill.tokens import Tokenizer


def block(**changes: Any) -> dict[str, Any]:
    """The config's model block."""
    chosen: dict[str, Any] = settings.resolve({"model": changes})["model"]
    return chosen


def frozen(location: Path, out: Path, **changes: Any) -> Model:
    made = model.freeze(block(**changes), location, out)
    assert Model.load(out) == made
    return made


# --- the embedded GGUF, against its own server


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded")
    location = model.locate(block())
    assert location is not None
    model.freeze(block(), location, folder)
    return folder


@pytest.fixture(scope="module")
def server(embedded: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Address and headers of the real server with the embedded model."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        key_file = Path(scratch) / "key"
        key_file.write_text("secret")
        spec = ServerSpec("llamacpp", Model.load(embedded).path, 512, capacity=1, threads=1)
        launch = LlamaCpp().launch(spec, port, key_file, Path(scratch))
        process = subprocess.Popen(
            launch.argv,
            env={**os.environ, **launch.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while LlamaCpp().facts(address, "secret") is None:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield address, {"Authorization": "Bearer secret"}


def ifbench() -> list[str]:
    (source,) = prompts.find_sources(["package:ifbench/data/IFBench_test.jsonl"])
    rows = (row for row in prompts.read_rows(source.path) if isinstance(row, prompts.Row))
    return [str(row.value["prompt"]) for row in rows]


ODD = [
    "", " ", "\n", "\r\n\t ", "a  b   c", "  leading", "trailing  ", "12345 3.14 1,000", "don't I'll WE'VE",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start|> <|im_end", "<think>x</think>",
    "naïve café Größe", "日本語のテキスト 中文 한국어", "العربية עברית", "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\ufeff", "\x00\x07\x7f",
    "x = {'a': [1, 2]}  # comment\n\tif x:\n\t\treturn", "<filename>a.py<gh_stars>", "²③Ⅷ ½", "a" * 300, "\u2028\u2029\xa0",
]  # fmt: skip


def test_our_tokenizer_is_the_servers(embedded: Path, server: tuple[str, dict[str, str]]) -> None:
    """Every IFBench prompt, as it is and in the chat template, and what tokenizers stumble over."""
    address, headers = server
    ours, template = Tokenizer.load(embedded), ChatTemplate.load(embedded)
    plain = ifbench()
    assert len(plain) >= 250
    texts = [
        *ODD,
        *plain,
        *(template.render([{"role": "user", "content": text}]) for text in [*ODD, *plain[::5]]),
    ]
    draw = random.Random(3)
    alphabet = "aZ 09\n\t.,'<|>éß中😀\u200d"
    texts += ["".join(draw.choices(alphabet, k=draw.randint(1, 60))) for _ in range(100)]
    with requests.Session() as session:
        for text in texts:
            body = {"content": text, "add_special": False, "parse_special": True}
            reply = session.post(f"{address}/tokenize", json=body, headers=headers, timeout=60)
            assert ours.encode(text) == reply.json()["tokens"], text
    assert ours.encode_batch(texts) == [ours.encode(text) for text in texts]


def test_ids_become_their_text_again(embedded: Path, server: tuple[str, dict[str, str]]) -> None:
    address, headers = server
    ours = Tokenizer.load(embedded)
    for text in [*ODD, *ifbench()[:40]]:
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        reply = requests.post(f"{address}/detokenize", json={"tokens": ids}, headers=headers, timeout=60)
        assert reply.json()["content"] == text


def test_the_template_renders_as_the_server_renders_it(
    embedded: Path, server: tuple[str, dict[str, str]]
) -> None:
    address, headers = server
    template = ChatTemplate.load(embedded)
    talks = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        [
            {"role": "user", "content": " spaces "},
            {"role": "assistant", "content": "yes\n"},
            {"role": "user", "content": "é"},
        ],
    ]
    for talk in talks:
        reply = requests.post(
            f"{address}/apply-template", json={"messages": talk}, headers=headers, timeout=60
        )
        assert template.render(talk) == reply.json()["prompt"]


def test_the_facts_of_the_embedded_model(embedded: Path) -> None:
    facts = Model.load(embedded)
    tokenizer = Tokenizer.load(embedded)
    assert facts.kind == "gguf" and facts.context_length == 8192 and facts.vocab_size == 49152
    assert [tokenizer.decode([i]) for i in facts.eos_token_ids] == ["<|im_end|>"]
    assert facts.special_tokens["eos_token"] == "<|im_end|>"
    assert set(facts.eos_token_ids) <= tokenizer.special_ids
    assert not facts.template_has_thinking and facts.generation_config == {} and facts.config is None
    assert facts.room(8192 - 8) == 0 and facts.room(0) == 8184


def test_freezing_again_gives_the_same_bytes(embedded: Path, tmp_path: Path) -> None:
    location = Path(Model.load(embedded).path)
    model.freeze(block(), location, tmp_path)
    for name in ("model.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (embedded / name).read_bytes()


def test_a_gguf_file_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"not at all" * 100):
        path = tmp_path / "broken.gguf"
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a readable GGUF file"):
            model.freeze(block(), path, tmp_path / "out")


def test_a_cut_gguf_file_is_a_sentence(embedded: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with Path(Model.load(embedded).path).open("rb") as whole:
        path.write_bytes(whole.read(100_000))
    with pytest.raises(UserError, match="is not a readable GGUF file"):
        model.freeze(block(), path, tmp_path / "out")


# --- Hugging Face folders


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("tiny") / "model", context=4096)


@pytest.fixture
def tiny(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def change(path: Path, **values: Any) -> None:
    """Lays values over a JSON file; None takes a key away."""
    facts = {**json.loads(path.read_text()), **values} if path.exists() else values
    path.write_text(json.dumps({name: value for name, value in facts.items() if value is not None}))


def test_the_facts_of_a_folder(tiny: Path, tmp_path: Path) -> None:
    facts = frozen(tiny, tmp_path / "out")
    stop = Tokenizer.load(tiny).encode("<|im_end|>")
    assert facts.kind == "hf" and facts.name == "tiny" and facts.path == str(tiny)
    assert facts.context_length == 4096 and facts.eos_token_ids == tuple(stop)
    assert facts.generation_config["temperature"] == 0.7
    assert facts.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == tiny_model.TEMPLATE


def test_all_stop_tokens_of_all_files_count(tiny: Path, tmp_path: Path) -> None:
    change(tiny / "generation_config.json", eos_token_id=[5, 7])
    change(
        tiny / "config.json", eos_token_id=6, text_config={"eos_token_id": [8], "max_position_embeddings": 99}
    )
    facts = frozen(tiny, tmp_path / "out")
    (named,) = Tokenizer.load(tiny).encode("<|im_end|>")
    assert facts.eos_token_ids == tuple(sorted({5, 6, 7, 8, named})) and facts.context_length == 99


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }}",
        [{"name": "tool_use", "template": "{{ no }}"}, {"name": "default", "template": "{{ messages }}"}],
    ],
)
def test_a_template_in_the_tokenizers_config(tiny: Path, tmp_path: Path, template: object) -> None:
    (tiny / "chat_template.jinja").unlink()
    change(tiny / "tokenizer_config.json", chat_template=template)
    frozen(tiny, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_the_users_template_comes_first(tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ enable_thinking }}{{ messages }}é", encoding="utf-8")
    facts = frozen(tiny, tmp_path / "out", chat_template=str(own))
    assert facts.template_has_thinking
    assert facts.template_hash != frozen(tiny, tmp_path / "other").template_hash
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == own.read_bytes()


def test_the_users_context_comes_first(tiny: Path, tmp_path: Path) -> None:
    assert frozen(tiny, tmp_path / "out", context_length=512).context_length == 512


# --- identity


def identity(location: Path, out: Path, **changes: Any) -> str:
    return frozen(location, out, **changes).identity


def test_a_moved_model_is_the_same_model(tiny: Path, tmp_path: Path) -> None:
    before = identity(tiny, tmp_path / "out")
    moved = tiny.rename(tmp_path / "elsewhere")
    assert identity(moved, tmp_path / "out") == before
    (moved / "README.md").write_text("a note")
    change(moved / "tokenizer_config.json", model_max_length=7)
    assert identity(moved, tmp_path / "out") == before


@pytest.mark.parametrize("what", ["config", "size", "name", "another file", "weight index", "revision"])
def test_another_model_has_another_identity(tiny: Path, tmp_path: Path, what: str) -> None:
    before = identity(tiny, tmp_path / "out")
    weights = tiny / "model.safetensors"
    revision = None
    if what == "config":
        change(tiny / "config.json", rope_theta=10)
    elif what == "size":
        weights.write_bytes(weights.read_bytes() + b" ")
    elif what == "name":
        weights.rename(tiny / "model-2.safetensors")
    elif what == "another file":
        (tiny / "extra.safetensors").write_bytes(b"")
    elif what == "weight index":
        (tiny / "model.safetensors.index.json").write_text("{}")
    else:
        revision = "0" * 40
    assert identity(tiny, tmp_path / "out", revision=revision) != before


def test_an_adapter_trained_anew_is_another_model(tiny: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    before = identity(tiny, tmp_path / "out")
    assert identity(tiny, tmp_path / "out", adapters=["org/elsewhere"]) == before
    found = {before}
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors"):
        (adapter / name).write_text(f"weights {len(found)}")
        found.add(identity(tiny, tmp_path / "out", adapters=[str(adapter)]))
    assert len(found) == 4
    (adapter / "trainer_state.json").write_text("{}")
    assert identity(tiny, tmp_path / "out", adapters=[str(adapter)]) in found
    assert identity(tiny, tmp_path / "out") == before


# --- what goes wrong


def test_a_folder_that_is_no_model_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    (tiny / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json cannot be read .* is this a model folder"):
        model.freeze(block(), tiny, tmp_path / "out")


def test_a_broken_config_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    (tiny / "generation_config.json").write_text('{"temperature": ')
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        model.freeze(block(), tiny, tmp_path / "out")


def test_a_missing_tokenizer_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        model.freeze(block(), tiny, tmp_path / "out")


def test_a_broken_tokenizer_is_a_sentence_that_names_the_models_file(tiny: Path, tmp_path: Path) -> None:
    (tiny / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError) as fault:
        model.freeze(block(), tiny, tmp_path / "out")
    assert f"The tokenizer {tiny / 'tokenizer.json'} cannot be read" in str(fault.value)


def test_a_model_without_a_template_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    (tiny / "chat_template.jinja").unlink()
    change(tiny / "tokenizer_config.json", chat_template=None)
    with pytest.raises(UserError, match=r"has no chat template; set model\.chat_template"):
        model.freeze(block(), tiny, tmp_path / "out")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_template_file_that_cannot_be_read_is_a_sentence(
    tiny: Path, tmp_path: Path, content: bytes | None
) -> None:
    own = tmp_path / "own.jinja"
    if content is not None:
        own.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.chat_template .*own\.jinja cannot be read"):
        model.freeze(block(chat_template=str(own)), tiny, tmp_path / "out")


def test_a_template_that_is_no_jinja_is_a_sentence(tiny: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% if %}")
    with pytest.raises(UserError, match="not valid Jinja"):
        model.freeze(block(chat_template=str(own)), tiny, tmp_path / "out")


# --- where it lies


def test_a_folder_is_found_and_made_absolute(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny.parent)
    assert model.locate(block(path="tiny")) == tiny.resolve()
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert model.locate(block(path="~/tiny")) == tiny.resolve()


def test_a_hub_id_has_to_be_fetched() -> None:
    assert model.locate(block(path="Qwen/Qwen3-8B", revision="0" * 40)) is None


@pytest.mark.parametrize(
    "path", ["/no/such/model", "./org/name", "models/none.gguf", "name", "a/b/c", "~/none"]
)
def test_a_path_that_does_not_exist_is_a_sentence(path: str) -> None:
    with pytest.raises(UserError, match=r"does not exist; give a model folder, a \.gguf file, or a hub id"):
        model.locate(block(path=path))
