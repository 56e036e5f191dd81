# Prompts: any file in, conversations out, cut into shards by a hash of their content.


rule shard_prompts:
    """Reads, checks, deduplicates, decontaminates and tokenises all prompts; nothing is left out unnamed."""
    input:
        files=local_prompts,
        benchmarks=local_benchmarks,
        model=rules.fetch_model.output,
    output:
        shards=scatter.shards("results/shards/{scatteritem}.parquet"),
        skipped="results/skipped.parquet",
        summary="results/prompts.json",
    log:
        "results/logs/shard_prompts.log",
    conda:
        "../../envs/draftmill.yaml"
    threads: 2
    params:
        prompts=configuration.prompts_digest(settings),
    message:
        "Reading and sharding the prompts."
    script:
        "../scripts/shard_prompts.py"
