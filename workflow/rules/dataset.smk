# The dataset: every turn accepted or rejected exactly once, then exported for the trainers.


rule merge:
    """Judges every answer, proves the accounts, and merges all shards sorted by id."""
    input:
        generated=gather.shards("results/generated/{scatteritem}.parquet"),
        prompts=rules.shard_prompts.output.summary,
    output:
        merged="results/merged.parquet",
        rejected="results/rejected.parquet",
        validation="results/validation.json",
    log:
        "results/logs/merge.log",
    conda:
        "../../envs/draftmill.yaml"
    threads: 2
    params:
        validation=configuration.validation_digest(settings),
    message:
        "Merging and validating."
    script:
        "../scripts/merge.py"


rule throughput:
    """Works out the run's statistics from recorded facts."""
    input:
        generated=gather.shards("results/generated/{scatteritem}.parquet"),
    output:
        summary="results/throughput.json",
        series="results/throughput.parquet",
    log:
        "results/logs/throughput.log",
    conda:
        "../../envs/draftmill.yaml"
    message:
        "Working out the throughput."
    script:
        "../scripts/throughput.py"


rule drafter_dataset:
    """Exports what was accepted for the trainers, with a card."""
    input:
        merged=rules.merge.output.merged,
        validation=rules.merge.output.validation,
        prompts=rules.shard_prompts.output.summary,
        throughput=rules.throughput.output.summary,
    output:
        train="results/drafter/train.parquet",
        jsonl="results/drafter/train.jsonl",
        card="results/drafter/README.md",
    log:
        "results/logs/drafter_dataset.log",
    conda:
        "../../envs/draftmill.yaml"
    params:
        dataset=configuration.dataset_digest(settings),
    message:
        "Exporting the drafter dataset."
    script:
        "../scripts/drafter_dataset.py"
