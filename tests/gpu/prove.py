"""The proofs on a machine with GPUs: the tuner, the fleet's rate on several GPUs, and that nothing survives a run.

    python3 tests/gpu/prove.py FOLDER STEP…

FOLDER holds `model/`: a model folder; its shape is enough, since servers fill it with random weights. The python that
runs this must have snakemake and sglang. Each step prints what it measured as one line of JSON, and appends it to
FOLDER/proof.jsonl; the runs' own files stay in FOLDER. Steps:

    tune     `snakemake tune` on all GPUs, one setting on each side by side
    fleet    the plain run on all GPUs, named by their indices backwards, with long answers; in the end one GPU is
             made busy with something else; then SIGTERM to the run's process group
    single   the same on the last GPU alone, named by the beginning of its UUID; then Ctrl-C
    early    the same on all GPUs; SIGKILL to Snakemake while the servers load
    pair     one server on two GPUs, named by their UUIDs, some turns, to the end of the workflow
    whole    one server on one GPU, some turns, to the end of the workflow
    alone    `snakemake tune` on one GPU alone

tune, alone and the runs to their end ask for answers of about 430 tokens, the others for about 1,500. fleet, single,
early and whole use the flags that tune adopted on one GPU; pair uses the defaults.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 40_000
FEW_PROMPTS = {"pair": 300, "whole": 900}
SHORT = {"stops": 500, "max_tokens": 1000}
LONG = {"stops": 150, "max_tokens": 4000}
MARK = "DRAFTMILL_PROOF"
SETTLE_S = 90  # from full servers until answers of all ages are in them
STEADY_S, BUSY_S = 120, 40
END_S = 10  # after so long nothing of a run may be left
START_S = 420  # cold kernels included
TUNE_S = 800
LOADING_S = 30  # in the middle of a server's start
BUSY = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
end = time.time() + {seconds}
while time.time() < end:
    for _ in range(100):
        b = a @ a
    torch.cuda.synchronize()
"""


def gpus() -> list[str]:
    """The UUIDs of the machine's GPUs, in the driver's order."""
    return [row[0] for row in _query("uuid,name,memory.total")]


def memory_used() -> dict[str, int]:
    """MiB in use by UUID."""
    return {uuid: int(used) for uuid, used in _query("uuid,memory.used")}


def _query(fields: str) -> list[list[str]]:
    words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[value.strip() for value in line.split(",")] for line in lines]


class Run:
    """One `snakemake` in a folder, and what it left behind."""

    def __init__(self, folder: Path, *words: str, gpu: int, visible: str | None = None) -> None:
        self.folder = folder
        self.idle_memory = memory_used()
        environment = {**os.environ, MARK: str(folder)}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-m", "snakemake", *words, "--snakefile", str(ROOT / "Snakefile")]
        command += ["--nolock"]  # a step before may have been killed
        command += ["--cores", "8", "--resources", f"gpu={gpu}"]
        self.began = time.time()
        with (folder / "snakemake.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, timeout_s: float) -> int | None:
        """The exit code; None when it has not ended in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def states(self) -> dict[str, dict[str, Any]]:
        """The published states of this run's servers by slot."""
        found = {}
        for path in self.folder.glob("results/fleet/*/*.json"):
            with contextlib.suppress(ValueError, OSError):
                if path.stat().st_mtime >= self.began:
                    found[path.stem] = json.loads(path.read_text())
        return found

    def samples(self, slot: str, seconds: float) -> list[dict[str, Any]]:
        """The telemetry of the last seconds, of the server that runs now."""
        (path,) = self.folder.glob(f"results/fleet/*/{slot}.telemetry.jsonl")
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1000 * round(seconds + 10)))
            lines = file.read().decode().splitlines()[1:]
        since = max(time.time() - seconds, self.began)
        samples = [json.loads(line) for line in lines if line.endswith("}")]
        return [sample for sample in samples if sample["t"] >= since and sample["running"] is not None]

    def until_full(self, servers: int) -> None:
        """Waits until as many servers run at their capacity."""
        deadline = time.time() + START_S
        while time.time() < deadline and self.process.poll() is None:
            full = 0
            for slot, state in self.states().items():
                recent = self.samples(slot, 4) if state["state"] == "ready" else []
                full += bool(recent) and recent[-1]["running"] >= 0.95 * state["capacity"]
            if full >= servers:
                return
            time.sleep(1)
        raise SystemExit(
            f"the servers were not full in time: {self.states()}; see {self.folder}/snakemake.log"
        )

    def rates(self, seconds: float) -> dict[str, dict[str, float | None]]:
        """By slot, over the coming seconds: output tok/s, mean running requests against the capacity, the shares of
        the time that prefills and decode steps took, and answers that ended a second."""
        time.sleep(seconds)
        found = {}
        for slot, state in self.states().items():
            samples = self.samples(slot, seconds)
            first, last = samples[0], samples[-1]
            running = sum(sample["running"] for sample in samples) / len(samples)

            def rate(of: str, first: dict[str, Any] = first, last: dict[str, Any] = last) -> float | None:
                told = first[of] is not None and last[of] is not None
                return (last[of] - first[of]) / (last["t"] - first["t"]) if told else None

            found[slot] = {
                "tok_s": rate("decode_tokens"),
                "prefill": rate("prefill_s"),
                "decode": rate("decode_s"),
                "answers_s": rate("finished"),
                "running": running,
                "capacity": state["capacity"],
                "utilisation": running / state["capacity"],
            }
        return found

    def end(self, how: Callable[[], None]) -> dict[str, Any]:
        """Ends the run, and counts what is left ``END_S`` seconds after Snakemake has gone."""
        how()
        began = time.time()
        self.wait(60)
        took = time.time() - began
        time.sleep(END_S)
        return {"ended_in_s": round(took, 1), **self.left()}

    def signal_group(self, number: signal.Signals) -> Callable[[], None]:
        return lambda: os.killpg(self.process.pid, number)

    def left(self) -> dict[str, Any]:
        """Processes of the run, and GPU memory (MiB by UUID) beyond what was in use before it."""
        now = memory_used()
        return {
            "processes_left": list(_marked(self.folder)),
            "memory_left_mib": {uuid: now[uuid] - before for uuid, before in self.idle_memory.items()},
        }


def _marked(folder: Path) -> Iterator[str]:
    mark = f"{MARK}={folder}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield f"{entry.name} {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:120]}"


def prepare(folder: Path, top: Path, answers: dict[str, int], limit: int = PROMPTS, **operation: Any) -> Path:
    """Writes the prompts and the config once. Lengths are geometric: random weights draw every token about equally
    often, so each of 500 stop tokens among 248,320 ends an answer by chance."""
    if (folder / "config.yaml").exists():
        return folder
    folder.mkdir(exist_ok=True)
    make = [sys.executable, str(Path(__file__).with_name("make_prompts.py"))]
    subprocess.run([*make, str(folder / "prompts.jsonl"), str(limit)], check=True)
    config = yaml.safe_load(Path(__file__).with_name("config.yaml").read_text())
    config["model"]["path"] = str((top / "model").resolve())
    stops = sorted(random.Random(7).sample(range(9000, 248_000), answers["stops"]))
    config["sampling"] |= {"stop_token_ids": stops, "max_tokens": answers["max_tokens"]}
    config["operation"] |= operation
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def tuned(folder: Path, top: Path) -> Path:
    """The folder, with what was tuned in ``top``."""
    if not (top / "results" / "tuning" / "winner.json").exists():
        raise SystemExit("no flags are tuned yet: run the step tune first")
    shutil.copytree(top / "results" / "tuning", folder / "results" / "tuning", dirs_exist_ok=True)
    return folder


def tune(folder: Path, gpu: int, visible: str | None, timeout_s: float) -> dict[str, Any]:
    run = Run(folder, "tune", gpu=gpu, visible=visible)
    code = run.wait(timeout_s)
    if code is None:
        run.end(run.signal_group(signal.SIGINT))
    time.sleep(END_S)
    measurements = folder / "results" / "tuning" / "measurements.jsonl"
    winner = folder / "results" / "tuning" / "winner.json"
    return {
        "exit_code": code,
        "seconds": round(time.time() - run.began),
        "measurements": [json.loads(line) for line in measurements.read_text().splitlines() if line],
        "winner": json.loads(winner.read_text()) if winner.exists() else None,
        **run.left(),
    }


def to_the_end(run: Run) -> dict[str, Any]:
    code = run.wait(START_S)
    time.sleep(END_S)
    results = run.folder / "results"
    found = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    return {
        "exit_code": code,
        "seconds": round(time.time() - run.began),
        "states": run.states(),
        "accounts": found.get("validation"),
        "throughput": found.get("throughput"),
        "success": run.left(),
    }


def step(name: str, top: Path) -> dict[str, Any]:
    """Runs one step and returns what it measured."""
    everything = gpus()
    if name == "tune":
        return tune(prepare(top, top, SHORT), len(everything), None, TUNE_S)
    if name == "alone":
        return tune(prepare(top / "alone", top, SHORT), 1, everything[0], TUNE_S)
    if name == "fleet":
        backwards = ",".join(str(i) for i in reversed(range(len(everything))))
        run = Run(tuned(prepare(top / "long", top, LONG), top), "all", gpu=len(everything), visible=backwards)
        run.until_full(len(everything))
        time.sleep(SETTLE_S)
        undisturbed = run.rates(STEADY_S)
        busy = subprocess.Popen(
            [sys.executable, "-c", BUSY.format(seconds=BUSY_S)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": everything[0]},
        )
        disturbed = run.rates(BUSY_S)
        busy.wait()
        ended = run.end(run.signal_group(signal.SIGTERM))
        return {
            "visible": backwards,
            "rates": undisturbed,
            "busy": {everything[0]: disturbed},
            "SIGTERM": ended,
        }
    if name == "single":
        beginning = everything[-1][:12]
        run = Run(tuned(prepare(top / "long", top, LONG), top), "all", gpu=1, visible=beginning)
        run.until_full(1)
        time.sleep(SETTLE_S)
        rates = run.rates(STEADY_S)
        return {"visible": beginning, "rates": rates, "Ctrl-C": run.end(run.signal_group(signal.SIGINT))}
    if name == "early":
        run = Run(tuned(prepare(top / "long", top, LONG), top), "all", gpu=len(everything))
        time.sleep(LOADING_S)
        states = {slot: state["state"] for slot, state in run.states().items()}
        memory = memory_used()
        return {"states": states, "memory_mib": memory, "SIGKILL": run.end(run.process.kill)}
    if name in ("pair", "whole"):
        gpu = 2 if name == "pair" else 1
        folder = prepare(top / name, top, SHORT, limit=FEW_PROMPTS[name], gpus_per_server=gpu)
        if name == "whole":
            tuned(folder, top)
        return to_the_end(Run(folder, "all", gpu=gpu, visible=",".join(everything[:gpu])))
    raise SystemExit(f"there is no step {name}; see --help")


def main() -> None:
    if len(sys.argv) < 3 or "--help" in sys.argv:
        raise SystemExit(__doc__)
    # A shell's background job ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:]:
        result = {"step": name, "at": time.strftime("%Y-%m-%d %H:%M:%S"), **step(name, folder)}
        with (folder / "proof.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
