"""Models by name: what loads, and what damaged or forbidden ones say."""

import json
import shutil

import disk_errors
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from repro import models
from repro.core.errors import UserError


@pytest.fixture(autouse=True)
def forget():
    """Fingerprints are remembered by name; copies of a test are new models under old names."""
    models.fingerprint.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a saved model of each layout, and a llama in several shards."""
    folder = tmp_path_factory.mktemp("saved")
    for name in tiny.MODELS:
        tiny.model(name).save_pretrained(folder / name)
    tiny.model("llama").save_pretrained(folder / "sharded", max_shard_size="60KB")
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """Copy a saved model to a folder of the test's own."""
    return lambda name: shutil.copytree(saved / name, tmp_path / name)


@pytest.fixture
def pocket(tmp_path, monkeypatch):
    """A copy of the pocket models' folder, the one that `models` reads."""
    made = tmp_path / "pocket"
    for name in ("pocket-3m", "pocket-10m", "tokenizer"):
        shutil.copytree(models.POCKET / name, made / name, symlinks=True)
    shutil.copy(models.POCKET / "SHA256SUMS", made)
    monkeypatch.setattr(models, "POCKET", made)
    return made


def refused(name, **kwargs):
    """The sentence with which loading stops."""
    with pytest.raises(UserError) as error:
        models.load(str(name), **kwargs)
    text = str(error.value)
    assert text.strip() == text and "\n" not in text and len(text) < 600
    return text


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_pocket_model_loads_whole():
    model = models.load("pocket-3m")
    assert not model.training and model.dtype == torch.float32 and model.config.vocab_size == 4096
    stored = load_file(models.POCKET / "pocket-3m" / "model.safetensors")
    loaded = dict(model.named_parameters())
    assert set(stored) == set(loaded)
    assert all(torch.equal(loaded[key], value.float()) for key, value in stored.items())


def test_names_and_dtype():
    assert set(models.pocket_names()) >= {"pocket-10m", "pocket-3m", "pocket-5m"}
    assert models.load("pocket-3m", dtype="bfloat16").dtype == torch.bfloat16
    assert models.folder("pocket-3m") == models.POCKET / "pocket-3m"


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_layout_loads_from_a_folder(saved, name):
    model, wanted = models.load(str(saved / name)), dict(tiny.model(name).named_parameters())
    assert {key: value.shape for key, value in model.named_parameters()} == {k: v.shape for k, v in wanted.items()}
    assert all(torch.equal(value, wanted[key]) for key, value in model.named_parameters())
    assert torch.isfinite(model(tiny.tokens(1, 12)).logits).all()
    assert ("model.layers.0.self_attn.q_proj.bias" in wanted) == (name in ("qwen2", "phi"))


def test_shards_load_like_one_file(saved):
    assert len(list((saved / "sharded").glob("*.safetensors"))) > 2
    one, many = models.load(str(saved / "llama")), models.load(str(saved / "sharded"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def test_a_relative_folder_is_found(saved, monkeypatch):
    monkeypatch.chdir(saved)
    assert models.folder("llama") == saved / "llama"
    assert models.fingerprint("llama") == models.fingerprint(str(saved / "llama"))


def test_the_fingerprint_is_of_every_byte(copy):
    folder = copy("llama")
    first = models.fingerprint(str(folder))
    flip(folder / "model.safetensors", -1)
    models.fingerprint.cache_clear()
    second = models.fingerprint(str(folder))
    config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 1e-4}
    (folder / "config.json").write_text(json.dumps(config))
    models.fingerprint.cache_clear()
    assert len({first, second, models.fingerprint(str(folder))}) == 3


def test_pocket_fingerprints_and_one_tokenizer():
    assert len({models.fingerprint(name) for name in models.pocket_names()}) == len(models.pocket_names())
    assert len({models.tokenizer_key(name) for name in models.pocket_names()}) == 1


def test_the_tokenizer_puts_bos_in_front():
    tokenizer = models.tokenizer("pocket-3m")
    assert tokenizer("It is 2024.")["input_ids"][0] == models.load("pocket-3m").config.bos_token_id == 0
    assert tokenizer.decode(tokenizer("It is 2024.", add_special_tokens=False)["input_ids"]) == "It is 2024."


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_cut_shard(copy):
    folder = copy("sharded")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert refused(folder).startswith(f"{shard}: an incomplete or damaged safetensors file (")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle", b"\xff" * 64])
def test_something_else_in_a_weight_file(copy, content):
    folder = copy("llama")
    (folder / "model.safetensors").write_bytes(content)
    assert "an incomplete or damaged safetensors file" in refused(folder)


def test_a_flipped_bit_in_a_pocket_shard(pocket):
    models.load("pocket-3m")
    path = pocket / "pocket-3m" / "model.safetensors"
    flip(path, -1000)
    assert refused("pocket-3m").startswith(f"{path}: not the file that SHA256SUMS lists")
    models.load("pocket-10m")
    flip(pocket / "pocket-10m" / "model-00002-of-00002.safetensors", -1)
    assert "model-00002-of-00002.safetensors: not the file" in refused("pocket-10m")
    assert "not the file that SHA256SUMS lists" in refused(pocket / "pocket-10m"), "by its path as well"


def test_a_cut_pocket_shard(pocket):
    path = pocket / "pocket-3m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    assert refused("pocket-3m").startswith(f"{path}: not the file that SHA256SUMS lists")


def test_an_absent_or_damaged_list_of_sums(pocket):
    (pocket / "SHA256SUMS").write_text("one two three\n")
    assert "missing or damaged" in refused("pocket-3m")
    (pocket / "SHA256SUMS").unlink()
    assert "missing or damaged" in refused("pocket-3m")


def test_a_list_of_sums_that_cannot_be_read(pocket):
    disk_errors.make_unreadable(pocket / "SHA256SUMS")
    assert refused("pocket-3m") == f"{pocket / 'SHA256SUMS'}: {disk_errors.WHY}"


@pytest.mark.parametrize("ending", [".bin", ".pt", ".pth"])
def test_pickles_are_never_loaded(copy, ending):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    (folder / f"pytorch_model{ending}").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    assert f"only pickled weights (pytorch_model{ending}), which are never loaded" in refused(folder)


def test_no_weights_at_all(copy):
    folder = copy("llama")
    (folder / "model.safetensors").unlink()
    assert "has no *.safetensors; save it with safetensors" in refused(folder)


def test_a_missing_shard_is_named(copy):
    folder = copy("sharded")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"the shard {shard.name} that model.safetensors.index.json names is missing" in refused(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', "3"])
def test_a_damaged_index(copy, content):
    folder = copy("sharded")
    (folder / "model.safetensors.index.json").write_text(content)
    assert "not a safetensors index" in refused(folder)


def test_an_index_that_cannot_be_read(copy):
    index = copy("sharded") / "model.safetensors.index.json"
    disk_errors.make_unreadable(index)
    assert refused(index.parent) == f"{index}: {disk_errors.WHY}"


def test_shards_without_their_index(copy):
    folder = copy("sharded")
    (folder / "model.safetensors.index.json").unlink()
    assert "cannot be loaded" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(copy, value):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert refused(folder).endswith("model.layers.1.mlp.up_proj.weight holds NaN or Inf; the checkpoint is damaged")


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        *((torch.int8, "I8"), (torch.uint8, "U8"), (torch.int64, "I64"), (torch.bool, "BOOL"), (torch.float64, "F64")),
        *((torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.complex64, "C64")),
    ],
)
@pytest.mark.parametrize("name", ["llama", "sharded"])
def test_weights_that_are_not_16_or_32_bit_floats(copy, monkeypatch, name, dtype, stored):
    folder, key = copy(name), "model.layers.1.mlp.up_proj.weight"
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if key in tensors:
            tensors[key] = tensors[key].to(dtype)
            save_file(tensors, path, {"format": "pt"})
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)  # refused before anything is loaded
    assert f"model {str(folder)!r}: {key} is stored as {stored}; weights must be float32, float16" in refused(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_load(copy, dtype):
    folder = copy("llama")
    tensors = {key: value.to(dtype) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = dict(models.load(str(folder)).named_parameters())
    assert all(torch.equal(loaded[key], value.float()) for key, value in tensors.items())


def test_an_integer_buffer_of_an_old_checkpoint_is_no_weight(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16, dtype=torch.float64)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert models.load(str(folder)).config.hidden_size == 64


def test_a_tensor_that_is_not_there(copy):
    folder = copy("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight is not in its files" in refused(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is not in its files"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight, which its config.json has no place for"),
        ({"intermediate_size": 96}, "model.layers.0.mlp.down_proj.weight is [64, 128], its config.json says [64, 96]"),
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"num_attention_heads": 3}, "cannot be loaded"),
        ({"model_type": "nosuch", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "cannot be loaded"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "has a quantization_config (gptq)"),
    ],
)
def test_a_config_that_does_not_belong_to_the_weights(copy, change, reason):
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert reason in refused(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_config_that_is_none(copy, content):
    folder = copy("llama")
    (folder / "config.json").write_text(content)
    assert "cannot be loaded" in refused(folder)


def test_code_beside_the_weights_is_not_run(copy, tmp_path):
    folder = copy("llama")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}})
    )
    assert type(models.load(str(folder))).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


# --- names and tokenizers ---------------------------------------------------------------------------------------------


def test_an_unknown_name():
    assert refused("pocket-4m").startswith("unknown model 'pocket-4m'") and "did you mean " in refused("pocket-4m")


def test_a_folder_that_is_no_model(tmp_path):
    assert "has no config.json" in refused(tmp_path)


def test_the_hub_must_be_allowed():
    name = "meta-llama/Llama-3.2-1B@4e20de3"
    assert models.folder(name) is None and models.weight_files(name) == []
    assert refused(name) == f"model {name!r} is on the hub; set `hub: true` in the scale, or name a local folder"
    with pytest.raises(UserError, match="is on the hub"):
        models.tokenizer(name)


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("revision", ["main", "", "v1.0", "4e20de", "4e20de3g", "4E20DE3", "4e20de3@1", "a" * 41])
def test_a_revision_that_is_not_pinned_is_refused(revision, hub):
    assert "is not a pinned revision; give the commit on the hub" in refused(
        f"meta-llama/Llama-3.2-1B@{revision}", hub=hub
    )
    with pytest.raises(UserError, match="not a pinned revision"):
        models.fingerprint(f"meta-llama/Llama-3.2-1B@{revision}")


def test_the_hub_is_asked_for_the_pinned_revision(monkeypatch):
    request = {}

    def from_pretrained(**kwargs):
        request.update(kwargs)
        raise OSError("We couldn't connect to the hub\nand more lines")

    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: ({}, {}))
    monkeypatch.setattr("transformers.utils.find_adapter_config_file", lambda *_, **__: None)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", from_pretrained)
    text = refused("meta-llama/Llama-3.2-1B@4e20de3", hub=True)
    assert (
        text == "model 'meta-llama/Llama-3.2-1B@4e20de3' cannot be loaded; check its config.json and weights "
        "(We couldn't connect to the hub and more lines)"
    )
    assert request["pretrained_model_name_or_path"] == "meta-llama/Llama-3.2-1B" and request["revision"] == "4e20de3"
    assert request["trust_remote_code"] is False and request["use_safetensors"] is True


def test_an_at_sign_in_a_local_folder(saved, tmp_path):
    folder = shutil.copytree(saved / "llama", tmp_path / "mine@home")
    assert models.folder(str(folder)) == folder


def test_a_model_without_a_tokenizer(saved, copy):
    with pytest.raises(UserError, match="has no tokenizer that loads") as error:
        models.tokenizer(str(saved / "llama"))
    assert "\n" not in str(error.value)
    folder = copy("llama")
    shutil.copy(models.POCKET / "tokenizer" / "tokenizer_config.json", folder)
    for content in ("{", '{"model": {}}', (models.POCKET / "tokenizer" / "tokenizer.json").read_text()[:9000]):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match="has no tokenizer that loads"):
            models.tokenizer(str(folder))


@pytest.mark.parametrize("ends", ["</s>", 1.5, True, [1, "x"], {"id": 1}])
def test_ends_that_are_no_ids(copy, ends):
    folder = copy("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    text = refused(folder)
    assert "eos_token_id in its generation_config.json is " in text and "give an id, or a list of ids" in text


def test_generation_settings_that_are_no_json(copy):
    folder = copy("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": 1')
    assert refused(folder).endswith("generation_config.json: not valid JSON; copy it again, or remove it")


def test_generation_settings_that_cannot_be_read(copy):
    path = copy("llama") / "generation_config.json"
    disk_errors.make_unreadable(path)
    with pytest.raises(UserError) as error:
        models._check_generation_settings(path.parent)
    assert str(error.value) == f"{path}: {disk_errors.WHY}"


# --- what lies in a folder and would change the numbers ---------------------------------------------------------------


@pytest.mark.parametrize(
    "left, method",
    [({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bits"),
     ({"load_in_8bit": True}, "")],
)  # fmt: skip
def test_float_weights_with_a_left_over_quantization_config(copy, left, method):
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": left}))
    text = refused(folder)
    assert "config.json has a quantization_config" in text and method in text and "remove the key" in text
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert not models.load(str(folder)).training


@pytest.mark.parametrize("verb", [models.load, models.fingerprint])
def test_a_lora_adapter_beside_a_whole_model(copy, verb):
    folder = copy("llama")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    with pytest.raises(UserError, match=r"adapter_config.json is a LoRA adapter beside the whole model"):
        verb(str(folder))


def test_a_lora_adapter_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds a LoRA adapter alone" in refused(tmp_path)


def test_what_lies_beside_a_model_on_the_hub(monkeypatch):
    """The same two, of a model whose files are fetched only after its configuration was looked at."""
    name, config = "someone/model@4e20de3", {"model_type": "llama"}
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", lambda *_, **__: (config, {}))
    monkeypatch.setattr("transformers.utils.find_adapter_config_file", lambda *_, **__: "adapter_config.json")
    assert "a LoRA adapter (adapter_config.json) lies beside it" in refused(name, hub=True)
    config["quantization_config"] = {"quant_method": "awq"}
    assert "config.json has a quantization_config (awq)" in refused(name, hub=True)
