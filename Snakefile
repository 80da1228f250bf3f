# What is built, from what, in which order. Specs (tables/*/*.yaml, figures/*/*.yaml) and a scale (config/*.yaml) say
# which cells there are, a metric (repro/metrics) which jobs it needs; every job has one rule and one runner.
#
#   snakemake --cores 8 tables/table1.tex
#   REPRO_DATA=… snakemake --cores 8 tables/bitbybit/table1.tex
#   snakemake --cores 8 --configfile config/gpu.yaml all
import os
import sys

sys.path.insert(0, workflow.basedir)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [workflow.basedir, os.environ.get("PYTHONPATH")]))
from repro.make.snake import FORMATS, SnakemakeAdapter, config_file

if "name" not in config:

    configfile: config_file()


flow = SnakemakeAdapter(config, workflow)


wildcard_constraints:
    table="[a-z0-9/-]+",
    figure="[a-z]+/[a-z0-9-]+|leaderboard",
    page="[a-z]+",
    part="[a-z]+[0-9]*",


rule all:
    input:
        flow.everything(),


rule make:
    input:
        flow.job_inputs,
    output:
        expand("build/{{kind}}/{{job}}/{file}", file=["data.safetensors", "observations.parquet"]),
    log:
        "build/logs/{kind}/{job}.txt",
    benchmark:
        "build/benchmarks/{kind}/{job}.tsv"
    wildcard_constraints:
        kind="tokens|requests|questions|compress",
    priority: flow.priority
    threads: flow.threads
    resources:
        mem_mb=flow.memory,
        gpu=flow.gpus,
        runtime=60,
    params:
        job=flow.job_json,
    script:
        flow.script("job")


use rule make as measure with:
    output:
        "build/{kind}/{job}/observations.parquet",
    wildcard_constraints:
        kind=flow.kinds,


rule table:
    input:
        flow.drawn_inputs,
    output:
        report(expand("tables/{{table}}{format}", format=FORMATS), category="tables"),
    log:
        "build/logs/tables/{table}.txt",
    benchmark:
        "build/benchmarks/tables/{table}.tsv"
    params:
        scale=flow.config,
    script:
        flow.script("render")


rule figure:
    input:
        flow.drawn_inputs,
    output:
        report(expand("figures/{{figure}}{format}", format=[".svg", ".pdf", ".csv", ".md"]), category="figures"),
    log:
        "build/logs/figures/{figure}.txt",
    benchmark:
        "build/benchmarks/figures/{figure}.tsv"
    params:
        scale=flow.config,
    script:
        flow.script("render")


use rule figure as page with:
    input:
        flow.page_inputs,
    output:
        "docs/{page}.md",
    log:
        "build/logs/docs/{page}.txt",
    benchmark:
        "build/benchmarks/docs/{page}.tsv"


# The page of one table, or of all figures, is written with its paper's page.
rule page_part:
    input:
        flow.page_of_part,
    output:
        update("docs/{page}/{part}.md"),
    log:
        "build/logs/docs/{page}/{part}.txt",
    params:
        scale=flow.config,
    script:
        flow.script("part")
