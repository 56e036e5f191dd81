"""The contract between Draftmill and an inference server: token ids in, sampled token ids out.

An adapter says how to start its server, when it is ready and with which capacity, how to ask for one
answer and what the reply means. It never retries, never schedules and never keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class ServerSpec:
    """What decides a server: the same spec means the same server, another spec replaces it."""

    engine: str
    model_path: str
    context_length: int
    numerics: tuple[str, ...] = ()  # command-line flags that can change an answer (from the science block)
    flags: tuple[str, ...] = ()  # operational flags, the user's or the tuner's
    capacity: int | None = None  # a fixed number of running requests; None lets the engine decide
    threads: int | None = None
    gpus: tuple[str, ...] = ()  # UUIDs of the slot's GPUs; empty on the CPU
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """A command that starts a server listening on 127.0.0.1."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a running server says of itself."""

    version: str
    capacity: int  # effective maximum of running requests, never the asked one
    asked_capacity: int | None = None
    kv_tokens: int | None = None
    state_slots: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)  # redacted


@dataclass(frozen=True)
class Completion:
    """One finished answer, as the engine gave it."""

    output_ids: tuple[int, ...]  # every sampled token, the stop token included
    finish_reason: str  # "stop" | "length"
    cached_tokens: int = 0
    queue_s: float = 0.0


class Refused(Exception):
    """The server will never answer this request (too long, malformed); the text is its own sentence."""


class Transient(Exception):
    """Nothing wrong with the request: the server is busy, broken or gone. Ask again."""


class Broken(Transient):
    """The connection broke before there was an answer: perhaps the server went down."""


class Unreached(Broken):
    """The request never got to the server: it says nothing about the request."""


class Engine(Protocol):
    """One inference server's dialect."""

    name: str

    def numerics_flags(self, model: dict[str, Any]) -> tuple[str, ...]:
        """The command-line flags for the config's ``model`` block; UserError for what the engine lacks."""
        ...

    def launch(self, spec: ServerSpec, port: int, key_file: Path, folder: Path) -> Launch:
        """The command for ``spec`` on ``port``; the API key stays in files under ``folder`` that only
        the owner reads (``key_file`` holds it), never on the command line."""
        ...

    def facts(self, address: str, key: str, log: Path | None = None) -> Facts | None:
        """What the server at ``address`` says of itself once it is ready; None before. ``log``: its log,
        for what an older version says nowhere else."""
        ...

    def start_failed(self, log_tail: str) -> bool:
        """Whether a start can no longer succeed although the process lives on, from the end of its log."""
        ...

    def metrics(self, address: str, key: str) -> str:
        """The server's Prometheus text; raises requests.RequestException."""
        ...

    def request(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """(route, JSON body) that asks for one answer; every sampling parameter under its own name."""
        ...

    def completion(self, status: int, body: bytes) -> Completion:
        """The answer in a reply; raises Refused or Transient."""
        ...

    def likely_cause(self, log_tail: str) -> str:
        """A sentence on why a start failed, from the end of the server's log ("" when it shows nothing)."""
        ...


def load(name: str) -> Engine:
    """The adapter of that name."""
    if name == "sglang":
        from draftmill.engines.sglang import SGLang

        return SGLang()
    if name == "llamacpp":
        from draftmill.engines.llamacpp import LlamaCpp

        return LlamaCpp()
    raise ValueError(f"no engine named {name}")
