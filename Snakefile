# What is built, from what, in which order. Specs (tables/*/*.yaml) and a profile (config/*.yaml) say which runs there
# are; repro/workflow.py turns them into files; every rule is a verb of `python -m repro`.
#
#   snakemake --cores 8 tables/table1.tex
#   PROFILE=pocket-real REPRO_DATA=… snakemake --cores 8 tables/spear/table1.tex
#   snakemake --cores 8 --configfile config/gpu.yaml all
import sys

sys.path.insert(0, workflow.basedir)
from repro.workflow import KINDS, PYTHON, Plain, snakemake_options

flow = Plain(config)
profile = snakemake_options(config)
repro = f"PYTHONPATH={workflow.basedir} {PYTHON} -m repro"


wildcard_constraints:
    run="[^/]+/[^/]+",
    study="(?!table)[a-z][a-z0-9-]*",
    number=r"\d+",


localrules:
    all,


rule all:
    input:
        flow.everything(),


rule tokens:
    input:
        code=flow.code("tokens"),
        model=lambda w: flow.model_files(flow.model_of(w.tokenizer)),
    output:
        "build/tokens/{tokenizer}/{corpus}.safetensors",
    benchmark:
        "build/benchmarks/tokens/{tokenizer}-{corpus}.tsv"
    params:
        options=lambda w: flow.options(model=flow.model_of(w.tokenizer)),
    shell:
        "{repro} tokens --corpus {wildcards.corpus} {params.options} --out {output}"


rule compress:
    input:
        code=lambda w: flow.code("compress", flow.the(w.run)),
        model=lambda w: flow.model_files(flow.the(w.run).model),
        start=lambda w: flow.start(flow.the(w.run)) or [],
        calibration=lambda w: flow.calibration(flow.the(w.run)),
    output:
        "build/runs/{run}/weights.safetensors",
    benchmark:
        "build/benchmarks/compress/{run}.tsv"
    threads: flow.profile.threads
    params:
        options=lambda w: flow.compress_options(flow.the(w.run)),
    shell:
        "{repro} compress {params.options} --out {output}"


rule perplexity:
    input:
        code=lambda w: flow.code("perplexity", flow.the(w.run)),
        model=lambda w: flow.model_files(flow.the(w.run).model),
        weights=lambda w: flow.the(w.run).weights or [],
        tokens=lambda w: [flow.tokens(flow.the(w.run).model, text) for text in flow.texts],
    output:
        [f"build/runs/{{run}}/{flow.ppl}/{text}.parquet" for text in flow.texts],
    benchmark:
        "build/benchmarks/perplexity/{run}.tsv"
    threads: flow.profile.threads
    params:
        options=lambda w: flow.perplexity_options(flow.the(w.run)),
    shell:
        "{repro} perplexity {params.options} --tokens {input.tokens} --code {input.code} --out {output}"


rule zeroshot:
    input:
        code=lambda w: flow.code("zeroshot", flow.the(w.run)),
        model=lambda w: flow.model_files(flow.the(w.run).model),
        weights=lambda w: flow.the(w.run).weights or [],
    output:
        f"build/runs/{{run}}/{flow.zs}.parquet",
    benchmark:
        "build/benchmarks/zeroshot/{run}.tsv"
    threads: flow.profile.threads
    params:
        options=lambda w: flow.zeroshot_options(flow.the(w.run)),
    shell:
        "{repro} zeroshot {params.options} --code {input.code} --out {output}"


rule table:
    input:
        code=flow.code("tables"),
        cells=lambda w: flow.table_inputs(w.paper, w.number),
    output:
        report(expand("tables/{{paper}}/table{{number}}{kind}", kind=KINDS), category="tables", subcategory="{paper}"),
    benchmark:
        "build/benchmarks/tables/{paper}-{number}.tsv"
    params:
        profile=profile,
    shell:
        "{repro} table {wildcards.paper}/table{wildcards.number} {params.profile}"


rule study_part:
    input:
        code=lambda w: flow.part_code(w.part),
        model=lambda w: flow.model_files(flow.part(w.part).stand_in),
        weights=lambda w: flow.part(w.part).base.weights,
        tokens=lambda w: flow.tokens(flow.part(w.part).stand_in, flow.part(w.part).corpus),
    output:
        "build/studies/{part}.parquet",
    benchmark:
        "build/benchmarks/studies/{part}.tsv"
    threads: flow.profile.threads
    params:
        options=lambda w: flow.part_options(w.part),
    shell:
        "{repro} study {params.options} --tokens {input.tokens} --code {input.code} --out {output}"


rule study:
    input:
        code=flow.code("tables"),
        cells=lambda w: flow.study_inputs(w.paper, w.study),
    output:
        report(expand("tables/{{paper}}/{{study}}{kind}", kind=KINDS), category="studies", subcategory="{paper}"),
    params:
        profile=profile,
    shell:
        "{repro} table {wildcards.paper}/{wildcards.study} {params.profile}"


rule headline:
    input:
        code=flow.code("tables"),
        cells=flow.headline_inputs(),
    output:
        report(expand("tables/table1{kind}", kind=KINDS), category="headline"),
    benchmark:
        "build/benchmarks/tables/headline.tsv"
    params:
        profile=profile,
    shell:
        "{repro} headline {params.profile}"


rule leaderboard:
    input:
        code=flow.code("tables"),
        cells=flow.leaderboard_inputs(),
    output:
        report(expand("tables/table2{kind}", kind=KINDS), category="headline"),
        report("figures/leaderboard.svg", category="headline"),
    params:
        profile=profile,
    shell:
        "{repro} leaderboard {params.profile}"


rule audit:
    input:
        code=flow.code("tables"),
    output:
        expand("tables/audit{kind}", kind=KINDS),
    shell:
        "{repro} audit"
