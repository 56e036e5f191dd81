# Generation: one lease on a GPU server for each shard, and the shard's answers from the journal or the fleet.


rule launch_server:
    """Leases a GPU slot for one shard. No params and no inputs: a change of either would re-run finished shards."""
    output:
        service("results/leases/{scatteritem}.json"),
    log:
        "results/logs/leases/{scatteritem}.log",
    conda:
        "../../envs/draftmill.yaml"
    threads: 0
    resources:
        gpu=settings["operation"]["gpus_per_server"],
    message:
        "Leasing a server for shard {wildcards.scatteritem}."
    shell:
        'exec "$DRAFTMILL_PYTHON" "$DRAFTMILL_SCRIPTS/lease.py" {output} > {log} 2>&1'


rule generate:
    """Asks the fleet for what the journal lacks of one shard, and writes the shard's table from the journal."""
    input:
        shard="results/shards/{scatteritem}.parquet",
        lease="results/leases/{scatteritem}.json",
    output:
        "results/generated/{scatteritem}.parquet",
    log:
        "results/logs/generate/{scatteritem}.log",
    conda:
        "../../envs/draftmill.yaml"
    params:
        generation=configuration.generation_digest(settings),
    message:
        "Generating shard {wildcards.scatteritem}."
    script:
        "../scripts/generate.py"
