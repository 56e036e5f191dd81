# The target model: fetched if need be, and everything that later steps ask of it frozen in results/model/.


# On a cluster, too: compute nodes often have no way to a model hub.
localrules:
    fetch_model,


rule fetch_model:
    """Downloads the model where it is not a local folder, and freezes tokenizer, template and facts."""
    input:
        template=local_template,
        adapter=local_adapter,
    output:
        facts="results/model/model.json",
        tokenizer="results/model/tokenizer.json",
        template="results/model/chat_template.jinja",
    log:
        "results/logs/fetch_model.log",
    conda:
        "../../envs/draftmill.yaml"
    params:
        model=configuration.model_digest(settings),
    message:
        "Freezing the target model."
    script:
        "../scripts/fetch_model.py"
