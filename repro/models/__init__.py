"""Load models by name: a pocket model of this repository, a local folder, or a hub id with its revision.

    pocket-5m                        repro/pocket/pocket-5m, its weights checked against repro/pocket/SHA256SUMS
    some/folder  or  /abs/folder     a Hugging Face folder: config.json and *.safetensors (one file or shards)
    meta-llama/Llama-3.2-1B@4e20de3  a hub id at a pinned revision (a commit), only where the scale says `hub: true`

Weights are safetensors or nothing: pickled files are refused and remote code is never run.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from repro.core.errors import UserError, shortened, unknown
from repro.core.files import ROOT, reading, sha256, short_hash
from repro.models import identity

POCKET = ROOT / "repro" / "pocket"
LONGEST = 1000  # characters of a model's name
DTYPES = ("F32", "F16", "BF16")  # as a safetensors header names them
QUANTIZED = ("quantization_config", "compression_config")  # keys of a config.json whose weights are not plain
ADAPTER = "adapter_config.json"  # which Transformers applies where peft is installed
BUFFERS = re.compile(r"(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$")  # in old checkpoints


def pocket_names() -> list[str]:
    """The pocket models of this repository."""
    return sorted(p.parent.name for p in POCKET.glob("*/config.json"))


def folder(name: str) -> Path | None:
    """The local folder of a model; None for a hub id.

    Raises:
        UserError: there is no such model, or a hub id without a commit.
    """
    if len(name) > LONGEST:
        raise UserError(f"model {shortened(name)!r}: a name of {len(name):,} characters; at most {LONGEST:,} are read")
    if (POCKET / name / "config.json").is_file():
        return POCKET / name
    path = Path(name)
    if (path / "config.json").is_file():
        return path.resolve()
    if "@" in name:
        hub_id, _, revision = name.partition("@")
        if not hub_id or not re.fullmatch("[0-9a-f]{7,40}", revision):
            raise UserError(
                f"model {name!r}: {revision!r} is not a pinned revision; give the commit on the hub, 7 to 40 hex digits"
            )
        return None
    if (path / ADAPTER).is_file():
        raise UserError(f"model {name!r}: {path} holds a LoRA adapter alone ({ADAPTER}); merge it into its model first")
    if path.is_dir():
        raise UserError(f"model {name!r}: {path} has no config.json; name a Hugging Face folder")
    raise UserError(f"{unknown('model', name, pocket_names())}, or a local folder, or hub-id@revision")


def weight_files(name: str) -> list[Path]:
    """What decides a local model, its tokenizer included, then its safetensors, each in name order; none of a hub id.

    Raises:
        UserError: unknown model, only pickled weights, no weights, a shard that its index names and that is absent, or
            a LoRA adapter beside the weights.
    """
    model_folder = folder(name)
    if model_folder is None:
        return []
    if (model_folder / ADAPTER).is_file():
        raise UserError(
            f"model {name!r}: {model_folder / ADAPTER} is a LoRA adapter beside the whole model, and only some "
            "installations apply it; merge it into the weights, or move it away"
        )
    files = sorted(path for path in model_folder.glob("*.safetensors") if path.is_file())
    if not files:
        pickled = []
        for pattern in ("*.bin", "*.pt", "*.pth"):
            pickled += [path.name for path in model_folder.glob(pattern)]
        why = f"only pickled weights ({pickled[0]}), which are never loaded" if pickled else "no *.safetensors"
        raise UserError(f"model {name!r}: {model_folder} has {why}; save it with safetensors")
    if absent := sorted(set(_indexed(model_folder)) - {path.name for path in files}):
        raise UserError(f"model {name!r}: the shard {absent[0]} that {identity.INDEX} names is missing; copy it again")
    return identity.deciding_files(model_folder) + files


def _indexed(model_folder: Path) -> list[str]:
    """The names of the shards that a folder's index lists; none where it has no index."""
    index = model_folder / identity.INDEX
    if not index.is_file():
        return []
    try:
        with reading(index):
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{index}: not a safetensors index; save the model again") from None
    return sorted(set(map(str, named)))


@cache
def fingerprint(name: str) -> str:
    """Eight hex digits that fix the model: of its files' contents, or of the hub id and revision.

    Raises:
        UserError: as `weight_files`.
    """
    files, model_folder = weight_files(name), folder(name)
    if model_folder is None:
        return short_hash(name)
    return identity.model_digest(model_folder, files, _indexed(model_folder))


def check_fingerprint(name: str, made_of: str, where: Path) -> None:
    """Raise unless a compressed model was made from today's model of that name.

    Raises:
        UserError: it was made from another.
    """
    if made_of != fingerprint(name):
        raise UserError(f"{where} was made from another model than today's {name}; delete it and run again")


def check_pocket(name: str) -> None:
    """Compare a pocket model's weights with repro/pocket/SHA256SUMS.

    Raises:
        UserError: a file differs from the list, or there is no list.
    """
    sums = POCKET / "SHA256SUMS"
    try:
        with reading(sums):
            listed = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    except (FileNotFoundError, ValueError):
        raise UserError(f"{sums}: missing or damaged; check it out again") from None
    for path in weight_files(name):
        key = str(path.relative_to(POCKET))
        if path.suffix == ".safetensors" and sha256(path) != listed.get(key):
            raise UserError(f"{path}: not the file that SHA256SUMS lists (damaged or cut short); check it out again")


def load(name: str, device: str = "cpu", dtype: str = "float32", hub: bool = False) -> Any:
    """Load a causal LM, checked, in evaluation mode.

    Raises:
        UserError: unknown model, damaged or pickled weights, weights of another dtype than float32, float16 and
            bfloat16, NaN or Inf among them, a hub that is not allowed, or no GPU where one is asked for.
    """
    import torch
    import transformers.utils

    transformers.utils.is_sklearn_available = lambda: False  # a fifth of a job's start; only assisted decoding asks
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    files = weight_files(name)
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"device {device!r}: this machine has no CUDA device; choose a scale whose device is cpu")
    if files and files[0].is_relative_to(POCKET):
        check_pocket(name)
    if model_folder := folder(name):
        _check_unquantized(name, identity.read_config(model_folder))
        _check_generation_settings(model_folder)
    for path in files:
        if path.suffix == ".safetensors":
            _check_dtypes(name, path)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        if model_folder is None:
            _check_hub(name, hub)
        model, report = AutoModelForCausalLM.from_pretrained(
            **_source(name, hub),
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
        )
    except UserError:
        raise
    except Exception as error:  # what a damaged config.json leads to has many kinds
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(f"model {name!r} cannot be loaded; check its config.json and weights ({reason})") from None
    _check_report(name, report)
    for key, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(f"model {name!r}: {key} holds NaN or Inf; the checkpoint is damaged")
    _take_ends(name, model)
    return model.to(device).eval()


def _check_dtypes(name: str, path: Path) -> None:
    """Check the dtypes of the weights in a safetensors file; only its header is read.

    Raises:
        UserError: a damaged file, or weights of another dtype than float32, float16 and bfloat16.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}
    except Exception as error:  # safetensors has its own kinds
        raise UserError(f"{path}: an incomplete or damaged safetensors file ({error}); copy it again") from None
    for key, dtype in dtypes.items():
        if dtype not in DTYPES and not BUFFERS.search(key):
            raise UserError(
                f"model {name!r}: {key} is stored as {dtype}; weights must be float32, float16 or bfloat16 "
                "(F32, F16, BF16), so save an unquantized model"
            )


def _check_report(name: str, report: Mapping[str, Any]) -> None:
    """Check that a model's files have exactly the weights of its configuration.

    Args:
        name: of the model.
        report: Transformers' loading information.

    Raises:
        UserError: a weight is missing, surplus or of another shape.
    """
    if report["missing_keys"]:
        raise UserError(f"model {name!r}: {sorted(report['missing_keys'])[0]} is not in its files; copy it again")
    if report["mismatched_keys"]:
        key, shape, expected = sorted(report["mismatched_keys"])[0]
        raise UserError(f"model {name!r}: {key} is {list(shape)}, its config.json says {list(expected)}")
    if surplus := sorted(key for key in report["unexpected_keys"] if "inv_freq" not in key):
        raise UserError(f"model {name!r}: its files hold {surplus[0]}, which its config.json has no place for")


def _check_generation_settings(model_folder: Path) -> None:
    """Raise where a generation_config.json is no JSON: Transformers would go on without it, and so with other ends.

    Raises:
        UserError: it is none.
    """
    path = model_folder / identity.GENERATION
    if not path.is_file():
        return
    try:
        with reading(path):
            json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UserError(f"{path}: not valid JSON; copy it again, or remove it") from None


def _take_ends(name: str, model: Any) -> None:
    """Let every id that the settings of generation name end a text: Llama 3's name more than its config.json.

    Raises:
        UserError: they name something that is no id.
    """
    ends = model.generation_config.eos_token_id
    if ends is None or ends == []:
        return
    ids = ends if isinstance(ends, list) else [ends]
    if any(type(id_) is not int for id_ in ids):
        problem = f"eos_token_id in its {identity.GENERATION} is {shortened(repr(ends))}"
        raise UserError(f"model {name!r}: {problem}; give an id, or a list of ids")
    model.config.eos_token_id = ends


def _check_unquantized(name: str, config: dict[str, Any]) -> None:
    """Raise where a model's configuration asks Transformers to treat its weights as quantized.

    Raises:
        UserError: it has a `quantization_config`.
    """
    for key in QUANTIZED:
        if setting := config.get(key):
            method = setting.get("quant_method", "") if isinstance(setting, dict) else ""
            setting_found = f"{key} ({shortened(method)})" if method else key
            raise UserError(
                f"model {name!r}: its config.json has a {setting_found}; full precision is needed, so remove the key "
                "where the weights are float, or save an unquantized model"
            )


def _check_hub(name: str, hub: bool) -> None:
    """Raise what `weight_files` and `load` raise of a folder, for a model on the hub, before its weights are fetched.

    Raises:
        UserError: a LoRA adapter lies beside the model, or its configuration is that of quantized weights.
    """
    from transformers import PreTrainedConfig
    from transformers.utils import find_adapter_config_file

    source = _source(name, hub)
    hub_id, revision = source["pretrained_model_name_or_path"], source["revision"]
    _check_unquantized(name, PreTrainedConfig.get_config_dict(hub_id, revision=revision)[0])
    if find_adapter_config_file(hub_id, revision=revision):
        raise UserError(f"model {name!r}: a LoRA adapter ({ADAPTER}) lies beside it; name a model without one")


def tokenizer(name: str, hub: bool = False) -> Any:
    """The tokenizer that belongs to a model.

    Raises:
        UserError: it has none, or it is on a hub that is not allowed.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(**_source(name, hub))
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception
        reason = shortened(" ".join(str(error).split()), 200)
        raise UserError(f"model {name!r} has no tokenizer that loads; check its tokenizer.json ({reason})") from None


def tokenizer_key(name: str) -> str:
    """A short name for the model's tokenizer, so that token ids are shared by models that share it.

    It covers every file and setting that decides a token id, not `tokenizer.json` alone; a hub id is pinned.
    """
    model_folder = folder(name)
    return short_hash(name) if model_folder is None else identity.tokenizer_digest(model_folder)


def _source(name: str, hub: bool) -> dict[str, Any]:
    model_folder = folder(name)
    if model_folder is not None:
        return {
            "pretrained_model_name_or_path": str(model_folder),
            "local_files_only": True,
            "trust_remote_code": False,
        }
    if not hub:
        raise UserError(f"model {name!r} is on the hub; set `hub: true` in the scale, or name a local folder")
    hub_id, _, revision = name.partition("@")
    return {"pretrained_model_name_or_path": hub_id, "revision": revision, "trust_remote_code": False}
