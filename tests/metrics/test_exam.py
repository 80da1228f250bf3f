"""Exams: prompts and judges against lm-eval's own, both decoders, what full precision at chance spares, bad input."""

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from fake_jobs import CONFIG, fake  # noqa: F401
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters.extraction import RegexFilter

from repro import models
from repro.baselines import rtn
from repro.core.errors import NotMeasurable, UserError
from repro.core.files import sha256
from repro.data import generated, tasks
from repro.engine import weights
from repro.engine.core import Core
from repro.jobs import questions
from repro.jobs import requests as stored
from repro.jobs.target import Target
from repro.metrics import exam
from repro.models.lowbit import LowBitModel
from repro.papers.cell import Cell
from repro.render import content
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.store import accepted, observations
from repro.store.observations import Series
from repro.verdicts import table_results
from repro.workflow import runner
from repro.workflow.workflow import Workflow

ANSWERS = [
    "She has 3.\n#### 18",
    "#### -5",
    "#### 1,000",
    "#### 1,000.\nQuestion: why?",
    "#### 3\n#### 4",
    "18",
    "####18",
    "#### $18",
    "",
    "#### 18.0",
]
SOLUTIONS = ["8 + 10\n#### 18", "#### -5", "#### 1000", "it is\n#### 1,000", "#### 3"]


# --- prompts and judges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_to_gsm8k_is_right_where_lm_eval_says_so(answer, solution):
    ((taken,),) = RegexFilter(r"#### (\-?[0-9\.\,]+)").apply([[answer]], [{}])
    how = {"ignore_case": True, "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"]}
    want = exact_match_fn(predictions=[taken], references=[solution], **how)["exact_match"]
    assert generated.number(answer) == taken
    assert generated.GRADES["number"](answer, solution) == bool(want)


def test_known_answers_and_what_chance_gives():
    """Judged by the next item's solution, the last by the first's: two of four happen to fit."""
    items = ["#### 1", "#### 1", "#### 2", "#### 3"]
    right, dealt = generated.graded("gsm8k", ["#### 1", "#### 1", "#### 3", "so 3"], items)
    assert right.tolist() == [1, 1, 0, 0] and dealt.tolist() == [1, 0, 1, 0]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A mirror with a few records of each."""
    one = lambda i: {"question": f"How much is {i} and 1?", "answer": f"{i} and 1\n#### {i + 1}"}  # noqa: E731
    (tmp_path / "math").mkdir()
    (tmp_path / "zeroshot").mkdir()
    (tmp_path / "math/gsm8k_test.jsonl").write_text("".join(json.dumps(one(i)) + "\n" for i in range(3)))
    with lzma.open(tmp_path / "math/gsm8k_train.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(one(i)) + "\n" for i in range(100, 120))
    entry = generated.GENERATED["gsm8k"]
    files = {name: sha256(tmp_path / name) for name in entry.task.files}
    monkeypatch.setitem(generated.GENERATED, "gsm8k", replace(entry, task=replace(entry.task, files=files)))
    return tmp_path


def test_a_prompt_has_five_examples_of_the_training_set(small, tmp_path):
    tokenizer = models.tokenizer("pocket-3m", False)
    made, again = (generated.build("gsm8k", small, tokenizer, 2) for _ in range(2))
    assert len(made.prompts) == len(made.items) == 2 and made.items == ["0 and 1\n#### 1", "1 and 1\n#### 2"]
    for ids, other, i in zip(made.prompts, again.prompts, range(2)):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        *examples, question = text.split("\n\n")
        assert question == f"Question: How much is {i} and 1?\nAnswer:" and len(examples) == 5
        assert all(e.startswith("Question: How much is 1") and "\n#### 1" in e for e in examples)
        assert np.array_equal(ids, other) and ids[0] == tokenizer.bos_token_id, "the draw is the same"
    assert made.stop == ["Question:", "</s>", "<|im_end|>"] and made.meta["shots"] == "5"
    generated.save(tmp_path / "q", made)
    back = generated.load(tmp_path / "q")
    assert back.meta == made.meta and back.items == made.items
    assert all(np.array_equal(a, b) for a, b in zip(back.prompts, made.prompts, strict=True))
    data = (tmp_path / "q").read_bytes()
    for damaged in (data[:-4] + b"\0\0\0\1", data[:20], b""):
        (tmp_path / "q").write_bytes(damaged)
        with pytest.raises(UserError, match="an incomplete or damaged file of questions"):
            generated.load(tmp_path / "q")


def test_mathqa_is_asked_as_lm_eval_asks_it(small, monkeypatch):
    text = "Question: 2 and 2 ?\nor 4 ?\nA. 4\nB. none\nC. 1,000\nD. 5 %\nAnswer: "
    record = {"query": text, "choices": ["A", "B", "C", "D"], "gold": 2}
    (small / "zeroshot/math_qa.jsonl").write_text(json.dumps(record) + "\n")
    files = {"zeroshot/math_qa.jsonl": sha256(small / "zeroshot/math_qa.jsonl")}
    task = replace(tasks.TASKS["mathqa-4"], files=files)
    from repro.data import requests

    ((_, _, one),) = requests.load_shipped(task, small).values()
    one.build_all_requests(rank=0, world_size=1)
    prompt = "Question: 2 and 2 ?\nor 4 ?\nAnswer:"
    assert [i.args for i in one.instances] == [(prompt, f" {choice}") for choice in ("4", "none", "1,000", "5 %")]
    assert one.doc_to_target(one.instances[0].doc) == 2


def test_every_mathqa_record_has_its_right_choice(mirror):
    """A choice with a comma and a blank ends there, as lm-eval reads it; the right one is among those that it finds."""
    result = tasks.items(tasks.TASKS["mathqa-4"], mirror)[""]["test"]
    golds = [record["correct"] for _, record in result]
    assert len(result) == 2983 and max(map(golds.count, "abcd")) / 2983 == pytest.approx(tasks.TASKS["mathqa-4"].chance)
    from lm_eval.tasks.mathqa.utils import doc_to_choice

    counts = [len(doc_to_choice(record)) for _, record in result]
    assert min(counts) >= 4, "every letter is found"


ANSWERS = [
    (["punctuation:no_comma"], [{}], "No pause here", "Here, a pause"),
    (["detectable_format:json_format"], [{}], '```json\n{"a": 1}\n```', "a: 1"),
    (["change_case:english_lowercase"], [{}], "this is a small answer in english", "This is an answer in English"),
    (["startend:quotation"], [{}], '"quoted"', "not quoted"),
    (["keywords:existence"], [{"keywords": ["park", "lake"]}], "A park and a lake.", "A park."),
    (["keywords:forbidden_words"], [{"forbidden_words": ["park"]}], "A lake.", "A park."),
    (["length_constraints:number_words"], [{"num_words": 4, "relation": "at least"}], "one two three four", "one"),
    (["punctuation:no_comma", "startend:quotation"], [{}, {}], '"both"', '"one, of two"'),
]


def test_ifeval_judges_generated_answers_by_lm_evals_own_checkers(monkeypatch):
    """All instructions of an item, strictly; in the second place what chance gives: each answer to the next item."""
    for package in generated.PACKAGES["instructions"]:
        pytest.importorskip(package, reason="lm-eval's checkers of IFEval are the extra `ifeval`")
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *names, **words: False)  # no test asks the network
    items = [
        {"key": i, "prompt": "Write.", "instruction_id_list": names, "kwargs": keywords}
        for i, (names, keywords, _, _) in enumerate(ANSWERS)
    ]
    right, dealt = generated.graded("ifeval", [good for *_, good, _ in ANSWERS], items)
    assert right.tolist() == [1.0] * len(items) and 0 < dealt.mean() < 1
    wrong, _ = generated.graded("ifeval", [bad for *_, bad in ANSWERS], items)
    assert wrong.tolist() == [0.0] * len(items)
    empty, _ = generated.graded("ifeval", [""] * len(items), items)
    assert empty.sum() == 0, "no answer follows nothing"


def test_ifeval_without_nltks_data_is_not_run(monkeypatch):
    monkeypatch.setattr(generated.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(generated, "_splits_sentences", lambda: False)
    why = "ifeval: lm-eval's checkers need nltk's punkt_tab, not here (python -m nltk.downloader punkt_tab)"
    assert exam.Exam("ifeval").lacking() == why and not exam.Exam("gsm8k").lacking()
    monkeypatch.setattr(generated, "_splits_sentences", lambda: True)
    assert exam.Exam("ifeval").lacking() == ""


def test_ifeval_is_registered_and_says_what_is_not_here(small, monkeypatch):
    monkeypatch.setattr(generated.importlib.util, "find_spec", lambda name: None if name == "langdetect" else object())
    why = "ifeval: lm-eval's checkers need langdetect, not installed here"
    assert exam.Exam("ifeval").lacking() == why and not exam.Exam("gsm8k").lacking()
    with pytest.raises(UserError, match=why):
        generated.build("ifeval", small, models.tokenizer("pocket-3m", False))
    monkeypatch.setattr(accepted, "RESULTS", small / "results")  # where nothing of it is stored
    at = Workflow(scales.load(name="pocket"), stored=False)
    cell = next(c for c in at.cells("bitbybit", "5") if (c.row, c.col, c.model) == ("FP16", "Ifeval", "Qwen2.5-7B"))
    result = measure.measurement_of(at, cell)
    assert (result.status, result.note) == ("not_run", why)
    assert f"Not run: {why}." in content.remarks(table_results.table_results(at, "bitbybit", "5"))


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_the_engine_and_transformers_give_the_same_greedy_answers():
    lm = LowBitModel(models.load("pocket-3m", "cpu", "float32", False))
    tokenizer = models.tokenizer("pocket-3m", False)
    prompts = [tokenizer(text).input_ids for text in ("The city of", "In the year 1900 he was", "A")]
    engine = Core("pocket-3m", weights.decoder(lm, 64, torch.device("cpu"), torch.float32))
    want = [str(text) for text in engine.generate(prompts, 20, stop=["the"])]
    answers = exam.greedy(lm.model, tokenizer, 20, ["the"], prompts)
    assert [exam.before(text, ["the"]) for text in answers] == want and any(want)
    alone = [exam.greedy(lm.model, tokenizer, 20, [], [prompt])[0] for prompt in prompts]
    assert alone == exam.greedy(lm.model, tokenizer, 20, [], prompts), "padding changes nothing"


def test_answers_end_at_a_stop_string_and_prompts_are_cut_from_the_left(monkeypatch):
    lm = LowBitModel(models.load("pocket-3m", "cpu", "float32", False))
    tokenizer = models.tokenizer("pocket-3m", False)
    entry = replace(generated.GENERATED["gsm8k"], new_tokens=12)
    monkeypatch.setitem(generated.GENERATED, "gsm8k", entry)
    monkeypatch.setattr(exam, "CONTEXT", 20)
    ids = np.asarray(tokenizer("Once upon a time there was a small town by the sea, and").input_ids, dtype=np.int32)
    asked_questions = generated.Questions({"stop": '["e"]'}, [ids, ids[-8:]], ["", ""])
    options = {"model": "pocket-3m", "hub": False, "device": "cpu", "dtype": "float32", "task": "gsm8k", "together": 2}
    one, two = exam.answers(lm, asked_questions, options)
    assert one == two and "e" not in one, "the last 8 ids are all that fits"
    monkeypatch.setattr(exam, "CONTEXT", 12)
    with pytest.raises(NotMeasurable, match="answers of 12 tokens do not fit a context of 12"):
        list(exam.answers(lm, asked_questions, options))


def test_a_broken_model_does_not_answer():
    model = tiny.model("llama")
    model.model.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match="logits hold NaN or Inf"):
        exam.greedy(model, None, 3, [], [[1, 2]])


def test_before_a_stop_string():
    assert exam.before("a Question: b </s>", ["</s>", "Question:"]) == "a " and exam.before("ab", ["c"]) == "ab"


def test_a_model_with_attachments_is_decoded_by_transformers(monkeypatch):
    """The engine refuses quantized inputs."""
    from repro.baselines import smoothquant

    lm = LowBitModel(tiny.model("llama"))
    smoothquant.apply(lm, tiny.tokens(4, 16), smoothquant.Config(bits=8, act_bits=8, group=16))
    assert lm.attachments
    seen = []
    monkeypatch.setattr(exam, "greedy", lambda model, *rest: seen.append(rest[-1]) or ["x"] * len(rest[-1]))
    monkeypatch.setattr(exam.models, "tokenizer", lambda *_: None)
    monkeypatch.setitem(generated.GENERATED, "gsm8k", replace(generated.GENERATED["gsm8k"], new_tokens=8))
    asked_questions = generated.Questions({"stop": "[]"}, [np.arange(4), np.arange(5)], ["", ""])
    options = {"model": "m", "hub": False, "device": "cpu", "dtype": "float32", "task": "gsm8k", "together": 1}
    assert list(exam.answers(lm, asked_questions, options)) == ["x", "x"]
    assert seen == [[[0, 1, 2, 3]], [[0, 1, 2, 3, 4]]]


# --- what is run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "dealt", "want"),
    [(0, 0, "at_chance"), (2, 0, "at_chance"), (20, 0, "ok"), (60, 55, "at_chance"), (120, 20, "ok"), (200, 0, "ok")],
)
def test_chance_is_what_dealt_answers_get(right, dealt, want):
    both = {"gsm8k/correct": right, "gsm8k/chance": dealt}
    full = {name: Series((np.arange(200) < count).astype(float), "items") for name, count in both.items()}
    assert exam.Exam("gsm8k").status(full) == want


@pytest.mark.parametrize(("share", "want"), [(0.25, "at_chance"), (0.33, "at_chance"), (0.4, "ok")])
def test_chance_of_given_answers_is_the_tasks(share, want):
    full = {"mathqa-4/correct": Series((np.arange(200) < 200 * share).astype(float), "items")}
    assert exam.Exam("mathqa-4").status(full) == want


def score(shares):
    """An exam's `run`: a share of right answers by recipe."""

    def run(job, refused, folder, origin):
        values = (np.arange(40) < 40 * shares[job.parsed_options()["recipe"]]).astype(float)
        task = job.parsed_options()["task"]
        series = {f"{task}/correct": Series(values, "items", "g"), f"{task}/chance": Series(0 * values, "items", "g")}
        observations.save(folder / observations.FILE, series, origin)

    return run


def cells():
    bare = Cell("bitbybit", "table", "5", "", "Gsm8k", "Llama-3.2-1B", "acc_gsm8k", measure="exam",
                params=exam.Exam("gsm8k"), stand_in="pocket-3m")  # fmt: skip
    return replace(bare, row="FP16", recipe="fp16"), replace(bare, row="low", recipe="rtn-w4-pc")


@pytest.mark.parametrize(("share", "status"), [(0.0, "at_chance"), (0.5, "ok")])
def test_other_recipes_run_only_where_full_precision_is_above_chance(fake, monkeypatch, share, status):  # noqa: F811
    monkeypatch.setattr(runner.JOBS["exam"], "run", score({"fp16": share, "rtn-w4-pc": 0.25}))
    monkeypatch.setattr(questions, "run", stored.run)
    at = Workflow(scales.load(CONFIG | {"exam": {"items": 40}}), stored=False)
    full, low = cells()
    for wanted in (at.every_job([low]), measure.missing(at, [low])):
        assert [job.kind for job in wanted] == ["questions", "exam"], "nothing is compressed"
    assert measure.measurement_of(at, low).status == "not_run"
    assert at.waits_for_baseline(low)
    assert not at.waits_for_baseline(full)
    fake(at.every_job([full, low]))
    assert measure.measurement_of(at, full).status == status
    kinds = [job.kind for job in at.every_job([low])]
    if status == "at_chance":
        result = measure.measurement_of(at, low)
        assert (result.status, result.value, result.source) == ("at_chance", None, "") and "not run" in result.note
        assert content.measured_text(result) == "at chance" and measure.one_measured(at, low).against is None
        assert "compress" not in kinds and [j.kind for j in measure.missing(at, [low])] == ["questions", "exam"]
        return
    assert "compress" in kinds and measure.measurement_of(at, low).status == "not_run"
    fake(at.every_job([low]))
    assert measure.measurement_of(at, low).value == 0.25


def test_a_claim_on_cells_that_are_spared_has_no_verdict_and_no_grade(monkeypatch):
    """Nothing of it is stored: full precision is not known to be at chance."""
    monkeypatch.setattr(accepted, "find", lambda scale, cell: None)
    monkeypatch.setattr(accepted, "equal", lambda scale, inputs: [])
    at = Workflow(scales.load(name="pocket"), stored=False)
    monkeypatch.setattr(at, "waits_for_baseline", lambda cell: cell.measure == "exam" and cell.recipe != "fp16")
    judged = {claim.claim: table_results.judge(at, claim) for claim in tables.table("bitbybit", "5").claims}
    assert {one.grade for one in judged.values()} == {""} and not any(one.measured for one in judged.values())
    spared = judged["bitbybit B25"]
    assert spared.verdict == "no verdict: not run"
    assert spared.why == "12 of 36 cells not run, 24 of 36 cells without a stand-in"
    assert spared.own_numbers == "consistent" == judged["bitbybit B23"].own_numbers


def test_table_5_asks_for_200_items_of_four_tasks():
    at = Workflow(scales.load(name="pocket"), stored=False)
    mine = [c for c in at.cells("bitbybit", "5") if c.model == "Qwen2.5-7B"]
    assert {c.stand_in for c in mine} == {"pocket-10m"} and len(mine) == 12
    full = [c for c in mine if c.row == "FP16"]
    assert [c.params.task for c in full] == ["gsm8k", "mathqa-4", "mmlu", "ifeval"]
    for cell in full:
        for jobs in at.jobs(cell):
            assert jobs["items"].parsed_options()["items"] == 200
    others = [c for c in at.cells("bitbybit", "5") if c.model != "Qwen2.5-7B"]
    assert {measure.measurement_of(at, c).status for c in others} == {"no_stand_in"} and len(others) == 24


def test_one_job_a_task_and_none_without_a_protocol():
    at = scales.load({"exam": {"items": 5}}, "pocket")
    ids = {t: exam.Exam(t).jobs(Target(at, "pocket-3m", "fp16"))["items"] for t in ("gsm8k", "mathqa-4", "mmlu")}
    assert len({job.id for job in ids.values()}) == 3
    kinds_of_needs = [need.kind for job in ids.values() for _, need in job.needs]
    assert kinds_of_needs == ["questions", "requests", "requests"] and all(len(job.needs) == 1 for job in ids.values())
    assert exam.Exam("mmlu").jobs(Target(scales.load({"exam": None}, "pocket"), "pocket-3m", "fp16")) is None
    assert rtn is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exam.Exam("gsm9k"), "unknown task of an exam 'gsm9k'; did you mean 'gsm8k'"),
        (lambda: exam.Protocol(items=1), "items is 1; it must be 2 to 1,000,000"),
        (lambda: exam.Protocol(together=65), "together is 65; it must be 1 to 64"),
        (lambda: generated.build("piqa", None, None), "unknown task with generated answers 'piqa'"),
        (lambda: generated.build("gsm8k", None, None, 0), "a limit of 0 items; it must be 1 or more"),
    ],
)
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value) and "\n" not in str(error.value)
