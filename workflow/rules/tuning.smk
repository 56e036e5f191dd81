# Tuning: the server's settings measured on the run's own first turns.


rule tune:
    """Measures what promises most, goes on where the last call stopped, and adopts the best setting."""
    input:
        shards=gather.shards("results/shards/{scatteritem}.parquet"),
        summary=rules.shard_prompts.output.summary,
    log:
        "results/logs/tune.log",
    conda:
        "../../envs/draftmill.yaml"
    resources:
        gpu=settings["operation"]["gpus_per_server"],
    message:
        "Measuring server settings."
    script:
        "../scripts/tune.py"


# Where shards are answered elsewhere, each allocation would measure for itself, and some turns be asked twice.
onstart:
    if not workflow.local_exec:
        from draftmill import serving

        begun = {job.rule.name for job in workflow.dag.needrun_jobs()}
        if "generate" in begun and serving.untuned(settings, Path("results")):
            raise WorkflowError(
                "operation.server.flags has auto, and nothing was measured yet for the other flags and this model. "
                "On a cluster measure once, before the run: type snakemake tune with the same --profile; "
                "or leave auto out."
            )
