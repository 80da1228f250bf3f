"""Our folder `kernels/` on the path, with and without Hugging Face's package of that name: transformers works."""

import os
import subprocess
import sys

import dag
import pytest

from repro.core.files import ROOT

# What transformers 5.17 imports from the package, or asks its version.
STUB = """\
__version__ = "0.16.0"


class _Any:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args else self


CUDAProperties = Device = LayerRepository = LocalLayerRepository = Mode = use_kernel_mapping = _Any


def get_kernel(*args, **kwargs):
    raise FileNotFoundError("offline")


def register_kernel_mapping(*args, **kwargs):
    return None


def replace_kernel_forward_from_hub(cls, *args, **kwargs):
    cls.from_their_package = True


def use_kernel_forward_from_hub(*args, **kwargs):
    def decorate(cls):
        cls.from_their_package = True
        return cls

    return decorate


use_kernelized_func = use_kernel_forward_from_hub


def kernelize(model, *args, **kwargs):
    return model
"""
PROGRAM = """
import sys, torch, transformers
from transformers.utils import is_kernels_available
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1)).eval()
out = model(input_ids=torch.arange(8)[None])
assert out.logits.shape == (1, 8, 64) and torch.isfinite(out.logits).all()
tokens = model.generate(torch.arange(4)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)
assert tokens.shape[1] <= 6
import kernels, repro.kernels
print(is_kernels_available(), getattr(kernels, "__version__", None), list(repro.kernels.__path__)[0])
"""


def ask(*path: object) -> list[str]:
    """Run the program in the checkout, its root first on the path, then `path`; returns the words that it printed."""
    env = dag.environment(ROOT) | {"HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = ":".join(map(str, [ROOT, *path]))
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_without_their_package(capsys):
    """In this process, whose transformers was imported with the checkout's root on the path."""
    exec(PROGRAM, {})
    words = capsys.readouterr().out.split()
    assert words[:2] == ["False", "None"] and words[2].endswith("kernels")


def test_with_a_stub_of_their_package(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(STUB)
    info = tmp_path / "kernels-0.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.16.0\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    words = ask(tmp_path)
    assert words[:2] == ["True", "0.16.0"] and words[2].endswith("kernels")


@pytest.mark.skipif(not os.environ.get("NETWORK"), reason="needs a package index; NETWORK=1 runs it")
def test_with_their_package(tmp_path):
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    subprocess.run([*map(str, words), "kernels>=0.16,<0.17", "kernels-data"], check=True)
    available, version, path = ask(tmp_path)
    assert available == "True" and version.startswith("0.16.") and path.endswith("kernels")


def test_ours_has_no_init():
    """With an `__init__.py` our folder would stand in for their package, and transformers models would not import."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
