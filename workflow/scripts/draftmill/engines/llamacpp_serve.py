"""Serves one GGUF model with llama.cpp's HTTP server until SIGTERM. Started by engines/llamacpp.py with
its settings as one JSON argument."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import xllamacpp


def main() -> None:
    settings = json.loads(sys.argv[1])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["model"]
    parameters.hostnames = ["127.0.0.1"] if isinstance(parameters.hostnames, list) else "127.0.0.1"
    parameters.port = settings["port"]
    parameters.n_ctx = settings["context_tokens"]
    parameters.n_parallel = settings["slots"]
    parameters.cpuparams.n_threads = settings["threads"]
    parameters.cpuparams_batch.n_threads = settings["threads"]
    parameters.n_threads_http = settings["slots"] + 4  # one for each running turn, some for the probes
    parameters.cache_prompt = settings["cache_prompt"]
    parameters.api_keys = [Path(settings["key_file"]).read_text()]
    parameters.n_gpu_layers = 0
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = False
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(parameters)
    print("listening on", server.listening_address, flush=True)
    while not ended.wait(0.2):
        pass


main()
