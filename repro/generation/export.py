"""A Llama as a GGUF file that llama.cpp loads: all matrices in F16, or the linear layers of the blocks in Q4_K.

llama.cpp rotates neighbours within a head where Hugging Face rotates its two halves, so the rows of q and k are
interleaved. Rows are quantized alone: that moves Q4_K blocks and changes none. A tied head is left out, as there.
Source: ggml-org/ggml, `docs/gguf.md`; names of tensors and keys: the `gguf` package.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repro import models
from repro.core.errors import UserError, shortened, unknown
from repro.core.files import atomic, check_replaceable, regular, unreadable
from repro.methods.spqt import q4_k
from repro.metrics.llamacpp import added_bos
from repro.models.lowbit import block_linears, in_layer

MIXES = {"fp16": "all matrices F16, vectors F32", "q4_k": "block linears Q4_K, embedding and head F16, vectors F32"}
HEAD = 4096  # bytes of a file in which its description stands
Q4_K_S = 14  # the nearest of llama.cpp's named mixes
ROPES = ("default", "linear", "llama3")  # these only scale frequencies, as llama.cpp's factors do
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
SPLIT = {"type": "Split", "pattern": {"Regex": rf"{LLAMA3}|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": False}
# llama.cpp's name of a byte-level BPE: what cuts words, in Hugging Face's terms, and whether a whole word skips merges.
PATTERNS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, GPT2], False),
    "llama-bpe": ([SPLIT, GPT2 | {"use_regex": False}], True),
}


def export(name: str, recipe: str, out: Path, check: bool = False) -> str:
    """Write a model under a recipe of `MIXES` to the GGUF file `out`, or `check` that it holds these bytes; says which.

    Raises a UserError for a recipe, model, tokenizer or weight that has no such file, and for a file that differs.
    """
    if recipe not in MIXES:
        raise unknown("recipe for a GGUF", recipe, MIXES)
    if out.suffix != ".gguf":
        raise UserError(f"--gguf {shortened(out)}: the name of a GGUF file ends in .gguf")
    try:
        import gguf
    except ImportError:
        raise UserError("the gguf package writes GGUF files, and is not installed; pip install gguf==0.19.0") from None
    if not check:
        check_replaceable(out, "--gguf", exported)
    model = models.load(name)
    writer = gguf.GGUFWriter(None, "llama")
    facts = {"name": Path(name).name, "description": MIXES[recipe], "file_type": 1 if recipe == "fp16" else Q4_K_S}
    facts |= shape(model.config) | vocabulary(models.tokenizer(name), model.config.vocab_size)
    for key, value in ({"quantization_version": gguf.GGML_QUANT_VERSION} | facts).items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for key, value in tensors(model, recipe == "q4_k"):
        raw = gguf.GGMLQuantizationType.Q4_K if value.dtype == torch.uint8 else None
        writer.add_tensor(names.get_name(key, (".weight", ".bias")) or key, value.numpy(), raw_dtype=raw)
    with tempfile.TemporaryDirectory() if check else atomic(out) as target:
        writer.write_header_to_file(path := Path(target) / "wanted" if check else target)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if check:
            compare(out, path.read_bytes())
    return f"{out}: {MIXES[recipe]}; {out.stat().st_size:,} bytes"


def exported(path: Path) -> bool:
    """Whether a file is a GGUF that `export` wrote, perhaps cut since, by the description among its first keys."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    return head[:4] == b"GGUF" and any(description.encode() in head for description in MIXES.values())


def shape(config: Any) -> dict[str, Any]:
    """What llama.cpp builds the graph from, by the writer's names; refuses what its llama does not have."""
    act = getattr(config, "hidden_act", "none")
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "llama" or act != "silu" or rope.get("rope_type") not in ROPES:
        architecture = shortened(f"{config.model_type}, {act}, RoPE {rope.get('rope_type')}")
        raise UserError(
            f"a model of type {architecture} is not exported to GGUF; only llama, silu, RoPE {' or '.join(ROPES)}"
        )
    facts = dict.fromkeys(("rope_dimension_count", "key_length", "value_length"), config.head_dim)
    facts |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    facts |= {"vocab_size": config.vocab_size, "context_length": config.max_position_embeddings}
    facts |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    facts |= {"block_count": config.num_hidden_layers, "layer_norm_rms_eps": config.rms_norm_eps}
    return facts | {"rope_freq_base": rope["rope_theta"]}


def vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Tokens, merges, what cuts words and what surrounds a text; ids without a token are filled up to `size`."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "slow"}}
    pre = pattern(definition)
    model = definition["model"]
    ids = range(size)
    added = {token["id"]: token for token in definition["added_tokens"]}
    texts = {i: text for text, i in model["vocab"].items()} | {i: token["content"] for i, token in added.items()}
    if max(texts) >= size:
        raise UserError(f"the tokenizer has an id {max(texts)}, the model {size} ids; use the model's own tokenizer")
    types = dict.fromkeys(texts, 1) | {i: 3 if token["special"] else 4 for i, token in added.items()}  # 5: unused
    around = tokenizer("")["input_ids"]
    begins = added_bos(tokenizer) is not None
    ends = around[begins:] == [tokenizer.eos_token_id]
    if len(around) > begins + ends:
        raise UserError(f"the tokenizer puts the ids {around} around a text; llama.cpp adds a BOS and an EOS alone")
    facts = {"tokenizer_model": "gpt2", "tokenizer_pre": pre, "add_bos_token": begins, "add_eos_token": ends}
    facts |= {"token_list": [texts.get(i, f"[PAD{i}]") for i in ids], "token_types": [types.get(i, 5) for i in ids]}
    facts |= {"token_merges": [" ".join(pair) for pair in model["merges"]]}
    facts |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    facts["chat_template"] = chat_template(tokenizer)
    return {key: value for key, value in facts.items() if value is not None}


def chat_template(tokenizer: Any) -> str | None:
    """The chat template that llama.cpp reads, of several by name the default; None where there is none."""
    template = tokenizer.chat_template or None
    if not isinstance(template, dict):
        return template
    if "default" not in template:
        names = shortened(", ".join(sorted(template)))
        raise UserError(f"the tokenizer has the chat templates {names} and none is the default; name one `default`")
    return template["default"]


def pattern(definition: dict[str, Any]) -> str:
    """llama.cpp's name of the tokenizer that a tokenizer.json defines, key of `PATTERNS`; refuses one without."""
    model = definition["model"]
    pre = definition.get("pre_tokenizer") or {"type": "no pre-tokenizer"}
    steps = []
    for step in pre.get("pretokenizers", [pre]):
        steps.append({key: value for key, value in step.items() if key != "trim_offsets"})
    if model["type"] == "BPE" and model["merges"] and not model["byte_fallback"] and not definition["normalizer"]:
        for name, cut in PATTERNS.items():
            if cut == (steps, model["ignore_merges"]):
                return name
    description = shortened(" + ".join([model["type"], *(step["type"] for step in steps)]))
    requirement = f"it needs merges, cut as {', '.join(PATTERNS)}"
    raise UserError(f"llama.cpp has no pattern for the tokenizer ({description}); {requirement}")


def tensors(model: nn.Module, quantized: bool) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as it is written: vectors float32, matrices float16, or uint8 `[N, bytes]` of Q4_K blocks."""
    config = model.config
    linears = {f"{name}.weight" for name in block_linears(model)}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    plain = config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / -config.head_dim)
    factors = plain / model.base_model.rotary_emb.inv_freq
    if not torch.allclose(factors, torch.ones_like(factors)):
        yield "rope_freqs.weight", factors
    for key, parameter in model.named_parameters():
        value = parameter.detach().float()
        layer = key.split(".")[-2]
        if layer in heads:  # rows 0, d/2, 1, d/2 + 1, … of each head
            value = value.unflatten(0, (heads[layer], 2, -1)).transpose(1, 2).flatten(0, 2)
        with in_layer(key):
            if quantized and key in linears:
                value = q4_k.quantize(value)
            elif value.ndim > 1 and not torch.isfinite(value := value.half()).all():
                raise UserError("a weight is beyond 65504, the largest of F16; choose another model")
        yield key, value


def compare(path: Path, right: bytes) -> None:
    """Refuse a file that does not hold the bytes of a GGUF file, and say why; only its architecture is parsed."""
    try:
        content = regular(path, f"--gguf {path}").read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    kind = content[64 : 64 + int.from_bytes(content[56:64], "little")]  # the value of the first key
    why = "another model, recipe or version than would be written"
    if content[32:52] == b"general.architecture" and kind != b"llama":
        why = f"its architecture is {shortened(kind.decode(errors='replace'))!r}, not 'llama'"
    why = why if content[:4] == b"GGUF" else "not a GGUF file"
    why = f"cut, {len(content):,} of {len(right):,} bytes" if right.startswith(content) else why
    if content != right:
        raise UserError(f"{path}: {why}; export it again")
