"""What several test files share: one thread, the data mirror where there is one, and a tiny random Llama."""

import os

import hypothesis
import pytest
import short_texts
import torch
from dag import built, source  # noqa: F401
from tiny_results import house, tiny_jobs  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from repro.core.files import ROOT
from repro.kernels import nvrtc
from repro.specs import scale
from repro.store import job
from repro.workflow.workflow import Workflow

torch.set_num_threads(1)
short_texts.register()
hypothesis.settings.register_profile("suite", max_examples=25, deadline=None)  # HYPOTHESIS_PROFILE=default: 100
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture
def mirror(monkeypatch):
    """The folder of the data mirror, with REPRO_DATA set to it; skips where there is none."""
    named = os.environ.get("REPRO_DATA")
    folder = ROOT.parent / "shared" / "data" if named is None else ROOT / named
    if not (folder / "wikitext-2").is_dir():
        pytest.skip(f"no data mirror: REPRO_DATA is {named or 'not set'}, and {folder} has no wikitext-2")
    monkeypatch.setenv("REPRO_DATA", str(folder))
    return folder


@pytest.fixture
def loaded_kernels(monkeypatch):
    """Name and macros of each CUDA kernel that is loaded from now on; none is compiled, and launches do nothing."""
    loaded = []

    class Loaded:
        beside = property(lambda self: self)

        def __call__(self, *arguments):
            pass

    def load(path, name, macros, device, shared=0):
        loaded.append((name, tuple(sorted(macros.items()))))
        return Loaded()

    monkeypatch.setattr(nvrtc, "load", load)
    return loaded


@pytest.fixture(scope="session")
def stored():
    """What is accepted in this checkout at scale pocket, looked up once for all tests of a worker."""
    return Workflow.of_results(scale.load(name="pocket"))


@pytest.fixture
def own_build_folder(tmp_path, monkeypatch):
    """Results and checkpoints of jobs lie in a folder of the test's own."""
    monkeypatch.setattr(job, "BUILD", tmp_path / "build")


@pytest.fixture
def tiny_llama():
    """A Llama of two layers, hidden size 64 and 256 tokens, random but always the same, float32, in evaluation mode."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture
def no_pooled_seeds(monkeypatch):
    """For results that a test makes up: what stored seeds vary is no evidence on them."""
    from repro.workflow import draws

    monkeypatch.setattr(draws, "pooled", lambda measure: None)
