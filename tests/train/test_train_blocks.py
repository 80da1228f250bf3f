"""The block-wise trainer: batches, slow references of step and streams, resuming, divergence, what it counts."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.core.errors import NotMeasurable, UserError
from repro.methods import bitbybit
from repro.methods.bitbybit import Config, Precision
from repro.models import graphs
from repro.models.lowbit import LowBitModel, block_inputs, blocks
from repro.store import job
from repro.train import blocks as training
from repro.train import compiled, end_to_end, streams
from repro.train.blocks import BlockSettings, BlockTask, BlockTrainer, batch_rows, checkpoint_folder, fit, training_ids
from repro.train.streams import Stream

FAST = settings(max_examples=40, deadline=None, derandomize=True)
IDS = tiny.tokens(6, 16)
NAMES = ("self_attn.q_proj", "mlp.down_proj")


def squares(outputs, full, seconds):
    """The sum of all squared differences."""
    targets = [full, *(want for want in seconds if want is not None)]
    return sum((y - want).square().sum() for y, want in product(outputs, targets))


def doubled(block, kwargs, latent, factor=1.0):
    """The block with latent weights times a factor."""
    return lambda x: torch.func.functional_call(
        block, {f"{name}.weight": factor * w for name, w in latent.items()}, (x,), kwargs
    )


def trainer(folder, layout="llama", names=NAMES, **options):
    """A trainer of a tiny model whose weights start 10 % too large, and the latent weights of its blocks."""
    made = tiny.model(layout)
    chosen = BlockSettings(**{"epochs": 2, "batch": 2, "streams": "float32"} | options)
    return BlockTrainer(made, IDS, chosen, folder, "test"), latents_of(made, names)


def latents_of(model, names):
    """Weights of each block, 10 % too large, by name."""
    latents = []
    for block in model.model.layers:
        latents.append({name: 1.1 * block.get_submodule(name).weight.detach() for name in names})
    return latents


def flat(latents):
    """All values of the weights of blocks, in a row."""
    return torch.cat([weight.flatten() for latent in latents for weight in latent.values()])


def task_of(latents, rate=1e-3, earlier=False, trained=(0, 1)):
    """Tasks that train the latent weights as they are, with a second teacher if `earlier`."""

    def task(block, kwargs, index):
        run = doubled(block, kwargs, latents[index])
        tensors = latents[index] if index in trained else {}
        second = (lambda x: block(x, **kwargs)) if earlier else None
        return BlockTask([run], [second], run if earlier else None, tensors, dict.fromkeys(tensors, rate))

    return task


def of_kept(tasks, full):
    """Tasks that say whether their second targets are of full precision."""
    return lambda *arguments: replace(tasks(*arguments), seconds_are_full=full)


@pytest.mark.parametrize(("kept", "of_full", "of_earlier"), [(2**28, 2, 1), (0, 4, 2)])
def test_nothing_is_computed_that_no_block_and_no_pass_reads(tmp_path, monkeypatch, kept, of_full, of_earlier):
    """Two passes, two blocks: full precision once where its states are few, students behind the first block alone.

    What the second pass calls the earlier model is the student that the first one left.
    """
    calls, called = Counter(), training._called
    monkeypatch.setattr(training, "KEPT", kept)
    monkeypatch.setattr(training, "_called", lambda *arguments: calls.update(["full"]) or called(*arguments))
    made, latents = trainer(tmp_path / str(kept))
    tasks = task_of(latents, earlier=True)

    def task(block, kwargs, index):
        own = tasks(block, kwargs, index)

        def counted(name, forward):
            return lambda x: calls.update([name] * (not torch.is_grad_enabled())) or forward(x)

        return replace(own, students=[counted("student", own.students[0])], earlier=counted("earlier", own.earlier))

    for name in ("one", "two"):
        made.run(name, task, squares)
    assert calls == {"full": of_full, "student": 2, "earlier": of_earlier}


@pytest.mark.parametrize(("full", "computed"), [(True, 2), (False, 4)])
def test_the_first_block_has_its_first_target_for_a_second_one_in_full_precision(tmp_path, full, computed):
    """Two passes of two blocks; before the first of them all streams are the embedding."""
    made, latents = trainer(tmp_path)
    tasks, calls = task_of(latents, earlier=True), []

    def task(block, kwargs, index):
        own = tasks(block, kwargs, index)
        second = lambda x: calls.append(index) or own.seconds[0](x)  # noqa: E731
        return replace(own, seconds=[second], seconds_are_full=full)

    for name in ("one", "two"):
        made.run(name, task, squares)
    assert len(calls) == computed and (0 in calls) is not full


def test_kept_states_change_no_bit(tmp_path, monkeypatch):
    ends = []
    for kept in (0, 2**28):
        monkeypatch.setattr(training, "KEPT", kept)
        made, latents = trainer(tmp_path / str(kept))
        for name in ("one", "two"):
            made.run(name, of_kept(task_of(latents, earlier=True), bool(kept)), squares)
        ends.append(latents)
    for first, second in zip(*ends, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in NAMES)


# --- batches ----------------------------------------------------------------------------------------------------------


@FAST
@given(st.integers(0, 50), st.integers(1, 40), st.integers(1, 5), st.integers(0, 3))
def test_batches_are_a_function_of_seed_and_step_and_an_epoch_sees_a_sequence_once(epoch, sequences, batch, seed):
    given_ = BlockSettings(1, batch, seed=seed)
    if sequences < batch:
        with pytest.raises(UserError, match=f"a batch of {batch} sequences from {sequences}"):
            batch_rows(0, sequences, given_)
        return
    each = sequences // batch
    rows = [batch_rows(epoch * each + i, sequences, given_) for i in range(each)]
    seen = torch.cat(rows).tolist()
    assert len(set(seen)) == len(seen) == each * batch and set(seen) <= set(range(sequences))
    again = batch_rows(epoch * each, sequences, BlockSettings(9, batch, seed=seed, streams="float32"))
    assert torch.equal(again, rows[0])


def test_seeds_and_epochs_differ():
    orders = {tuple(batch_rows(step, 64, BlockSettings(1, 64, seed=s)).tolist()) for s, step in product((0, 1), (0, 1))}
    assert len(orders) == 4


def test_as_many_sequences_are_trained_on_as_were_asked():
    ids = tiny.tokens(5, 8)
    assert torch.equal(training_ids(ids, 31, "m"), ids[:3]) and torch.equal(training_ids(ids, 40, "m"), ids)
    for calibration, tokens, message in (
        (ids, 41, "m trains on 41 tokens an epoch, the calibration text has 40; .* tokens=40"),
        (None, 1000, "m trains on 1,000 tokens an epoch, the calibration text has 0"),
        (ids, 7, "tokens is 7; one sequence of the calibration text has 8"),
    ):
        with pytest.raises(UserError, match=message):
            training_ids(calibration, tokens, "m")


# --- a step -----------------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_a_slow_reference(monkeypatch):
    """Two students, three targets, float64, one sequence and one weight product at a time."""
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    w, x1, x2, full, second = draw(5, 4), draw(6, 3, 4), draw(6, 3, 4), draw(6, 3, 5), draw(6, 3, 5)
    latent, seen = w.clone(), []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["params"][0].grad.clone())

    monkeypatch.setattr(graphs, "adamw", lambda tensors, lr, **_: Noted(tensors, lr))
    task = BlockTask(
        [lambda x: x @ latent.T, lambda x: x @ (2 * latent).T], [None, lambda x: x], None, {"w": latent}, {"w": 0.0}
    )

    def loss(outputs, target, seconds):
        assert seconds[0] is None
        return (outputs[0] - target).square().sum() + 3 * (outputs[1] - seconds[1]).square().sum()

    of_task = [Stream(t, torch.device("cpu"), torch.float64) for t in (x1, x2, full, second)]
    chosen = BlockSettings(1, 2, seed=4)
    losses = fit(task, loss, of_task, chosen)
    assert len(seen) == len(losses) == 3 and latent.grad is None and not latent.requires_grad
    for step, (gradient, value) in enumerate(zip(seen, losses)):
        slow, total = np.zeros((5, 4)), 0.0
        for row in batch_rows(step, 6, chosen).tolist():
            for t in range(3):
                for n in range(5):
                    for x, scale, target, weight in ((x1, 1, full, 1), (x2, 2, second, 3)):
                        error = scale * (x[row, t] @ w[n]).item() - target[row, t, n].item()
                        total += weight * error**2
                        slow[n] += (weight * 2 * error * scale * x[row, t]).numpy()
        assert gradient.numpy() == pytest.approx(slow / 30, rel=1e-5)
        assert value == pytest.approx(total / 30, rel=1e-5)


def test_training_is_adamw_with_a_cosine_by_hand(tmp_path):
    """Both blocks after all steps, against a loop of torch.optim.AdamW on hidden states that plain calls give."""
    run, latents = trainer(tmp_path, final=0.05, weight_decay=0.1, seed=3)
    run.run("w", task_of(latents, rate=1e-3), squares)
    made, want = tiny.model("llama"), []
    hidden, kwargs = block_inputs(made, IDS)
    student = full = torch.cat(hidden)
    for block, kw in zip(made.model.layers, kwargs):
        latent = {name: (1.1 * block.get_submodule(name).weight.detach()).requires_grad_() for name in NAMES}
        with torch.no_grad():
            full = block(full, **kw)
        optimizer = torch.optim.AdamW(latent.values(), weight_decay=0.1)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 1e-3 * (0.05 + 0.95 * (1 + math.cos(math.pi * step / 6)) / 2)
            rows = batch_rows(step, 6, BlockSettings(2, 2, seed=3))
            optimizer.zero_grad()
            (doubled(block, kw, latent)(student[rows]) - full[rows]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            student = doubled(block, kw, latent)(student)
        want.append({name: w.detach() for name, w in latent.items()})
    for latent, wanted in zip(latents, want, strict=True):
        for name in NAMES:
            torch.testing.assert_close(latent[name], wanted[name], rtol=1e-4, atol=1e-6)
    assert run.losses[5] < run.losses[0] and len(run.losses) == 12
    assert run.tokens == 2 * 6 * 16 and run.steps == 6


@pytest.mark.parametrize("step", [1, 5])
def test_a_loss_that_is_not_finite_is_refused_with_its_step(tmp_path, step):
    run, latents = trainer(tmp_path)
    calls = []

    def broken(outputs, full, seconds):
        calls.append(None)
        return squares(outputs, full, seconds) * (math.nan if len(calls) == step else 1)

    where = f"test: the loss is not finite at step {step} of model.layers.0 in w4; lower"
    with pytest.raises(NotMeasurable, match=where) as raised:
        run.run("w4", task_of(latents), broken)
    assert raised.value.status == "diverged" and not list(tmp_path.glob("*"))


def test_two_runs_of_a_seed_agree_bit_for_bit_and_another_seed_does_not(tmp_path):
    result = []
    for number, seed in enumerate((7, 7, 8)):
        run, latents = trainer(tmp_path / str(number), seed=seed)
        run.run("w", task_of(latents), squares)
        result.append((flat(latents), run.losses))
    assert torch.equal(result[0][0], result[1][0]) and result[0][1] == result[1][1]
    assert not torch.equal(result[0][0], result[2][0])


# --- streams ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("layout", ["llama", "qwen2", "mistral", "phi"])
def test_streams_of_each_pass_are_those_of_plain_calls(tmp_path, monkeypatch, layout):
    """Student inputs through trained blocks, the first target full on full, the second full on the earlier blocks."""
    monkeypatch.setattr(streams, "TOGETHER", 4)  # 6 sequences: a part of 4 and one of 2
    names = [name for name, m in tiny.model(layout).model.layers[0].named_modules() if isinstance(m, torch.nn.Linear)]
    run, latents = trainer(tmp_path, layout, (names[0], names[-1]))
    calls = []

    def noted(task, loss, of_fit, chosen, first):
        calls.append((first, [stream.hidden.clone() for stream in of_fit]))
        for tensor in task.tensors.values():
            tensor *= 1.5
        return [0.0]

    monkeypatch.setattr(training, "fit", noted)
    run.run("one", task_of(latents), squares)
    run.run("two", task_of(latents, earlier=True, trained=(1,)), squares)
    made = tiny.model(layout)
    hidden, kwargs = block_inputs(made, IDS)
    start, (first, second) = torch.cat(hidden), made.model.layers
    before = {n: 1.1 * first.get_submodule(n).weight for n in (names[0], names[-1])}
    full1 = first(start, **kwargs[0])
    full2 = second(full1, **kwargs[1])
    student1 = doubled(first, kwargs[0], before, 1.5)(start)
    wants = [
        (0, [start, full1]),
        (0, [student1, full2]),
        (6, [student1, full2, second(student1, **kwargs[1])]),  # the first block is left alone in the second pass
    ]
    assert len(calls) == 3
    for (number, passed), (step, want) in zip(calls, wants, strict=True):
        assert number == step and len(passed) == len(want)
        for actual, reference in zip(passed, want):
            torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_dtype_and_place_of_streams(tmp_path):
    made = tiny.model("llama")
    wide, _ = streams.embedded(made, IDS, "float32", "device")
    host, _ = streams.embedded(made, IDS, "float32", "host")
    half, _ = streams.embedded(made, IDS, "bfloat16", "device")
    assert torch.equal(wide.hidden, host.hidden) and half.hidden.dtype == torch.bfloat16
    assert torch.equal(half.hidden, wide.hidden.bfloat16()) and half.take(slice(2)).dtype == torch.float32
    rows = torch.tensor([4, 1])
    assert torch.equal(wide.take(rows), wide.hidden[[4, 1]])
    mapped = wide.mapped(lambda x: 2 * x)
    assert torch.equal(mapped.hidden, 2 * wide.hidden) and mapped.hidden.data_ptr() != wide.hidden.data_ptr()
    wide.advance(lambda x: 3 * x)
    assert torch.equal(wide.hidden, 3 * host.hidden)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_a_gpu_from_host_memory(tmp_path):
    """Replayed steps on pinned streams give what the CPU gives, to float32's accuracy."""
    run, latents = trainer(tmp_path / "cpu")
    run.run("w", task_of(latents), squares)
    made = tiny.model("llama").cuda()
    there = latents_of(made, NAMES)
    chosen = BlockSettings(epochs=2, batch=2, streams="float32", place="host")
    other = BlockTrainer(made, IDS, chosen, tmp_path / "gpu", "test")
    other.run("w", task_of(there), squares)
    assert other.start.hidden.is_pinned() and other.losses == pytest.approx(run.losses, rel=1e-3)
    for a, b in zip(latents, there):
        for name in NAMES:
            torch.testing.assert_close(a[name], b[name].cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_compiled_step_takes_the_gradient_of_a_plain_one(monkeypatch, columns):
    """Of fake-quantized weights, also of split channels, and of quantized inputs; sums are in another order."""
    chosen = Config(compute="float32", tokens=96, group=16, act_bits=8, split="rounding_aware" if columns else "none")
    made, result = tiny.model("llama").cuda(), []
    for form in (lambda function, *_: torch.compile(function), lambda function, *_: function):
        monkeypatch.setattr(training, "compiled", form)
        states = bitbybit.trained_blocks(LowBitModel(made), made, {}, chosen)
        if columns:
            bitbybit.split_channels(made, states, IDS, chosen)
        start, kwargs = streams.embedded(made, IDS, "float32", "device")
        task = bitbybit.block_task(states[0], kwargs[0], True, [Precision(4, 8)], False)
        losses = fit(task, partial(bitbybit.loss, [1.0], 1.0), [start, start], chosen.settings())
        result.append((losses, states[0].latent["mlp.up_proj"]))
    (losses, latent), (plain_losses, plain) = result
    assert losses == pytest.approx(plain_losses, rel=1e-3) and losses != plain_losses[::-1]
    moved = (plain - made.model.layers[0].mlp.up_proj.weight).abs().mean()
    assert (latent - plain).abs().mean() < 0.05 * moved


def test_a_short_training_is_not_compiled(monkeypatch, tmp_path):
    """Compiling takes longer than a thousand steps; block-wise and end-to-end trainers say how many they take."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda function: made.append(function) or "compiled")
    gpu, plain = torch.device("cuda"), lambda x: x
    assert compiled.compiled(plain, gpu, compiled.WORTH - 1) is plain and not made
    assert compiled.compiled(plain, gpu, compiled.WORTH) == "compiled" and made == [plain]
    assert compiled.compiled(plain, torch.device("cpu"), 10**6) is plain
    lengths = []
    for module in (training, end_to_end):
        monkeypatch.setattr(module, "compiled", lambda function, device, steps: lengths.append(steps) or function)
    run, latents = trainer(tmp_path)
    run.run("w", task_of(latents), squares)
    weight = torch.ones(2)
    chosen = end_to_end.EndToEndSettings(1e-3, 3, 2)
    end_to_end.train(lambda rows: weight.sum() * len(rows), {"w": weight}, IDS, chosen, tmp_path / "e", "test")
    assert lengths == [6, 6, 9]


# --- the dtype that is computed in ------------------------------------------------------------------------------------


def test_parameters_are_cast_in_a_copy_and_buffers_are_not():
    model = tiny.model("llama")
    made = streams.computing(model, "bfloat16")
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16} and made.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32, "positions would be rounded to 8 bits"
    assert streams.computing(model, "float32") is model
    assert made.lm_head.weight is made.model.embed_tokens.weight, "the copy ties what the model ties"


# --- going on after a kill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_in", [1, 2, 3])
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path, monkeypatch, killed_in):
    """Two passes of two blocks are four fits; the run is killed in the middle of one of them."""

    def whole(folder):
        run, latents = trainer(folder)
        run.run("one", task_of(latents), squares)
        run.run("two", task_of(latents, earlier=True), squares)
        run.finish()
        return run.losses, run.tokens, flat(latents)

    uninterrupted = whole(tmp_path / "whole")
    true_fit, fits = training.fit, []

    def counted(*args):
        fits.append(None)
        if len(fits) == killed_in + 1:
            raise KeyboardInterrupt
        return true_fit(*args)

    monkeypatch.setattr(training, "fit", counted)
    with pytest.raises(KeyboardInterrupt):
        whole(tmp_path / "killed")
    assert len(list((tmp_path / "killed").glob("*.safetensors"))) == killed_in
    losses, tokens, weights = whole(tmp_path / "killed")
    assert len(fits) == 5, "what was trained before the kill is not trained again"
    assert (losses, tokens) == uninterrupted[:2] and torch.equal(weights, uninterrupted[2])
    assert not (tmp_path / "killed").exists()


def test_checkpoints_belong_to_model_text_settings_and_code(monkeypatch):
    made, other = tiny.model("llama"), tiny.model("llama", seed=1)
    folders = [
        checkpoint_folder(made, IDS, training.__file__, 1),
        checkpoint_folder(other, IDS, training.__file__, 1),
        checkpoint_folder(made, IDS + 1, training.__file__, 1),
        checkpoint_folder(made, IDS, training.__file__, 2),
        checkpoint_folder(made, IDS, streams.__file__, 1),
    ]
    assert len(set(folders)) == 5 and folders[0] == checkpoint_folder(made, IDS, training.__file__, 1)
    assert all(folder.parent == job.BUILD / "training" for folder in folders)


def test_tokens_are_those_that_trained(tmp_path):
    """Two blocks: a pass that trains one of them counts a half of its tokens, one that trains none counts nothing."""
    run, latents = trainer(tmp_path)
    counted = []
    for number, trained in enumerate([(0, 1), (1,), ()]):
        run.run(f"w{number}", task_of(latents, trained=trained), squares)
        counted.append(run.tokens)
    whole = 2 * 6 * 16
    assert counted == [whole, 3 * whole // 2, 3 * whole // 2]


def test_no_training_at_all(tmp_path):
    run, latents = trainer(tmp_path, epochs=0)
    before = flat(latents)
    run.run("w", task_of(latents), squares)
    assert run.tokens == 0 and run.losses == []
    assert torch.equal(flat(latents), before)
    assert len(blocks(run.model)) == 2
