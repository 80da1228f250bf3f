"""Zero-shot: prompts letter by letter, scores against a slow loop and lm-eval's own path, floors, and no socket."""

import copy
import io
import json
import math
import os
import re
import shutil
import socket
import sys
import tarfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import numpy as np
import pytest
import small_models
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from repro import models as known_models
from repro.__main__ import main
from repro.core.errors import UserError
from repro.core.files import sha256
from repro.data import requests, task_scores, tasks
from repro.jobs import requests as stored
from repro.jobs.target import Target
from repro.metrics import zeroshot as kind
from repro.models import loglikelihood
from repro.specs import scale as scales
from repro.store import accepted
from repro.store.observations import Observations, Series

# What stands in a mirror's files, a few records of each format.
FILES = {
    "raw/piqa_valid.jsonl": [
        {"goal": "dry a cup", "sol1": "use a towel ", "sol2": "use a fork"},
        {"goal": "Where do I sit?", "sol1": "on a lamp, é", "sol2": "on a chair"},
    ],
    "raw/piqa_valid-labels.lst": "0\n1\n",
    "arc_easy.jsonl": [
        {"query": "Question: Which falls?", "choices": ["a stone", "light", "a song", "time"], "gold": 0},
        {"query": "Question: Sound is", "choices": ["fast", "slow", "fast", "dark"], "gold": 2},  # three, padded
    ],
    "arc_challenge.jsonl": [
        {"query": "Question: An ape is", "choices": ["a plant", "a mammal", "a fish", "salt"], "gold": 1},
        {"query": "Question: Ice is", "choices": ["wet", "cold", "wet", "old"], "gold": 0},
    ],
    "hellaswag_val_1916.jsonl": [
        {"ind": 4, "query": "Vault: She runs. A man", "choices": ["sits.", "jumps.", "sings.", "eats."], "gold": 3},
        {"ind": 9, "query": "Tea: Boil it. Then", "choices": [" pour.", "wait a day.", "go.", "see."], "gold": 0},
    ],
    "winogrande.jsonl": [
        {"context_options": ["Ann met Eve so Ann", "Ann met Eve so Eve"], "continuation": "spoke.", "gold": 1},
        {"context_options": ["The cup, not the cat", "The cup, not the cup"], "continuation": ".", "gold": 0},
    ],
    "boolq.jsonl": [
        {"query": "Passage: Tin is a metal.\nQuestion: is tin a metal?", "choices": ["no", "yes"], "gold": 1},
        {"query": "Passage: A\nQuestion: B?\nQuestion: is tin tin?", "choices": ["no", "yes"], "gold": 0},
    ],
    "math_qa.jsonl": [
        {"query": "Question: 2 and 2 ?\nA. 4\nB. 5 %\nC. none\nD. 1,0\nAnswer: ", "choices": [*"ABCD"], "gold": 0},
        {"query": "Question: a\nor b ?\nA. a\nB. b\nC. c d\nD. 2\nAnswer: ", "choices": [*"ABCD"], "gold": 3},
    ],
    "blimp-100.jsonl": [
        {"sentence_good": "Ann sees herself.", "sentence_bad": "Ann sees himself.", "UID": "anaphor_gender_agreement"},
        {"sentence_good": "Who left?", "sentence_bad": "Left who?", "UID": "adjunct_island"},
    ],
    "raw/lambada_test.jsonl": [{"text": "He had a dog.\n\n“Come,” he said to the dog"}, {"text": "a b c"}],
}
SUBJECTS = ("anatomy", "high_school_physics", "virology")


def csv(start: int, count: int) -> str:
    rows = [f'"How much is {i}, and 1? ",{i},{i + 1},"{i},5",none,1' for i in range(start, start + count)]
    return "\n".join(["question,choice0,choice1,choice2,choice3,answer", *rows]) + "\n"


@pytest.fixture(scope="module")
def small_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "zeroshot/raw").mkdir(parents=True)
    for name, content in FILES.items():
        text = content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content)
        (folder / "zeroshot" / name).write_text(text, encoding="utf-8")
    (folder / "corpus").mkdir()
    paragraphs = []
    for word in ("sun", "rain", "ice", "fog", "sea"):
        paragraphs.append(" ".join(f"{word}{i}" for i in range(61)))
    (folder / "corpus/valid.txt").write_text("\n\n".join(["\n".join(paragraphs)] * 2), encoding="utf-8")
    with tarfile.open(folder / "zeroshot/raw/mmlu.tar.xz", "w:xz") as archive:
        for subject in SUBJECTS:
            for split, text in (("dev", csv(100, 5)), ("test", csv(1, 4))):
                member = tarfile.TarInfo(f"mmlu/{split}/{subject}_{split}.csv")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return folder


def at_home(monkeypatch, folder: Path, *names: str, **changes) -> None:
    """Tasks stand for the files that `folder` has, with other changes to their entries."""
    for name in names:
        task = tasks.TASKS[name]
        files = {file: sha256(folder / file) for file in task.files}
        monkeypatch.setitem(tasks.TASKS, name, replace(task, files=files, **changes))


@pytest.fixture
def small(small_files, monkeypatch) -> Path:
    at_home(monkeypatch, small_files, *tasks.TASKS)
    at_home(monkeypatch, small_files, "mmlu-10", draw=3)
    return small_files


@pytest.fixture(params=["small", "mirror"])
def data(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def bytewise() -> PreTrainedTokenizerFast:
    """One token a byte, `<s>` = 0 and `</s>` = 1, which adds `<s>` by itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", *alphabet])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def llama(context: int = 8192) -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=258, max_position_embeddings=context, initializer_range=0.3, **shape)
    return LlamaForCausalLM(config).eval()


def records(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for _, line in zip(range(3), lines)]


def by_hand(task: str, data: Path) -> list[tuple[list[tuple[str, str]], int | None]]:
    """The first items of a task as its README describes them: ((prompt, answer) per choice, index of the right one)."""
    folder, items = data / "zeroshot", []
    if task == "piqa":
        labels = (folder / "raw/piqa_valid-labels.lst").read_text().split()
        for r, label in zip(records(folder / "raw/piqa_valid.jsonl"), labels):
            prompt = f"Question: {r['goal']}\nAnswer:"
            items.append(([(prompt, f" {r[key]}") for key in ("sol1", "sol2")], int(label)))
    elif task.startswith("arc"):
        for r in records(folder / f"{task}.jsonl"):
            texts = [t for i, t in enumerate(r["choices"]) if t not in r["choices"][i + 1 :]]
            gold = texts.index(r["choices"][r["gold"]])
            items.append(([(f"{r['query']}\nAnswer:", f" {t}") for t in texts], gold))
    elif task == "hellaswag-1916":
        for r in records(folder / "hellaswag_val_1916.jsonl"):
            items.append(([(r["query"], f" {t}") for t in r["choices"]], r["gold"]))
    elif task == "winogrande":
        for r in records(folder / "winogrande.jsonl"):
            items.append(([(c, f" {r['continuation']}") for c in r["context_options"]], r["gold"]))
    elif task == "boolq":
        for r in records(folder / "boolq.jsonl"):
            prompt = r["query"].removeprefix("Passage: ") + "\nAnswer:"
            items.append(([(prompt, " no"), (prompt, " yes")], r["gold"]))
    elif task == "mathqa-4":
        for r in records(folder / "math_qa.jsonl"):
            question, *texts = re.split(r"\n[A-D]\. ", r["query"].removesuffix("\nAnswer: "))
            items.append(([(f"{question}\nAnswer:", f" {text}") for text in texts], r["gold"]))
    elif task == "lambada_openai":
        for r in records(folder / "raw/lambada_test.jsonl"):
            head, _, last = r["text"].rpartition(" ")
            items.append(([(head, f" {last}")], None))
    return items


SMALL_MMLU = "The following are multiple choice questions (with answers) about high school physics.\n\n"
for number, letter in (*((i, " B\n\n") for i in range(100, 105)), (1, "")):
    SMALL_MMLU += f"How much is {number}, and 1?\nA. {number}\nB. {number + 1}\nC. {number},5\nD. none\nAnswer:{letter}"
REAL_MMLU = (
    "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
    "Find all c in Z_3 such that Z_3[x]/(x^2 + c) is a field.\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: B\n\n"
    "Statement 1 | If aH is an element of a factor group, then |aH| divides |a|. Statement 2 | ",
    "\n\nFind the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.\n"
    "A. 0\nB. 4\nC. 2\nD. 6\nAnswer:",
)


def pairs_of_lm_eval(task: str, data: Path, limit: int) -> dict[str, list[list[tuple[str, str]]]]:
    """What lm-eval will ask, by its task name: per item the (prompt, answer) pairs."""
    result = {}
    for name, (_, _, loaded) in requests.load_shipped(tasks.TASKS[task], data, limit).items():
        loaded.build_all_requests(rank=0, world_size=1)
        items: dict[int, list] = {}
        for instance in loaded.instances:
            items.setdefault(instance.doc_id, []).append(instance.args)
        result[name] = list(items.values())
    return result


MMLU = ("mmlu", "mmlu-10")
BY_HAND_ELSEWHERE = ("blimp-100", "cloze-far", "cloze-near")  # test_likelihood.py
OTHERS = [name for name in tasks.TASKS if name not in (*MMLU, *BY_HAND_ELSEWHERE)]


@pytest.mark.parametrize("task", OTHERS)
def test_prompts_are_the_shipped_ones(task, data):
    want = by_hand(task, data)
    assert pairs_of_lm_eval(task, data, len(want)) == {tasks.TASKS[task].shipped: [pairs for pairs, _ in want]}


def test_a_prompt_letter_by_letter(small):
    result = [pairs_of_lm_eval(task, small, 1)[task][0] for task in ("piqa", "winogrande", "boolq", "lambada_openai")]
    assert result == [
        [("Question: dry a cup\nAnswer:", " use a towel "), ("Question: dry a cup\nAnswer:", " use a fork")],
        [("Ann met Eve so Ann", " spoke."), ("Ann met Eve so Eve", " spoke.")],
        [("Tin is a metal.\nQuestion: is tin a metal?\nAnswer:", answer) for answer in (" no", " yes")],
        [("He had a dog.\n\n“Come,” he said to the", " dog")],
    ]
    assert pairs_of_lm_eval("arc_easy", small, 2)["arc_easy"][1] == [
        ("Question: Sound is\nAnswer:", f" {choice}") for choice in ("slow", "fast", "dark")
    ]


def test_mmlu_prompt_has_five_examples_of_its_subject(small):
    result = pairs_of_lm_eval("mmlu", small, 3)
    assert list(result) == [f"mmlu_{subject}" for subject in SUBJECTS]
    assert result["mmlu_high_school_physics"] == [[(SMALL_MMLU, f" {letter}") for letter in "ABCD"]]


def test_mmlu_prompt_of_the_mirror(mirror):
    result = pairs_of_lm_eval("mmlu", mirror, 114)
    assert len(result) == 57 and {len(items) for items in result.values()} == {2}
    (prompt, answer), *_ = result["mmlu_abstract_algebra"][0]
    assert prompt.startswith(REAL_MMLU[0]) and prompt.endswith(REAL_MMLU[1]) and answer == " A"
    assert prompt.count("\nAnswer: ") == 5


@pytest.mark.parametrize(("limit", "counts"), [(1, [0, 0, 1]), (4, [1, 1, 2]), (6, [2, 2, 2]), (100, [4, 4, 4])])
def test_a_limit_takes_subjects_evenly(limit, counts, small):
    result = pairs_of_lm_eval("mmlu", small, limit)
    assert [len(result.get(f"mmlu_{subject}", [])) for subject in SUBJECTS] == counts


def test_a_draw_is_of_the_whole_set_and_always_the_same(small, bytewise):
    whole, drawn, again = (requests.build(name, small, bytewise) for name in ("mmlu", "mmlu-10", "mmlu-10"))
    assert (len(whole.number), len(drawn.number)) == (12, 9)
    assert np.array_equal(drawn.number, again.number) and set(drawn.number.tolist()) <= set(range(4))
    every = {(s, n): g for s, n, g in zip(whole.subject, whole.number, whole.gold)}
    assert all(every[s, n] == g for s, n, g in zip(drawn.subject, drawn.number, drawn.gold))
    assert len({tuple(drawn.number[drawn.subject == s]) for s in range(3)}) > 1, "a draw of its own for each subject"


def test_the_chance_of_ten_items_a_subject_is_that_of_the_commonest_answer(mirror):
    subjects = tasks.items(tasks.TASKS["mmlu-10"], mirror)
    gold = []
    for splits in subjects.values():
        gold += [record["answer"] for _, record in splits["test"]]
    assert (len(subjects), len(gold)) == (57, 570)
    assert tasks.TASKS["mmlu-10"].chance == pytest.approx(max(map(gold.count, range(4))) / 570)


def slow_loglik(model, tokenizer, prompt: str, answer: str, bos: bool) -> tuple[float, bool]:
    """One pair alone, in float64, token after token: (sum of log p, is every token the likeliest)."""
    head, whole = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, prompt + answer))
    head, whole = [0] * bos + head, [0] * bos + whole
    logp, greedy = 0.0, True
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    for position in range(len(head), len(whole)):
        logp += scores[position - 1, whole[position]].item()
        greedy &= scores[position - 1].argmax().item() == whole[position]
    return logp, greedy


def answered(model, tokenizer, names, data, limit=None, tokens=4096, bos=None):
    """The rows of our own path, one an item."""
    return task_scores.run(model, [requests.build(name, data, tokenizer, limit, bos) for name in names], tokens)


@pytest.mark.parametrize("bos", [True, False])
def test_scores_agree_with_a_slow_loop(bos, data, bytewise):
    model = llama()
    frame = answered(model, bytewise, OTHERS, data, limit=3, tokens=512, bos=bos)
    model = model.double()
    assert not frame["truncated"].any() and set(frame["task"]) == set(OTHERS)
    for row in frame.itertuples():
        pairs, gold = by_hand(row.task, data)[row.number]
        want, greedy = zip(*(slow_loglik(model, bytewise, *pair, bos) for pair in pairs))
        assert row.logliks == pytest.approx(want, rel=1e-4)
        if gold is None:
            assert row.correct == row.acc == greedy[0]
            continue
        # lm-eval normalises by characters of the answer, without the blank between prompt and answer
        norm = [value / len(answer[1:]) for value, (_, answer) in zip(want, pairs)]
        assert row.acc == (want.index(max(want)) == gold)
        if tasks.TASKS[row.task].metric == "acc_norm":
            assert row.correct == row.acc_norm == (norm.index(max(norm)) == gold)
        else:
            assert row.correct == row.acc


def test_mmlu_scores_agree_with_a_slow_loop(small, bytewise):
    model = llama()
    frame = answered(model, bytewise, ["mmlu"], small, limit=3)
    row = frame[frame["subject"] == "high_school_physics"].iloc[0]
    model = model.double()
    want = [slow_loglik(model, bytewise, SMALL_MMLU, f" {letter}", True)[0] for letter in "ABCD"]
    assert row["logliks"] == pytest.approx(want, rel=1e-4)
    assert row["correct"] == (want.index(max(want)) == 1)
    assert list(frame["subject"]) == list(SUBJECTS) and list(frame["number"]) == [0, 0, 0]


class Harness(HFLM):
    """lm-eval's own path, with BOS as we say it."""

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids = self.tokenizer.encode(string, add_special_tokens=False)
        return [self.tokenizer.bos_token_id] * (self.bos and add_special_tokens is not False) + ids


def lm_evals_own(model, tokenizer, task, data, limit):
    """Per item of lm-eval's evaluate: log likelihoods and whether it is correct, in its order."""
    loaded = {name: one for name, (_, _, one) in requests.load_shipped(tasks.TASKS[task], data, limit).items()}
    with requests.offline():
        harness = Harness(
            pretrained=model, tokenizer=tokenizer, batch_size=4, backend="causal", softmax_dtype="float32"
        )
        harness.bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        samples = lm_eval.evaluate(harness, {"tasks": loaded}, bootstrap_iters=0)["samples"]
    every = list(chain.from_iterable(sorted(samples[name], key=lambda sample: sample["doc_id"]) for name in loaded))
    logliks = []
    for sample in every:
        logliks.append([loglik for loglik, _ in sample["filtered_resps"]])
    return logliks, [int(sample[tasks.TASKS[task].metric]) for sample in every]


@pytest.fixture(scope="module")
def pocket():
    return known_models.load("pocket-3m", "cpu", "float32"), known_models.tokenizer("pocket-3m")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_same_as_lm_evals_own_path(task, data, pocket, monkeypatch):
    """Prompts, items, log likelihoods to 1e-4 and what is right, for every task; two items a subject share examples."""
    model, tokenizer = pocket
    few, limit = {s: splits for s, splits in list(tasks.items(tasks.TASKS[task], data).items())[:3]}, 4
    if task in MMLU:
        limit = 6
        monkeypatch.setattr(requests, "items", lambda *_: copy.deepcopy(few))  # of 57 in the mirror
    frame = answered(model, tokenizer, [task], data, limit, tokens=1024)
    logliks, right = lm_evals_own(model, tokenizer, task, data, limit)
    assert len(frame) == len(logliks) > 0 and frame["correct"].tolist() == right
    for ours, theirs in zip(frame["logliks"], logliks):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-4)


def qwen2():
    """A Qwen2 with a window of 32 ids in the second layer."""
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**small_models.SHAPE, **window))


def llama4():
    """A Llama 4 whose first layer sees chunks of 32 ids."""
    kinds = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 32}
    experts = {"intermediate_size_mlp": 128, "num_local_experts": 2, "head_dim": 32, "no_rope_layers": [1, 0]}
    return Llama4ForCausalLM(
        Llama4TextConfig(**small_models.SHAPE | {"tie_word_embeddings": False}, **experts, **kinds)
    )


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def gpt_neo():
    """A GPT-Neo whose second layer sees 32 ids."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 512}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": 32, "initializer_range": 0.08}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds, bos_token_id=0, eos_token_id=1))


def phi3_longrope():
    """A Phi-3 that rotates by other frequencies as soon as a row of its batch has more than 32 ids."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    options = {"pad_token_id": 1, "original_max_position_embeddings": 32, "rope_parameters": rope}
    return Phi3ForCausalLM(Phi3Config(**small_models.SHAPE | options))


def mpt():
    """An MPT, which knows where an id is from the order of ids alone (ALiBi)."""
    sizes = {"vocab_size": 4096, "d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 512}
    return MptForCausalLM(MptConfig(**sizes, initializer_range=0.08))


def bloom():
    """A BLOOM, whose ALiBi is made from a mask of ids `[B, T]`."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.08}
    return BloomForCausalLM(BloomConfig(**sizes, bos_token_id=0, eos_token_id=1))


NOT_SHARED = {
    "mistral": lambda: small_models.mistral(32), "qwen2": qwen2, "llama4": llama4, "gpt_neo": gpt_neo,
    "phi3-longrope": phi3_longrope, "mpt": mpt, "bloom": bloom,
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SHARED)
def test_what_a_model_cannot_share_is_not_shared(name):
    """Long answers behind long prompts with a shared beginning: log likelihoods as lm-eval's HFLM gives them.

    A window is shorter than prompt and answers, or positions are not what `position_ids` says.
    """
    torch.manual_seed(0)
    model, drawn = NOT_SHARED[name]().eval(), np.random.default_rng(0)
    prefix = drawn.integers(2, 4096, size=40)
    rows, pairs = [], []
    for length, counts in ((5, (30, 1, 20)), (60, (8, 40, 25)), (25, (50,))):
        prompt = drawn.integers(2, 4096, size=length)
        for count in counts:
            answer = drawn.integers(2, 4096, size=count)
            for document, before in ((-1, []), (0, prefix.tolist())):
                rows.append((document, np.concatenate([prompt, answer]).astype(np.int32), count))
                pairs.append((("", ""), before + prompt.tolist(), answer.tolist()))
    tokenizer = known_models.tokenizer("pocket-3m")
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, backend="causal", softmax_dtype="float32")
    wanted = harness._loglikelihood_tokens(pairs, disable_tqdm=True)
    for tokens in (64, 4096):
        logliks, greedy, cut = loglikelihood.score(model, [prefix.astype(np.int32)], rows, tokens)
        assert logliks == pytest.approx([loglik for loglik, _ in wanted], rel=1e-5, abs=1e-4)
        assert greedy.tolist() == [same for _, same in wanted] and not cut.any()


def test_packed_answers_do_not_scale_a_dynamic_rotary_embedding():
    """Each answer fits the context of 64 and all four side by side do not; none is scaled, as none is alone."""
    model, drawn = small_models.llama(max_position_embeddings=64, rope_parameters=DYNAMIC), np.random.default_rng(2)
    prompt = drawn.integers(2, 4096, size=20)
    rows = [(-1, np.concatenate([prompt, drawn.integers(2, 4096, size=30)]).astype(np.int32), 30) for _ in range(4)]
    wanted = []
    with torch.no_grad():
        for _, ids, count in rows:
            whole = torch.from_numpy(ids.astype(np.int64))[None]
            scores = model(whole[:, :-1]).logits[0, -count:].log_softmax(-1)
            wanted.append(scores.gather(1, whole[0, -count:, None]).sum().item())
    short = (-1, drawn.integers(2, 4096, size=20).astype(np.int32), 3)  # beside them it is padded
    assert loglikelihood.score(model, [], [*rows, short, short])[0][:4] == pytest.approx(wanted, rel=1e-5, abs=1e-4)


def test_answers_that_fit_the_window_are_still_packed(monkeypatch):
    """What is shared is run once where no layer forgets: also by a model with a window."""
    model, ran = small_models.mistral(128), []
    forward = model.forward

    def counted(*args, **words):
        ran.append(words["input_ids"].numel())
        return forward(*args, **words)

    monkeypatch.setattr(model, "forward", counted)
    prompt = np.arange(2, 52, dtype=np.int32)
    rows = [(-1, np.concatenate([prompt, np.arange(100, 100 + n, dtype=np.int32)]), n) for n in (10, 5, 8)]
    loglikelihood.score(model, [], rows)
    assert sum(ran) == 50 + 9 + 4 + 7
    model.config.sliding_window = 16
    ran.clear()
    loglikelihood.score(model, [], rows)
    assert sum(ran) == (50 + 9) * 3


def test_packed_answers_longer_than_a_window_that_each_fits():
    """Side by side they are longer than the window; each sees its prompt as if it were alone."""
    model, drawn = small_models.mistral(128), np.random.default_rng(1)
    prefix = drawn.integers(2, 4096, size=40).astype(np.int32)
    prompt = drawn.integers(2, 4096, size=30)
    rows = [(0, np.concatenate([prompt, drawn.integers(2, 4096, size=n)]).astype(np.int32), n) for n in (50, 40, 57, 1)]
    wanted = []
    with torch.no_grad():
        for _, ids, count in rows:
            whole = torch.from_numpy(np.concatenate([prefix, ids]).astype(np.int64))[None]
            scores = model(whole[:, :-1]).logits[0, -count:].log_softmax(-1)
            wanted.append(scores.gather(1, whole[0, -count:, None]).sum().item())
    assert loglikelihood.score(model, [prefix], rows)[0] == pytest.approx(wanted, rel=1e-5, abs=1e-4)


def test_answers_of_one_prompt_take_as_many_rows_as_fit_the_context(tiny_llama, monkeypatch):
    """BLiMP's sentences all follow the same empty prompt: one row of all had a mask of 72 GB."""
    drawn = np.random.default_rng(2)
    begin = np.zeros(1, dtype=np.int32)
    rows = [(-1, np.concatenate([begin, drawn.integers(256, size=12).astype(np.int32)]), 12) for _ in range(150)]
    forward, widths = tiny_llama.forward, []

    def watched(*args, **words):
        widths.append(words["input_ids"].shape[1])
        return forward(*args, **words)

    monkeypatch.setattr(tiny_llama, "forward", watched)
    logliks = loglikelihood.score(tiny_llama, [], rows, 4096)[0]
    assert max(widths) <= tiny_llama.config.max_position_embeddings == 512
    alone = [loglikelihood.score(tiny_llama, [], [row])[0][0] for row in rows[::30]]
    assert logliks[::30] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({}, math.inf),
        ({"sliding_window": None}, math.inf),
        ({"sliding_window": 64}, 64),
        ({"sliding_window": 64, "layer_types": ["full_attention"]}, math.inf),
        ({"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ({"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]}, 8),
        ({"layer_types": ["linear_attention", "full_attention"]}, 0),
        ({"attention_layers": ["global", "local"], "window_size": 256}, 256),
    ],
)
def test_how_many_ids_every_layer_sees(facts, seen):
    assert loglikelihood.seen_by_every_layer(SimpleNamespace(**facts)) == seen


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        (None, math.inf),
        ({"rope_type": "llama3", "original_max_position_embeddings": 8}, math.inf),
        ({"rope_type": "longrope", "original_max_position_embeddings": 8}, 8),
        ({"rope_type": "longrope"}, 64),
        ({"rope_type": "dynamic"}, 64),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}, 64),
    ],
)
def test_up_to_which_length_a_rotary_embedding_is_its_own(parameters, limit):
    config = SimpleNamespace(rope_parameters=parameters, max_position_embeddings=64)
    assert loglikelihood.unscaled_positions(config) == limit


def test_any_rows_in_any_batches(tiny_llama):
    """Prefixes, prompts with one and several answers of any length, prompts that are cut: all against one row alone."""
    drawn = np.random.default_rng(0)
    prefixes = [drawn.integers(256, size=n).astype(np.int32) for n in (40, 33)]
    rows = []
    for prefix in (-1, 0, 1, 0):
        for length in (1, 7, 30, 500):
            prompt = drawn.integers(256, size=length)
            for count in (1, 1, 3, 20):
                rows.append((prefix, np.concatenate([prompt, drawn.integers(256, size=count)]).astype(np.int32), count))
    rows.append(rows[3])  # given twice
    double, want = tiny_llama.double(), []
    with torch.no_grad():
        for prefix, ids, count in rows:
            ids = np.concatenate([prefixes[prefix], ids] if prefix >= 0 else [ids])[-513:]
            scores = double(torch.from_numpy(ids[None].astype(np.int64))[:, :-1]).logits[0].log_softmax(-1)[-count:]
            target = torch.from_numpy(ids[-count:].astype(np.int64))
            right = scores.gather(1, target[:, None]).sum().item()
            want.append((right, bool((scores.argmax(1) == target).all()), prefix >= 0 and len(ids) == 513))
    single = tiny_llama.float()
    for tokens in (1, 300, 100_000):
        logliks, greedy, cut = loglikelihood.score(single, prefixes, rows, tokens)
        assert logliks == pytest.approx([one[0] for one in want], rel=1e-4), tokens
        assert greedy.tolist() == [one[1] for one in want]
        assert cut[[i for i, (_, ids, _) in enumerate(rows) if len(ids) < 400]].sum() == 0
        assert {bool(cut[i]) for i, (prefix, ids, _) in enumerate(rows) if prefix >= 0 and len(ids) > 500} == {True}


def test_what_is_shared_is_run_once(small, bytewise, monkeypatch):
    """Five examples once a subject, a question once for four letters, a prompt once for its answers."""
    seen, model = [], llama()
    model.register_forward_pre_hook(lambda _, args, words: seen.append(words["input_ids"].numel()), with_kwargs=True)
    made = requests.build("mmlu", small, bytewise)
    task_scores.run(model, [made])
    alone = [len(ids) - 1 + len(made.prefixes[prefix]) for prefix, ids, _ in made.rows()]
    assert len(made.prefixes) == 3 and sum(seen) < sum(alone) / 12
    seen.clear()
    made = requests.build("hellaswag-1916", small, bytewise)
    task_scores.run(model, [made])
    assert sum(seen) < 0.6 * sum(len(ids) - 1 for _, ids, _ in made.rows())


def test_the_last_word_counts_when_it_is_the_greedy_one(tmp_path, bytewise, monkeypatch):
    """A model that always says blank, and a text that ends with two of them after one that ends with a letter."""
    (tmp_path / "zeroshot/raw").mkdir(parents=True)
    (tmp_path / "zeroshot/raw/lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "a  "}\n')
    at_home(monkeypatch, tmp_path, "lambada_openai")
    model = llama()
    model.lm_head = torch.nn.Linear(32, 258).requires_grad_(False)
    model.lm_head.weight.zero_()
    model.lm_head.bias.zero_()[bytewise.encode(" ")[1]] = math.log(257)
    frame = answered(model, bytewise, ["lambada_openai"], tmp_path)
    assert frame["correct"].tolist() == [0, 1]
    want = [[math.log(1 / 2) + math.log(1 / 514)], [2 * math.log(1 / 2)]]
    assert frame["logliks"].tolist() == [pytest.approx(logliks) for logliks in want]


def test_a_template_is_compiled_once_and_not_for_every_request(small, bytewise, monkeypatch):
    env, compiled = lm_eval.utils.env, []
    compile_ = env.compile
    monkeypatch.setattr(env, "compile", lambda text, *rest: compiled.append(text) or compile_(text, *rest))
    made = requests.build("mmlu", small, bytewise)
    assert len(made.number) == 12 > len(compiled) > 0 and "from_string" not in vars(env)


def test_no_socket_and_the_same_bytes_twice(small, tmp_path, bytewise, monkeypatch):
    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = dict(os.environ)
    frames = []
    for turn in ("one", "two"):
        for name in tasks.TASKS:
            requests.save(tmp_path / turn / f"{name}.safetensors", requests.build(name, small, bytewise, limit=2))
        read = [requests.load(tmp_path / turn / f"{name}.safetensors") for name in tasks.TASKS]
        frames.append(task_scores.run(llama(), read))
    assert dict(os.environ) == before
    assert frames[0].equals(frames[1])
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert str(small).encode() not in file.read_bytes()


def test_prompts_longer_than_the_context_are_counted(small, bytewise):
    frame = answered(llama(64), bytewise, ["piqa", "mmlu"], small, limit=3)
    assert frame.groupby("task")["truncated"].all().to_dict() == {"mmlu": True, "piqa": False}
    with pytest.raises(UserError, match="context only 8"):
        answered(llama(8), bytewise, ["piqa"], small)


def test_what_a_model_cannot_score_is_said(small, bytewise):
    model = llama()
    model.lm_head.weight.data[3, 0] = math.nan
    with pytest.raises(UserError, match="NaN or Inf"):
        answered(model, bytewise, ["piqa"], small)
    model.resize_token_embeddings(40)
    with pytest.raises(UserError, match="is not among the model's 40"):
        answered(model, bytewise, ["piqa"], small)


def answers(right: int, n: int) -> np.ndarray:
    return (np.arange(n) < right).astype(float)


@pytest.mark.parametrize(
    ("task", "right", "n", "status"),
    [
        ("piqa", 64, 100, "at_chance"),  # 14 points above chance, 3 errors are 15
        ("piqa", 66, 100, "ok"),
        ("boolq", 622, 1000, "at_chance"),  # always yes
        ("boolq", 680, 1000, "ok"),
        ("lambada_openai", 0, 100, "at_chance"),
        ("lambada_openai", 1, 100, "at_chance"),
        ("lambada_openai", 12, 100, "ok"),
        ("arc_easy", 2, 2, "at_chance"),  # all right, but of two
        ("arc_easy", 10, 100, "at_chance"),
    ],
)
def test_an_accuracy_within_the_noise_of_chance_is_at_chance(task, right, n, status):
    assert task_scores.at_chance({task: answers(right, n)}) == (status == "at_chance")


@pytest.mark.parametrize(("right", "floor"), [(68, True), (69, False)])
def test_the_floor_of_several_tasks_is_that_of_their_plain_mean(right, floor):
    """Chance is 0.375; three errors of the mean are 3 / 2 * sqrt(x (1 - x) / 100 + 0.26 * 0.74 / 100)."""
    share = right / 100
    error = max(share * (1 - share) + 0.26 * 0.74, 0.25 + 0.25 * 0.75)
    assert ((share + 0.26) / 2 - 0.375 <= 1.5 * math.sqrt(error / 100)) == floor
    assert task_scores.at_chance({"piqa": answers(right, 100), "arc_easy": answers(26, 100)}) == floor


def test_what_is_missing_or_wrong_is_said(small, bytewise, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"task arc_easy: no such file zeroshot/arc_easy.jsonl: .*set REPRO_DATA"):
        requests.build("arc_easy", tmp_path, bytewise)
    with pytest.raises(UserError, match="did you mean 'hellaswag-1916'"):
        requests.build("helaswag-1916", small, bytewise)
    with pytest.raises(UserError, match="a limit of 0 items"):
        requests.build("piqa", small, bytewise, limit=0)
    (tmp_path / "zeroshot").mkdir()
    whole = (small / "zeroshot/boolq.jsonl").read_bytes()
    for text in (b"", whole[:-20], whole + b"\n", b"not json\n"):
        (tmp_path / "zeroshot/boolq.jsonl").write_bytes(text)
        with pytest.raises(
            UserError, match=r"boolq.jsonl: not the file that task boolq stands for, but cut or of an"
        ) as e:
            requests.build("boolq", tmp_path, bytewise)
        assert "\n" not in str(e.value)
    monkeypatch.setitem(tasks.TASKS, "piqa", replace(tasks.TASKS["piqa"], version="0.9"))
    with pytest.raises(UserError, match="has version 1.0 of piqa, not 0.9; install the lm_eval"):
        requests.build("piqa", small, bytewise)
    bytewise_without = PreTrainedTokenizerFast(tokenizer_object=bytewise.backend_tokenizer)
    with pytest.raises(UserError, match="no BOS token"):
        requests.build("boolq", small, bytewise_without, add_bos=True)


def test_a_damaged_file_of_requests_is_said(small, bytewise, tmp_path):
    path = tmp_path / "data.safetensors"
    requests.save(path, requests.build("arc_easy", small, bytewise))
    whole = path.read_bytes()
    for content, sentence in (
        (whole[:-9], "an incomplete or damaged file"),
        (whole[:-1] + b"\7", "not those that it was saved with"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"data.safetensors: .*{sentence}.*build it again"):
            requests.load(path)


# --- jobs and the kind of cell ----------------------------------------------------------------------------------------


def target(recipe: str, names: list[str]) -> Target:
    settings = {"name": "test", "about": "a test", "models": {}, "corpora": {}, "zeroshot": {"tasks": names}}
    calibration = {"corpus": "tiny-held-out", "sequences": 2, "length": 8}
    return Target(scales.load(settings | {"calibration": calibration}), "pocket-3m", recipe)


def test_a_draw_is_what_recipes_answer_and_full_precision_answers_the_whole_set_too():
    names = ["piqa", "mmlu-10", "mmlu"]
    full, low = (target(recipe, names) for recipe in ("fp16", "rtn-w4-pc"))
    assert [kind.ZeroShot().jobs(at)["items"].parsed_options()["tasks"] for at in (full, low)] == [names, names[:2]]
    needs = {"items": Observations({f"{name}/correct": Series(answers(1, 2), "items") for name in names}, {})}
    for params, wanted in {
        kind.ZeroShot(): ["piqa", "mmlu-10"],
        kind.ZeroShot(("mmlu",)): ["mmlu-10"],
        kind.ZeroShot(("mmlu-10",)): ["mmlu-10"],
        kind.ZeroShot(("mmlu",), whole=True): ["mmlu"],
    }.items():
        assert list(params.series(needs, full)) == [f"{name}/correct" for name in wanted]
    assert kind.ZeroShot(("mmlu",), whole=True).jobs(low) is None, "full precision alone"
    assert kind.ZeroShot(("mmlu",), whole=True).jobs(full) is not None
    alone = target("rtn-w4-pc", ["piqa", "mmlu"])
    assert kind.ZeroShot().jobs(alone)["items"].parsed_options()["tasks"] == ["piqa", "mmlu"]
    assert kind.ZeroShot(("boolq",)).jobs(alone) is None, "the scale does not measure it"


def test_a_mean_leaves_tasks_out():
    """Of a draw the whole set's name counts, too; stored results that leave nothing out declare what they did."""
    protocol = kind.Protocol(tasks=("piqa", "boolq", "mmlu-10", "mmlu"))
    assert protocol.answered(kind.ZeroShot(without=("boolq",))) == ["piqa", "mmlu-10"]
    assert protocol.answered(kind.ZeroShot()) == ["piqa", "boolq", "mmlu-10"] and kind.ZeroShot.LATER == {"without": ()}
    with pytest.raises(UserError, match="unknown zero-shot task 'boolk'"):
        kind.ZeroShot(without=("boolk",))


def test_no_stored_mean_of_spear_has_boolq():
    rows = list(chain.from_iterable(accepted.of_table(f"spear/table{number}") for number in (1, *range(19, 25))))
    means = [row for row in rows if row.metric == "zeroshot_avg"]
    assert len(means) == 156 and not any("boolq" in row.protocol for row in means)
    assert {row.status for row in means if row.stand_in != "pocket-3m"} == {"ok"}, "which were at chance with it"
    (seed,) = accepted.series(means[0])
    assert len(seed) == 7 and means[0].value == pytest.approx(np.mean([one.values.mean() for one in seed.values()]))


def test_whole_sets_at_pocket_full():
    protocol = scales.load(None, "pocket").protocols["zeroshot"]
    assert protocol.limit is None and set(protocol.tasks) == {*kind.TASKS, "mmlu-10"}
    assert protocol.answered(kind.ZeroShot()) == [*kind.TASKS[:-1], "mmlu-10"]


def test_requests_are_shared_by_models_of_one_tokenizer_and_told_apart_by_what_decides_them(monkeypatch):
    at = target("fp16", ["piqa"])
    one = stored.job(at, "piqa", None)
    assert one.id == stored.job(replace(at, model="pocket-5m", text="rtn-w4-pc"), "piqa", None).id
    entry, other = tasks.TASKS["piqa"], dict.fromkeys(tasks.TASKS["piqa"].files, "0" * 64)
    for change in ({"files": other}, {"version": "2.0"}, {"seed": 1}):
        monkeypatch.setitem(tasks.TASKS, "piqa", replace(entry, **change))
        assert stored.job(at, "piqa", None).id != one.id, change
    monkeypatch.setitem(tasks.TASKS, "piqa", entry)
    assert stored.job(at, "piqa", 3).id != one.id


def test_a_machine_without_lm_eval_and_data_scores_what_was_brought(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REPRO_DATA", str(small))
    words = [
        "zeroshot",
        "pocket-3m",
        "--tasks",
        "piqa",
        "winogrande",
        "--config",
        "zeroshot={tasks: [piqa, winogrande]}",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert [path.name.partition(".")[0] for path in sorted(Path("build/requests").iterdir())] == ["piqa", "winogrande"]
    shutil.rmtree("build/zeroshot")
    monkeypatch.delenv("REPRO_DATA")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(words) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[-1] == printed.splitlines()[-1] and "requests/" not in again
    shutil.rmtree("build/requests")
    monkeypatch.setenv("REPRO_DATA", str(small))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "made by lm-eval, which is not installed here" in error and error.count("\n") == 1
