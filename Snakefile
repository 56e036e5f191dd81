# Draftmill: prompts in, training data for a speculative-decoding drafter out. See README.md.
from snakemake.utils import min_version

min_version("9.27")


configfile: "config.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"


scattergather:
    shards=settings["shards"],


include: "workflow/rules/model.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/generation.smk"
include: "workflow/rules/tuning.smk"
include: "workflow/rules/dataset.smk"
include: "workflow/rules/report.smk"


# The dataset, the throughput, and everything the report shows.
rule all:
    default_target: True
    input:
        rules.shard_prompts.output.summary,
        rules.merge.output,
        rules.drafter_dataset.output,
        rules.throughput.output,
        rules.report_items.output,


onsuccess:
    snakemake_report.write(workflow, Path("report.html"))
