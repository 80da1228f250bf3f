"""The jobs of one text: what they declare decides their ids, which built results and accepted rows are known by."""

import pytest

from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics import KINDS
from repro.specs import scale

WINDOWS = {"length": 2048, "windows": 32}
CHUNKS = {"context": 512, "chunks": 3}
DRAWS = {"draws": 12, "sampled": 6, "passages": 3, "length": 96}


@pytest.mark.parametrize("recipe", ["fp16", "rtn-w4-pc", "gptq-w4-pc"])
@pytest.mark.parametrize(
    ("kind", "params", "inputs", "options"),
    [
        ("sparsity", {"corpus": "wikitext2"}, WINDOWS, WINDOWS | {"label": "gptq-2048-v1"}),
        ("token_class", {"corpus": "wikitext2", "of": "digits"}, WINDOWS, WINDOWS | {"label": "gptq-2048-v1"}),
        ("similarity", {"show": "cos_min"}, DRAWS, {}),
        ("llamacpp", {"corpus": "wikitext2"}, CHUNKS | {"version": 1}, CHUNKS | {"label": "llamacpp-v1 first 3"}),
    ],
)
def test_what_the_jobs_of_a_text_declare(kind, params, inputs, options, recipe):
    target = Target(scale.load({"llamacpp": {"chunks": 3}}, "pocket"), "pocket-3m", recipe)
    (job,) = KINDS[kind](**params).jobs(target).values()
    made = compress.job(target)
    text = {"text": corpora.identifier("wikitext2", target.scale.hub)}
    assert (
        job.parsed_inputs()
        == target.inputs() | text | {"calibration": made.parsed_inputs().get("calibration")} | inputs
    )
    assert (job.parsed_inputs()["calibration"] is not None) == recipe.startswith("gptq")
    assert job.parsed_options() == target.options() | options
    assert (job.kind, job.label, job.steps) == (kind, target.label, target.steps)
    needs = {"text": tokens.job(target, "wikitext2")} | ({"weights": made} if recipe != "fp16" else {})
    assert [(role, need.id) for role, need in job.needs] == [(role, need.id) for role, need in needs.items()]
