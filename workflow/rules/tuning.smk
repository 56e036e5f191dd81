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
