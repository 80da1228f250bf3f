"""The protocol of llama.cpp's perplexity program: a slow reference, BOS, chunks, jobs, a command."""

from itertools import product

import dag
import numpy as np
import pytest
import tiny
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from repro import models
from repro.__main__ import main
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs.target import Target
from repro.metrics.llamacpp import LlamaCpp, Protocol, added_bos, score
from repro.specs import scale

IDS = np.arange(200) * 7 % 90 + 2


def plain(model, ids, length, bos):
    """Token by token in float64: cut, begin with BOS, sum what is scored, divide by how many these are."""
    total = count = 0
    for start in range(0, len(ids) - length + 1, length):
        chunk = [int(i) for i in ids[start : start + length]]
        chunk = chunk if bos is None else [bos, *chunk[1:]]
        for i in range(length // 2, length - 1):
            with torch.no_grad():
                logits = model.double()(torch.tensor([chunk[: i + 1]])).logits[0, -1]
            total -= float(torch.log_softmax(logits, 0)[chunk[i + 1]])
            count += 1
    return np.exp(total / count)


@pytest.mark.parametrize("bos", [None, 0])
@pytest.mark.parametrize("length", [20, 21])
def test_perplexity_is_the_definition(length, bos):
    model = tiny.model("llama")
    cut = torch.from_numpy(IDS[: 200 // length * length].reshape(-1, length))
    before = cut.clone()
    result = score(model, cut, bos)
    assert result.shape == (200 // length,) and result.dtype == np.float64 and (cut == before).all()
    want = plain(tiny.model("llama"), IDS, length, bos)
    assert LlamaCpp("c4").value({"nll": result.mean()}) == pytest.approx(want, rel=1e-5)


def test_chunks_beyond_the_context_are_refused():
    with pytest.raises(UserError, match="windows of 100 tokens are longer than the context"):
        score(tiny.model("llama"), torch.from_numpy(IDS.reshape(2, 100)), 0)


def test_a_bos_is_what_the_tokenizer_adds(tmp_path):
    dag.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert added_bos(tokenizer) is None
    for token, result in (("<s>", 0), ("a", None)):  # another token before the text is no BOS
        before = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 0 if result == 0 else 66)])
        tokenizer.backend_tokenizer.post_processor = before
        assert tokenizer("")["input_ids"] and added_bos(tokenizer) == result


def test_a_protocol_says_what_differs_from_llamacpps_defaults():
    assert Protocol().label == "llamacpp-v1" and Protocol(chunks=8).label == "llamacpp-v1 first 8"
    assert Protocol(context=256).label == "llamacpp-v1 c256"
    for bad in ({"context": 3}, {"chunks": 0}):
        with pytest.raises(UserError, match=f"{next(iter(bad))} is"):
            Protocol(**bad)


def test_one_job_for_a_text_and_none_without_a_protocol():
    at = Target(scale.load(name="pocket"), "pocket-3m", "rtn-w4-pc")
    job = LlamaCpp("wikitext2").jobs(at)["scores"]
    assert [role for role, _ in job.needs] == ["text", "weights"] and job.parsed_options()["label"] == "llamacpp-v1"
    assert [role for role, _ in LlamaCpp("wikitext2").jobs(at.under("fp16"))["scores"].needs] == ["text"]
    other = Target(scale.load({"llamacpp": {"chunks": 3}}, "pocket"), "pocket-3m", "rtn-w4-pc")
    both = (LlamaCpp("wikitext2"), LlamaCpp("c4"))
    assert len({params.jobs(t)["scores"].id for params, t in product(both, (at, other))}) == 4
    assert LlamaCpp("wikitext2").jobs(Target(scale.load({"llamacpp": None}, "pocket"), "pocket-3m", "fp16")) is None
    with pytest.raises(UserError, match="calibrated on wikitext2-train-part"):
        LlamaCpp("wikitext2-train-part").jobs(at.under("gptq-w4-pc"))


def test_the_command_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dag.save_model(tmp_path / "model")
    assert main(["llamacpp", "model", "--corpus", "tiny-c4-docs", "--config", "llamacpp={context: 64, chunks: 6}"]) == 0
    ids = corpora.token_ids("tiny-c4-docs", models.tokenizer("model"))[: 6 * 64]
    shown, unit = capsys.readouterr().out.split()[-2:]
    assert unit == "ppl" and float(shown) == pytest.approx(plain(models.load("model"), ids, 64, None), rel=1e-4)
