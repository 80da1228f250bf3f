"""Pretrain a pocket model: a small Llama on the corpus in `$REPRO_DATA/corpus`, resumable, one path for CPU and GPU.

The recipe is plain on purpose: AdamW, warm-up, constant rate, linear decay to zero (WSD), documents packed without
masking as `<s> text </s>`, most tokens at context 512 and the last share at 2048. Batches are a pure function of
(seed, step), so a run that was killed continues with the batch it would have seen. `valid.txt` is never trained on.

    python -m repro pretrain pocket-5m --corpus $REPRO_DATA/corpus --out build/pretrain
    python -c "from repro.train.pretrain import install; install('build/pretrain')"     # into repro/pocket
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from repro.core.errors import UserError, unknown
from repro.core.files import ROOT, atomic, sha256, write_text
from repro.models import graphs
from repro.train.corpus import cached_ids
from repro.train.pocket_config import Architecture, PocketConfig, TrainingSettings, load_config

POCKET = ROOT / "repro" / "pocket"


# --- model, schedule, batches -----------------------------------------------------------------------------------------


def llama_config(architecture: Architecture, layers: int, vocab: int) -> LlamaConfig:
    """The Hugging Face configuration of a pocket model."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=architecture.hidden,
        intermediate_size=architecture.ffn,
        num_hidden_layers=layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.kv_heads,
        head_dim=architecture.head_size,
        max_position_embeddings=architecture.context,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        attn_implementation="sdpa",
    )


def learning_rate(step: int, steps: int, training: TrainingSettings) -> float:
    """Warm-up, constant, linear decay to zero."""
    warmup = max(1, round(training.warmup_share * steps))
    decay = max(1, round(training.decay_share * steps))
    return training.learning_rate * min((step + 1) / warmup, 1.0, (steps - step) / decay)


def length_at(step: int, steps: int, training: TrainingSettings) -> int:
    """Context length of a step: short, then long for the last share of the tokens."""
    return training.long_length if step >= steps - round(training.long_share * steps) else training.length


def batch_starts(step: int, length: int, total: int, training: TrainingSettings) -> np.ndarray:
    """Start positions of the windows of a step, `[batch_tokens / length]`: a fresh permutation and offset per epoch."""
    rows = training.batch_tokens // length
    windows = (total - 1 - length) // length
    per_epoch = windows // max(rows, 1)
    if rows < 1 or per_epoch < 1:
        raise UserError(f"a corpus of {total} tokens has no batch of {rows} windows of {length}; name a longer one")
    epoch, batch = divmod(step, per_epoch)
    random = np.random.default_rng([training.seed, length, epoch])
    offset = random.integers(length)
    order = random.permutation(windows)[batch * rows : (batch + 1) * rows]
    return order * length + offset


# --- the run ----------------------------------------------------------------------------------------------------------


def pretrain(
    name: str,
    tokens: torch.Tensor,
    config: PocketConfig,
    out: Path,
    device: str,
    stop_after_s: float = math.inf,
    peak_tflops: float = 790.0,
    compiled: bool = True,
    tokens_to_see: int | None = None,
    checkpoint_every_s: float = 300.0,
) -> dict:
    """Train `name` on the ids `tokens`; write `out/name/` (checkpoint, log, and at the end the model in bf16).

    Args:
        name: one of `config.models`.
        tokens: 1-D integer ids of the whole corpus.
        stop_after_s: save a checkpoint and return after that many seconds; the next call continues.
        peak_tflops: the device's own measured bf16 matmul rate, for the MFU figure.
        tokens_to_see: another budget than the config's, for tests and sweeps.
        checkpoint_every_s: seconds of work that are lost at most when the process is killed.

    Returns:
        The log: settings, losses per 50 steps, tokens/s, MFU, seconds, process starts, `done`.

    Raises:
        UserError: a corpus shorter than a batch, or a loss that is not finite.
    """
    training = config.training
    steps = (tokens_to_see or config.models[name].tokens) // training.batch_tokens
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    model = _initial_model(config, config.models[name].layers).to(device).train()
    optimizer = _optimizer(model, training)
    checkpoint = folder / "checkpoint.safetensors"
    state = _starting_state(checkpoint, model, optimizer)
    step_loss = _loss_function(model, compiled)
    tokens = tokens.to(device)
    started = saved = time.perf_counter()
    warm = None  # steps and time at the first log, before which kernels are compiled
    running = torch.zeros((), device=device)
    bar = tqdm(range(state["step"], steps), initial=state["step"], total=steps, desc=name, mininterval=10)
    step = state["step"]
    for step in bar:
        windows = _windows(tokens, step, steps, training)
        graphs.set_rate(optimizer, learning_rate(step, steps, training))
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            loss = step_loss(windows[:, :-1], windows[:, 1:])
        _update(model, optimizer, loss, training)
        running += loss.detach()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            value = _finite(float(running) / ((step + 1) % 50 or 50), name, step)
            state["losses"].append([step + 1, round(value, 4)])
            running.zero_()
            if warm is None:
                warm = (step + 1, time.perf_counter())
            bar.set_postfix(loss=f"{value:.3f}")
            ended = time.perf_counter()
            if ended - started > stop_after_s:
                break
            if ended - saved > checkpoint_every_s and step + 1 < steps:
                so_far = state | {"step": step + 1, "seconds": state["seconds"] + ended - started}
                save_checkpoint(checkpoint, model, optimizer, so_far)
                saved = ended
    done = step + 1 >= steps
    state["step"] = step + 1
    state["seconds"] += time.perf_counter() - started
    count = sum(p.numel() for p in model.parameters())
    log = _settings(name, config, steps, count, device) | {"corpus_tokens": len(tokens), "done": done} | state
    if warm is not None and step + 1 > warm[0]:
        tokens_per_s = (step + 1 - warm[0]) * training.batch_tokens / (time.perf_counter() - warm[1])
        log |= _speed(tokens_per_s, _flops_per_token(config, config.models[name].layers, count), peak_tflops)
    if done:
        _save_model(folder / "model", model, checkpoint)
    else:
        save_checkpoint(checkpoint, model, optimizer, state)
    write_text(folder / "log.json", json.dumps(log, indent=1) + "\n")
    return log


def _initial_model(config: PocketConfig, layers: int) -> LlamaForCausalLM:
    """A Llama with initial weights of the configured seed; layers that write to the residual stream start smaller.

    As in GPT-2, these are scaled by 1 / √(2 layers).
    """
    torch.manual_seed(config.training.seed)
    model = LlamaForCausalLM(llama_config(config.architecture, layers, config.tokenizer.vocab))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * layers) ** -0.5)
    return model


def _optimizer(model: LlamaForCausalLM, training: TrainingSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, and none on vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        fused=True,
    )


def _starting_state(checkpoint: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    """The loop's state at the beginning, or from a checkpoint, which also sets the model and the optimizer."""
    state = {"step": 0, "seconds": 0.0, "starts": 0, "losses": []}
    if checkpoint.exists():
        state = load_checkpoint(checkpoint, model, optimizer)
    state["starts"] += 1
    return state


def _loss_function(model: LlamaForCausalLM, compiled: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function of token ids `[B, L]` and the tokens that follow them, `[B, L]`: the mean cross entropy in nats."""

    def loss_of(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return torch.compile(loss_of, dynamic=False) if compiled else loss_of


def _windows(tokens: torch.Tensor, step: int, steps: int, training: TrainingSettings) -> torch.Tensor:
    """The ids of a step, int64 `[B, L + 1]`: a window's inputs and, one further, its targets."""
    length = length_at(step, steps, training)
    starts = torch.from_numpy(batch_starts(step, length, len(tokens), training)).to(tokens.device)
    return tokens[starts[:, None] + torch.arange(length + 1, device=tokens.device)].long()


def _update(
    model: LlamaForCausalLM, optimizer: torch.optim.AdamW, loss: torch.Tensor, training: TrainingSettings
) -> None:
    """A step of the optimizer along the clipped gradient of a loss."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _finite(loss: float, name: str, step: int) -> float:
    """The mean loss since the last log.

    Raises:
        UserError: it is not finite.
    """
    if not math.isfinite(loss):
        raise UserError(f"{name}: the loss is {loss} at step {step + 1}; lower the learning rate")
    return loss


def _save_model(folder: Path, model: LlamaForCausalLM, checkpoint: Path) -> None:
    """Write a trained model in bf16 and delete its checkpoint."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder, max_shard_size="15MB")
    checkpoint.unlink(missing_ok=True)


def _settings(name: str, config: PocketConfig, steps: int, count: int, device: str) -> dict[str, Any]:
    """What a log says of the settings of a run of `steps` steps of a model with `count` parameters."""
    args = config.models[name]
    tokens = steps * config.training.batch_tokens
    return {
        "model": name,
        "parameters": count,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_parameter": round(tokens / count, 1),
        "architecture": asdict(config.architecture) | {"layers": args.layers, "tokens": args.tokens},
        "training": asdict(config.training),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "versions": {"torch": torch.__version__},
    }


def _flops_per_token(config: PocketConfig, layers: int, count: int) -> int:
    """Operations of a training step per token: 6 for each parameter (a tied head counts once), and causal attention."""
    return 6 * count + 6 * layers * config.training.length * config.architecture.hidden


def _speed(tokens_per_s: float, flops_per_token: int, peak_tflops: float) -> dict[str, float]:
    """Tokens a second, and the share of the device's rate that they use (MFU)."""
    mfu = tokens_per_s * flops_per_token / (peak_tflops * 1e12)
    return {"tokens_per_s": round(tokens_per_s), "mfu": round(mfu, 4)}


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, state: dict) -> None:
    """Model, both moments and the loop's state in one safetensors file."""
    tensors = {}
    for key, parameter in model.named_parameters():
        for part, tensor in {"model": parameter, **optimizer.state[parameter]}.items():
            tensors[f"{part}/{key}"] = tensor.detach().cpu().contiguous()
    with atomic(path) as temporary:
        save_file(tensors, temporary, {"state": json.dumps(state)})


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> dict:
    """Restore what `save_checkpoint` wrote; returns the loop's state."""
    with safe_open(path, "pt") as file:
        for key, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"model/{key}"))
            moments = {m: file.get_tensor(f"{m}/{key}").to(parameter.device) for m in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = moments
        return json.loads(file.metadata()["state"])


def check_folder(folder: Path) -> None:
    """Raise where the folder of a training holds something, but neither a checkpoint nor a log of one.

    Raises:
        UserError: it does; nothing in it is overwritten.
    """
    ours = _is_checkpoint(folder / "checkpoint.safetensors") or _is_log(folder / "log.json")
    if os.path.lexists(folder) and not ours and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"--out: {folder} exists and holds no training of this command; choose another folder")


def _is_checkpoint(path: Path) -> bool:
    """Whether a file is one that `save_checkpoint` wrote, by its header."""
    try:
        with safe_open(path, "pt") as file:
            return "step" in json.loads((file.metadata() or {})["state"])
    except Exception:  # safetensors has its own kinds
        return False


def _is_log(path: Path) -> bool:
    """Whether a file is a log that `pretrain` wrote."""
    try:
        return {"model", "steps", "done"} <= set(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False


def install(out: Path | str, folder: Path = POCKET) -> list[str]:
    """Copy the trained models of `out` to `folder`: weights, training log, tokenizer links, hashes.

    The old weights and `card.json` of a model go, so that `python -m repro card` measures the new one.

    Returns:
        The names of the models that were installed.

    Raises:
        UserError: no model in `out` was trained to its end.
    """
    logs = [path for path in sorted(Path(out).glob("*/log.json")) if json.loads(path.read_text())["done"]]
    if not logs:
        raise UserError(f"{out}: no pocket model there that was trained to its end; train one with: pretrain NAME")
    for log in logs:
        model_folder = folder / log.parent.name
        model_folder.mkdir(parents=True, exist_ok=True)
        for old in [*model_folder.glob("*.safetensors*"), model_folder / "card.json"]:
            old.unlink(missing_ok=True)
        for new in sorted((log.parent / "model").glob("*")):
            if new.name == "config.json" or "safetensors" in new.name:
                shutil.copyfile(new, model_folder / new.name)
        shutil.copyfile(log, model_folder / "training-log.json")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (model_folder / name).is_symlink():
                (model_folder / name).symlink_to(Path("..") / "tokenizer" / name)
    listed = [*folder.glob("*/*.safetensors"), folder / "tokenizer" / "tokenizer.json"]
    lines = sorted(f"{path.relative_to(folder)}" for path in listed)
    write_text(folder / "SHA256SUMS", "".join(f"{sha256(folder / line)}  {line}\n" for line in lines))
    return [log.parent.name for log in logs]


def command(
    name: str,
    corpus: Path | None,
    out: Path,
    device: str = "cuda",
    stop_after_s: float = math.inf,
    seed: int | None = None,
) -> dict:
    """Train a model of config/pocket-models.yaml, as the command line asks; returns the log.

    Raises:
        UserError: unknown model, no corpus, or no CUDA device where one is asked for.
    """
    config = load_config()
    if name not in config.models:
        raise unknown("pocket model", name, config.models)
    config = config.of(name, **({} if seed is None else {"seed": seed}))
    data = os.environ.get("REPRO_DATA")
    corpus = corpus or (Path(data) / "corpus" if data else None)
    if corpus is None:
        raise UserError("pretrain: name the folder of the training shards with --corpus, or set REPRO_DATA")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("pretrain: this machine has no CUDA device; --device cpu trains, slowly")
    check_folder(out / name)
    ids = torch.from_numpy(cached_ids(corpus, out, config.training.wikitext_every))
    return pretrain(name, ids, config, out, device, stop_after_s)
