"""What several test files share: one thread, the data mirror where there is one, and a tiny random Llama."""

import gc
import os

import hypothesis
import pytest
import short_texts
import torch
from dag import built, source  # noqa: F401
from tiny_results import house, tiny_jobs  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

from repro.core.files import ROOT
from repro.specs import scale
from repro.workflow.workflow import Workflow

gc.disable()  # until all tests are collected
torch.set_num_threads(1)
short_texts.register()
hypothesis.settings.register_profile("suite", max_examples=25, deadline=None)  # HYPOTHESIS_PROFILE=default: 100
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
LONGEST = (  # of these only the first needs the build that workers share at once; the longest first
    "test_workflow.py", "test_page.py", "test_interrupt.py", "test_compress.py", "test_w4a16_gemm.py",
    "test_w2a2.py", "test_statistics.py", "test_engine_sparse.py", "test_kernels_triton.py", "test_spinquant.py",
    "test_baselines.py", "test_qat.py", "test_q4_k_gemv.py", "test_accept.py", "test_limited.py", "test_engine.py",
    "test_bad_input.py", "test_wna16_gemv.py", "test_toy_kind.py", "test_pool.py", "test_package.py",
    "test_verify.py",
)  # fmt: skip

STORED = ("test_page.py", "test_once.py", "test_content.py", "test_choose.py")  # they show what is accepted


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes whole files; those that look up what is accepted here are one, so that it is looked up once."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = super()._split_scope(nodeid)
            return "stored" if path.endswith(STORED) else path

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """What is imported and collected stays to the end: garbage is looked for in what tests make, and less often.

    The libraries' million objects, gone through again and again, were an eighth of all processor time.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def pytest_collection_modifyitems(items):
    """The longest files come first: a worker that got one last would be waited for."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def mirror(monkeypatch):
    """The folder of the data mirror, with REPRO_DATA set to it; skips where there is none."""
    named = os.environ.get("REPRO_DATA")
    folder = ROOT.parent / "shared" / "data" if named is None else ROOT / named
    if not (folder / "wikitext-2").is_dir():
        pytest.skip(f"no data mirror: REPRO_DATA is {named or 'not set'}, and {folder} has no wikitext-2")
    monkeypatch.setenv("REPRO_DATA", str(folder))
    return folder


@pytest.fixture(scope="session")
def stored():
    """What is accepted in this checkout at scale pocket, looked up once for all tests of a worker."""
    return Workflow.of_results(scale.load(name="pocket"))


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
