# The report's items.


rule report_items:
    input:
        rules.throughput.output,
    output:
        touch("results/report/.placeholder"),
    log:
        "results/logs/report_items.log",
    conda:
        "../../envs/draftmill.yaml"
    shell:
        "date > {log}"
