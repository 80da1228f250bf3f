"""Activation sparsity a second time: a Llama token by token in float64, masks applied where the equations have them.

Nothing of `repro.methods.spqt` is used here.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

Mask = Callable[[str, int, np.ndarray], np.ndarray]


def masked(thresholds: Mapping[str, float], first: int) -> Mask:
    """x_i where |x_i| is above the layer's threshold, else 0, at positions from `first` on."""

    def mask(name: str, position: int, x: np.ndarray) -> np.ndarray:
        if position < first:
            return x
        return np.asarray([v if np.float32(abs(v)) > thresholds[name] else 0.0 for v in x])

    return mask


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / math.sqrt(float(x @ x) / len(x) + eps)


def turned(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE of one head, pairs (i, i + half)."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        angle = position * theta ** (-i / half)
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def nll(weights: Mapping[str, np.ndarray], config, ids: list[int], mask: Mask) -> float:
    """Mean negative log likelihood of ids[1:] in one window."""
    H, G, D = config.num_attention_heads, config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    keys = [[] for _ in range(config.num_hidden_layers)]
    values = [[] for _ in range(config.num_hidden_layers)]
    losses = []
    for t, token in enumerate(ids[:-1]):
        h = weights["model.embed_tokens.weight"][token]
        for b in range(config.num_hidden_layers):
            base = f"model.layers.{b}"

            def times(name: str, x: np.ndarray, base: str = base, t: int = t) -> np.ndarray:
                return weights[f"{base}.{name}.weight"] @ mask(f"{base}.{name}", t, x)

            x = rms(h, weights[f"{base}.input_layernorm.weight"], eps)
            q, k, v = (times(f"self_attn.{n}_proj", x).reshape(-1, D) for n in "qkv")
            keys[b].append([turned(one, t, theta) for one in k])
            values[b].append(v)
            heads = []
            for i in range(H):
                turned_q, group = turned(q[i], t, theta), i // (H // G)
                scores = np.asarray([turned_q @ past[group] for past in keys[b]]) / math.sqrt(D)
                share = np.exp(scores - scores.max())
                heads.append(sum(p * past[group] for p, past in zip(share / share.sum(), values[b])))
            h = h + times("self_attn.o_proj", np.concatenate(heads))
            x = rms(h, weights[f"{base}.post_attention_layernorm.weight"], eps)
            gate, up = times("mlp.gate_proj", x), times("mlp.up_proj", x)
            h = h + times("mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        logits = weights["lm_head.weight"] @ rms(h, weights["model.norm.weight"], eps)
        top = logits.max()
        losses.append(top + math.log(np.exp(logits - top).sum()) - logits[ids[t + 1]])
    return float(np.mean(losses))


def quantile(x: np.ndarray, s: float) -> float:
    """TEAL's threshold by its definition: 10,000 bins filled one value at a time, the inverse CDF at 0.5 + s/2."""
    values = sorted(float(v) for v in x.ravel())
    n = len(values)
    low, high = values[n // 100], values[n - n // 100]
    edges = [values[0], *(low + i * (high - low) / 9998 for i in range(9999)), values[-1]]
    counts, i = [0] * 10_000, 0
    for v in values:
        while i < 9_999 and v >= edges[i + 1]:
            i += 1
        counts[i] += 1
    wanted, total, before = (0.5 + s / 2) * n, 0, 0
    for i, count in enumerate(counts):
        before, total = total, total + count
        if total >= wanted:
            last, here = ((edges[j] + edges[j + 1]) / 2 for j in (i - 1, i))
            return last + (wanted - before) / (total - before) * (here - last)
    raise AssertionError


def search(error, sizes: dict[str, int], target: float, step: float) -> dict[str, float]:
    """Algorithm 1 of TEAL as a log of rows: all rows until the target is passed, then the row nearest to it."""
    unit = next(iter(sizes.values()))
    rows = [dict.fromkeys(sizes, 0)]  # in steps

    def at(row):
        return {name: step * unit / sizes[name] * count for name, count in row.items()}

    def mean(row):
        return sum(at(row)[name] * size for name, size in sizes.items()) / sum(sizes.values())

    while mean(rows[-1]) < target - 1e-12:
        full = at(rows[-1])
        tried = [{**rows[-1], name: rows[-1][name] + 1} for name in sizes if full[name] < 1 - 1e-9]
        rows.append(min(tried, key=lambda row: error(at(row))))
    return at(min(rows, key=lambda row: abs(mean(row) - target)))
