# The report: self-contained pages that `snakemake --report` collects, each with its caption.


from draftmill import snakemake_report
from draftmill.report_items import ITEMS


rule report_items:
    """Writes every page of the report from the run's results."""
    input:
        rules.merge.output,
        rules.throughput.output,
        rules.shard_prompts.output.summary,
        generated=gather.shards("results/generated/{scatteritem}.parquet"),
    output:
        **{
            item.name.replace("-", "_"): report(
                f"results/report/{item.name}.html",
                caption=f"../report/{item.name}.rst",
                category=item.category,
                labels=dict(item.labels),
            )
            for item in ITEMS
        },
    log:
        "results/logs/report_items.log",
    conda:
        "../../envs/draftmill.yaml"
    message:
        "Writing the report's pages."
    script:
        "../scripts/report.py"
