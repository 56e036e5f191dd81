# What every stage needs: the checked configuration, and the environment that its processes run in.
import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(str(workflow.current_basedir)).parent / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from draftmill import config as configuration
from draftmill import prompts as prompt_files
from draftmill.errors import UserError
from draftmill import snakemake_cancel, snakemake_lock, snakemake_pool
from draftmill import snakemake_preemption, snakemake_step, snakemake_wait
from draftmill.fleet import processes

try:
    settings = configuration.resolve(config)
    for warning in configuration.check(settings, None, None):
        if not workflow.subprocess_exec:
            logger.warning(warning)
    local_prompts = prompt_files.watched(settings["prompts"]["files"])
    local_benchmarks = prompt_files.watched(
        settings["prompts"]["decontaminate"]["files"]
    )
    own_template = settings["model"]["chat_template"]
    local_template = [str(Path(own_template).expanduser())] if own_template else []
    local_adapter = [
        str(path) for path in configuration.adapter_files(settings["model"]["adapters"])
    ]
    local_files = [*local_prompts, *local_benchmarks, *local_template, *local_adapter]
    for place in (str(Path.cwd()), *local_files):
        if "{" in place or "}" in place:
            raise UserError(
                f"Snakemake takes the braces in {place} for a wildcard; use a name without them."
            )
except UserError as fault:
    raise WorkflowError(str(fault)) from None

# Leases and servers get all they need through the environment: a param of their rules would re-run shards.
os.environ.update(
    DRAFTMILL_SCRIPTS=str(SCRIPTS),
    DRAFTMILL_CONFIG=json.dumps(settings),
    DRAFTMILL_PYTHON=(
        "python" if workflow.deployment_settings.deployment_method else sys.executable
    ),
)
if not workflow.subprocess_exec:
    processes.claim_owner()
    snakemake_pool.widen(settings["shards"])
    snakemake_step.unite(workflow)
    snakemake_lock.make_reentrant()
    snakemake_wait.look_often()
    snakemake_preemption.let_end()
    snakemake_cancel.find_all()


wildcard_constraints:
    scatteritem=r"\d+-of-\d+",
