#!/usr/bin/env bash
# Measures on a GPU machine: the tuner against the server's defaults, then the workflow with what it adopted.
# usage: run.sh FOLDER PROMPTS [GPUS]      in FOLDER: model/ (a model folder; the one of the shape is enough)
# Needs snakemake and sglang for the python3 on PATH. Results stay in FOLDER; the raw telemetry too.
set -euo pipefail
source=$(cd "$(dirname "$0")/../.." && pwd)
folder=$1 count=$2 gpus=${3:-1}
python3 "$source/tests/gpu/make_prompts.py" "$folder/prompts.jsonl" "$count"
python3 - "$source/tests/gpu/config.yaml" "$folder/config.yaml" <<'PY'
import random, sys
ids = sorted(random.Random(7).sample(range(9000, 248000), 500))
text = open(sys.argv[1]).read().replace("stop_token_ids: []", f"stop_token_ids: {ids}")
open(sys.argv[2], "w").write(text)
PY
cd "$folder"
run() { python3 -m snakemake "$@" --snakefile "$source/Snakefile" --directory "$folder" --cores 8 --resources gpu="$gpus"; }
run tune
run all
