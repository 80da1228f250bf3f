"""Zero-shot: prompts letter by letter, scores against a slow float64 loop, floors, and no socket."""

import io
import json
import math
import os
import socket
import tarfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from repro.data import tasks, zeroshot
from repro.errors import UserError

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
    "raw/lambada_test.jsonl": [{"text": "He had a dog.\n\n“Come,” he said to the dog"}, {"text": "a b c"}],
}
SUBJECTS = ("anatomy", "high_school_physics", "virology")


def csv(start: int, count: int) -> str:
    rows = [f'"How much is {i}, and 1? ",{i},{i + 1},"{i},5",none,1' for i in range(start, start + count)]
    return "\n".join(["question,choice0,choice1,choice2,choice3,answer", *rows]) + "\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "zeroshot/raw").mkdir(parents=True)
    for name, content in FILES.items():
        text = content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content)
        (folder / "zeroshot" / name).write_text(text, encoding="utf-8")
    with tarfile.open(folder / "zeroshot/raw/mmlu.tar.xz", "w:xz") as archive:
        for subject in SUBJECTS:
            for split, text in (("dev", csv(100, 5)), ("test", csv(1, 4))):
                member = tarfile.TarInfo(f"mmlu/{split}/{subject}_{split}.csv")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
    return folder


@pytest.fixture(params=["small", "mirror"])
def data(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def prepared(data, tmp_path) -> Path:
    tasks.prepare([name for name in tasks.TASKS if name != "mmlu"], data, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def small_prepared(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared")
    tasks.prepare(tasks.TASKS, small, out)
    return out


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
    elif task == "hellaswag":
        for r in records(folder / "hellaswag_val_1916.jsonl"):
            items.append(([(r["query"], f" {t}") for t in r["choices"]], r["gold"]))
    elif task == "winogrande":
        for r in records(folder / "winogrande.jsonl"):
            items.append(([(c, f" {r['continuation']}") for c in r["context_options"]], r["gold"]))
    elif task == "boolq":
        for r in records(folder / "boolq.jsonl"):
            prompt = r["query"].removeprefix("Passage: ") + "\nAnswer:"
            items.append(([(prompt, " no"), (prompt, " yes")], r["gold"]))
    elif task == "lambada_openai":
        for r in records(folder / "raw/lambada_test.jsonl"):
            head, _, last = r["text"].rpartition(" ")
            items.append(([(head, f" {last}")], None))
    return items


SMALL_MMLU = "The following are multiple choice questions (with answers) about high school physics.\n\n" + "".join(
    f"How much is {i}, and 1?\nA. {i}\nB. {i + 1}\nC. {i},5\nD. none\nAnswer:{answer}"
    for i, answer in [(i, " B\n\n") for i in range(100, 105)] + [(1, "")]
)
REAL_MMLU = (
    "The following are multiple choice questions (with answers) about abstract algebra.\n\n"
    "Find all c in Z_3 such that Z_3[x]/(x^2 + c) is a field.\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: B\n\n"
    "Statement 1 | If aH is an element of a factor group, then |aH| divides |a|. Statement 2 | ",
    "\n\nFind the degree for the given field extension Q(sqrt(2), sqrt(3), sqrt(18)) over Q.\n"
    "A. 0\nB. 4\nC. 2\nD. 6\nAnswer:",
)


def requests(task: str, prepared: Path, limit: int) -> dict[str, list[list[tuple[str, str]]]]:
    """What lm-eval will ask, by its task name: per item the (prompt, answer) pairs."""
    asked = {}
    for name, loaded in zeroshot.load([task], prepared, limit).items():
        loaded.build_all_requests(rank=0, world_size=1)
        items: dict[int, list] = {}
        for instance in loaded.instances:
            items.setdefault(instance.doc_id, []).append(instance.args)
        asked[name] = list(items.values())
    return asked


@pytest.mark.parametrize("task", [name for name in tasks.TASKS if name != "mmlu"])
def test_prompts_are_the_shipped_ones(task, data, prepared):
    want = by_hand(task, data)
    assert requests(task, prepared, len(want)) == {task: [pairs for pairs, _ in want]}


def test_a_prompt_letter_by_letter(small_prepared):
    asked = [requests(task, small_prepared, 1)[task][0] for task in ("piqa", "winogrande", "boolq", "lambada_openai")]
    assert asked == [
        [("Question: dry a cup\nAnswer:", " use a towel "), ("Question: dry a cup\nAnswer:", " use a fork")],
        [("Ann met Eve so Ann", " spoke."), ("Ann met Eve so Eve", " spoke.")],
        [("Tin is a metal.\nQuestion: is tin a metal?\nAnswer:", answer) for answer in (" no", " yes")],
        [("He had a dog.\n\n“Come,” he said to the", " dog")],
    ]
    assert requests("arc_easy", small_prepared, 2)["arc_easy"][1] == [
        ("Question: Sound is\nAnswer:", f" {choice}") for choice in ("slow", "fast", "dark")
    ]


def test_mmlu_prompt_has_five_examples_of_its_subject(small_prepared):
    asked = requests("mmlu", small_prepared, 3)
    assert list(asked) == [f"mmlu_{subject}" for subject in SUBJECTS]
    assert asked["mmlu_high_school_physics"] == [[(SMALL_MMLU, f" {letter}") for letter in "ABCD"]]


def test_mmlu_prompt_of_the_mirror(mirror, tmp_path):
    tasks.prepare(["mmlu"], mirror, tmp_path)
    asked = requests("mmlu", tmp_path, 114)
    assert len(asked) == 57 and {len(items) for items in asked.values()} == {2}
    (prompt, answer), *_ = asked["mmlu_abstract_algebra"][0]
    assert prompt.startswith(REAL_MMLU[0]) and prompt.endswith(REAL_MMLU[1]) and answer == " A"
    assert prompt.count("\nAnswer: ") == 5


@pytest.mark.parametrize(("limit", "counts"), [(1, [0, 0, 1]), (4, [1, 1, 2]), (6, [2, 2, 2]), (100, [4, 4, 4])])
def test_a_limit_takes_subjects_evenly(limit, counts, small_prepared):
    asked = requests("mmlu", small_prepared, limit)
    assert [len(asked.get(f"mmlu_{subject}", [])) for subject in SUBJECTS] == counts


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


@pytest.mark.parametrize("bos", [True, False])
def test_scores_agree_with_a_slow_loop(bos, data, prepared, bytewise):
    model = llama()
    names = [name for name in tasks.TASKS if name != "mmlu"]
    frame = zeroshot.run(model, bytewise, names, prepared, limit=3, batch_size=4, add_bos=bos)
    model = model.double()
    assert (frame["bos"] == bos).all() and not frame["truncated"].any() and set(frame["task"]) == set(names)
    for row in frame.itertuples():
        pairs, gold = by_hand(row.task, data)[row.item]
        want, greedy = zip(*(slow_loglik(model, bytewise, *pair, bos) for pair in pairs))
        assert json.loads(row.logliks) == pytest.approx(want, rel=1e-4)
        if gold is None:
            assert row.correct == row.acc == greedy[0]
            continue
        # lm-eval normalises by characters of the answer, without the blank between prompt and answer
        norm = [value / len(answer[1:]) for value, (_, answer) in zip(want, pairs)]
        assert row.acc == (want.index(max(want)) == gold)
        if row.metric == "acc_norm":
            assert row.correct == row.acc_norm == (norm.index(max(norm)) == gold)
        else:
            assert row.correct == row.acc and (row.task == "winogrande" or math.isnan(row.acc_norm))
    logliks = [json.loads(text)[0] for text in frame.loc[frame["task"] == "lambada_openai", "logliks"]]
    assert zeroshot.perplexity(frame) == pytest.approx(math.exp(-sum(logliks) / len(logliks)))


def test_mmlu_scores_agree_with_a_slow_loop(small_prepared, bytewise):
    model = llama()
    frame = zeroshot.run(model, bytewise, ["mmlu"], small_prepared, limit=3, batch_size=2)
    row = frame[frame["subject"] == "high_school_physics"].iloc[0]
    model = model.double()
    want = [slow_loglik(model, bytewise, SMALL_MMLU, f" {letter}", True)[0] for letter in "ABCD"]
    assert json.loads(row["logliks"]) == pytest.approx(want, rel=1e-4)
    assert row["correct"] == (want.index(max(want)) == 1) and row["shots"] == 5 and frame["bos"].all()
    assert list(frame["subject"]) == list(SUBJECTS) and list(frame["item"]) == [0, 0, 0]


def test_the_last_word_counts_when_it_is_the_greedy_one(tmp_path, bytewise):
    """A model that always says blank, and a text that ends with two of them after one that ends with a letter."""
    (tmp_path / "zeroshot/raw").mkdir(parents=True)
    (tmp_path / "zeroshot/raw/lambada_test.jsonl").write_text('{"text": "a b"}\n{"text": "a  "}\n')
    tasks.prepare(["lambada_openai"], tmp_path, tmp_path)
    model = llama()
    model.lm_head = torch.nn.Linear(32, 258).requires_grad_(False)
    model.lm_head.weight.zero_()
    model.lm_head.bias.zero_()[bytewise.encode(" ")[1]] = math.log(257)
    frame = zeroshot.run(model, bytewise, ["lambada_openai"], tmp_path)
    assert frame["correct"].tolist() == [0, 1]
    want = [[math.log(1 / 2) + math.log(1 / 514)], [2 * math.log(1 / 2)]]
    assert frame["logliks"].map(json.loads).tolist() == [pytest.approx(logliks) for logliks in want]


def test_no_socket_and_the_same_bytes_twice(small, tmp_path, bytewise, monkeypatch):
    def refuse(*_):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = dict(os.environ)
    for turn in ("one", "two"):
        tasks.prepare(tasks.TASKS, small, tmp_path / turn)
        frame = zeroshot.run(llama(), bytewise, tasks.TASKS, tmp_path / turn, limit=2)
        frame.to_parquet(tmp_path / f"{turn}.parquet")
    assert dict(os.environ) == before
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
        assert str(tmp_path) not in file.read_text()


def test_prompts_longer_than_the_context_are_counted(small_prepared, bytewise):
    frame = zeroshot.run(llama(64), bytewise, ["piqa", "mmlu"], small_prepared, limit=3)
    assert frame.groupby("task")["truncated"].all().to_dict() == {"mmlu": True, "piqa": False}
    assert zeroshot.summary(frame).set_index("task")["truncated"].to_dict() == {"piqa": 0, "mmlu": 3, "average": 3}
    with pytest.raises(UserError, match="context only 8"):
        zeroshot.run(llama(8), bytewise, ["piqa"], small_prepared)


def test_a_head_of_its_own_stays(small_prepared, bytewise):
    model = llama()
    model.config.tie_word_embeddings = True
    head = model.lm_head.weight.detach().clone()
    zeroshot.run(model, bytewise, ["boolq"], small_prepared, limit=1)
    assert torch.equal(model.lm_head.weight, head) and model.lm_head.weight is not model.model.embed_tokens.weight


def answers(task: str, right: int, n: int) -> pd.DataFrame:
    rows = {"item": range(n), "subject": "", "correct": [1] * right + [0] * (n - right), "truncated": False}
    return pd.DataFrame({"task": task, "metric": tasks.TASKS[task].metric} | rows)


@pytest.mark.parametrize(
    ("task", "right", "n", "status"),
    [
        ("piqa", 64, 100, "floor"),  # 14 points above chance, 3 errors are 15
        ("piqa", 66, 100, "ok"),
        ("boolq", 622, 1000, "floor"),  # always yes
        ("boolq", 680, 1000, "ok"),
        ("lambada_openai", 0, 100, "floor"),
        ("lambada_openai", 1, 100, "floor"),
        ("lambada_openai", 12, 100, "ok"),
        ("arc_easy", 2, 2, "floor"),  # all right, but of two
        ("arc_easy", 10, 100, "floor"),
    ],
)
def test_floor(task, right, n, status):
    row = zeroshot.summary(answers(task, right, n)).set_index("task").loc[task]
    assert (row["status"], row["n"]) == (status, n)
    assert row["accuracy"] == right / n and row["stderr"] == pytest.approx(math.sqrt(right * (n - right) / n**3))


def test_the_reference_decides_the_floor_and_the_average_is_plain():
    full = pd.concat([answers("piqa", 90, 100), answers("arc_easy", 26, 100)])
    low = pd.concat([answers("piqa", 50, 100), answers("arc_easy", 80, 100)])
    table = zeroshot.summary(low, full).set_index("task")
    assert table["status"].to_dict() == {"piqa": "ok", "arc_easy": "floor", "average": "ok"}
    assert table.loc["average", ["n", "accuracy", "chance"]].tolist() == [200, 0.65, 0.375]
    assert table.loc["average", "stderr"] == pytest.approx(math.sqrt(0.25 / 100 + 0.16 / 100) / 2)
    with pytest.raises(UserError, match="other zero-shot items"):
        zeroshot.summary(low, answers("piqa", 90, 100))


def test_what_is_missing_or_wrong_is_said(small, small_prepared, bytewise, tmp_path):
    with pytest.raises(UserError, match=r"arc_easy.jsonl.*REPRO_DATA"):
        tasks.prepare(["arc_easy"], tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="did you mean 'hellaswag'"):
        tasks.prepare(["helaswag"], small, tmp_path / "out")
    with pytest.raises(UserError, match="prepare task piqa first"):
        zeroshot.run(llama(), bytewise, ["piqa"], tmp_path)
    with pytest.raises(UserError, match="limit"):
        zeroshot.run(llama(), bytewise, ["piqa"], small_prepared, limit=0)
    (tmp_path / "zeroshot").mkdir()
    for text in ("not json\n", '{"other": 1}\n', '{"query": "x", "gold": 0}\n'):
        (tmp_path / "zeroshot/boolq.jsonl").write_text(text)
        with pytest.raises(UserError, match="not in the format of boolq"):
            tasks.prepare(["boolq"], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
