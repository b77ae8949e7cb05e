"""The exit head's recipe: the paper's defaults, what its loss is, that it helps, that it resumes."""

import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from heads_for_tests import shake, write_texts
from models_for_tests import END_ID, VOCAB_SIZE, load_stage
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.trained.heads import AFFINE, KINDS, LM_HEAD, describe_head, load_head, new_head
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.training.exit_head import (
    CROSS_ENTROPY,
    DISTIL,
    LOSSES,
    ExitHeadRun,
    HeadRecipe,
    HeadTraining,
    recipe_for,
)
from ppd_runtime.training.head_comparison import WAYS, compare_heads
from ppd_runtime.training.texts import read_texts, token_rows

ModelFolder = Callable[..., Path]
QUICK = HeadRecipe(exit_layer=2, loss=DISTIL, learning_rate=0.01, batch_size=4, max_length=32, epochs=1, max_steps=12)


def run_on(model: Path, data: Path, recipe: HeadRecipe = QUICK, out: str = "head", dtype: str = "auto") -> ExitHeadRun:
    return ExitHeadRun(str(model), str(data), recipe, data.parent / out, dtype)


def training_of(model: Path, recipe: HeadRecipe = QUICK) -> HeadTraining:
    rows = torch.randint(1, 300, (10, 17), generator=torch.Generator().manual_seed(0))
    return HeadTraining(recipe, load_stage(model), rows)


def test_the_papers_table_4(model_folder: ModelFolder) -> None:
    recipe = recipe_for(20, LM_HEAD)
    assert (recipe.epochs, recipe.learning_rate, recipe.batch_size) == (3, 2e-5, 128)
    assert (recipe.loss, recipe.max_length) == (CROSS_ENTROPY, 2048)
    assert (recipe.warmup_ratio, recipe.weight_decay, recipe.max_steps) == (0.04, 0.0, None)
    assert isinstance(training_of(model_folder("llama")).optimizer, torch.optim.AdamW)


def test_each_row_comes_once_an_epoch() -> None:
    recipe = HeadRecipe(exit_layer=2, batch_size=4, epochs=3, seed=5)
    assert recipe.num_steps(10) == 9
    batches = [recipe.batch(step, 10).tolist() for step in range(9)]
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    epochs = [list(itertools.chain(*batches[start : start + 3])) for start in (0, 3, 6)]
    assert all(Counter(epoch) == Counter(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [recipe.batch(step, 10).tolist() for step in (7, 2)] == [batches[7], batches[2]]
    assert replace(recipe, seed=6).batch(0, 10).tolist() != batches[0]
    assert replace(recipe, max_steps=2).num_steps(10) == 2


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = HeadRecipe(exit_layer=2, learning_rate=1.0)
    rates = [recipe.learning_rate_at(step, 100) for step in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
    assert 0 < rates[-1] < 0.001
    assert recipe.learning_rate_at(0, 1) == 1.0


def test_recipes_by_name() -> None:
    assert recipe_for(2, LM_HEAD, "quick") == replace(recipe_for(2, AFFINE), kind=LM_HEAD)
    assert recipe_for(2, AFFINE, "paper") == HeadRecipe(exit_layer=2, kind=AFFINE)
    changed = recipe_for(2, AFFINE, loss=CROSS_ENTROPY, max_steps=None, seed=3)
    assert changed == replace(recipe_for(2, AFFINE), loss=CROSS_ENTROPY, seed=3)
    with pytest.raises(ValueError, match="recipe='slow': choose one of paper, quick"):
        recipe_for(2, LM_HEAD, "slow")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_of_a_new_head(model_folder: ModelFolder, family: str, kind: str) -> None:
    """Before training it is what transformers' own hidden states give through the model's own norm and head."""
    folder = model_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for loss in LOSSES:
        training = training_of(folder, replace(QUICK, loss=loss, kind=kind))
        with torch.no_grad():
            output = model(training.rows[:, :-1], output_hidden_states=True)
            exit_logits = load_stage(folder).head(output.hidden_states[2]).log_softmax(-1)
            if loss == CROSS_ENTROPY:
                expected = F.nll_loss(exit_logits.flatten(0, 1), training.rows[:, 1:].flatten())
            else:
                expected = -(output.logits.softmax(-1) * exit_logits).sum(-1).mean()
            assert training.loss(*training.read(range(10))) == pytest.approx(float(expected), rel=1e-4)


def test_a_batch_in_parts_gives_the_same_step(model_folder: ModelFolder) -> None:
    whole, parts = training_of(model_folder("llama")), training_of(model_folder("llama"))
    parts._rows_at_once = 3
    assert whole._rows_at_once > 4
    assert whole.step() == pytest.approx(parts.step(), rel=1e-5)
    gradients = [training.head.lm_head.weight.grad for training in (whole, parts)]
    assert torch.allclose(*gradients, atol=1e-6)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_training_helps_on_held_out_text(model_folder: ModelFolder, tmp_path: Path, kind: str, loss: str) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("llama")
    run = run_on(folder, data, replace(QUICK, kind=kind, loss=loss, max_steps=40, epochs=9))
    before = {name: tensor.clone() for name, tensor in run.stage.model.state_dict().items()}
    losses: list[float] = []
    run.train(lambda step, loss: losses.append(loss))
    comparison = run.finish()
    assert len(losses) == 40
    assert losses[-1] < losses[0]
    gain = {name: getattr(comparison.before, name) - getattr(comparison.after, name) for name in ("loss", "divergence")}
    assert gain["loss" if loss == CROSS_ENTROPY else "divergence"] > 0.1
    if loss == DISTIL:
        for way in WAYS:
            assert comparison.after.match_rates[way][5] > comparison.before.match_rates[way][5]
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.stage.model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "texts.jsonl"]
    card = json.loads((tmp_path / "head" / "exit_head.json").read_text())["training"]
    assert card["held_out"]["after"]["match_rates"] == {
        way: {str(k): rate for k, rate in rates.items()} for way, rates in comparison.after.match_rates.items()
    }
    assert (card["loss"], card["steps"], card["tokens"]) == (loss, 40, 32 * sum(map(len, batches(run))))


def batches(run: ExitHeadRun) -> list[list[int]]:
    return [run.training.batch(step).tolist() for step in range(run.training.num_steps)]


def test_the_folder_holds_what_was_trained(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl", key="prompt"), model_folder("gemma2", dtype="bfloat16")
    run = run_on(folder, data, replace(QUICK, kind=AFFINE), dtype="bfloat16")
    run.train()
    run.finish()
    known = describe_head(tmp_path / "head", describe(str(folder)))
    loaded = load_head(known, run.stage.model)
    states = torch.randn(1, 7, 32, dtype=torch.bfloat16)
    assert {p.dtype for p in run.training.head.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(loaded(states), run.training.logits(states))


@pytest.mark.parametrize(("kind", "dtype"), [(LM_HEAD, "bfloat16"), (AFFINE, "float16")])
def test_half_precision_models_teach_too(model_folder: ModelFolder, tmp_path: Path, kind: str, dtype: str) -> None:
    recipe = replace(QUICK, kind=kind, max_steps=30, epochs=9)
    run = run_on(model_folder("llama"), write_texts(tmp_path / "texts.jsonl"), recipe, dtype=dtype)
    run.train()
    comparison = run.finish()
    assert comparison.after.divergence < comparison.before.divergence - 0.1


def test_settings_are_not_mixed(model_folder: ModelFolder, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "texts.jsonl")
    run = run_on(model_folder("llama"), data)
    run.train()
    kept = run.checkpoint.path.read_bytes()
    with pytest.raises(ValueError, match=r"unfinished training with seed=0, not 1: go on with the same settings"):
        run_on(model_folder("llama"), data, replace(QUICK, seed=1)).train()
    with pytest.raises(ValueError, match=r"a model of other weights"):
        run_on(model_folder("llama", seed=1), data).train()
    write_texts(data, number=130)
    with pytest.raises(ValueError, match=r"data_sha256="):
        run_on(model_folder("llama"), data).train()
    assert run.checkpoint.path.read_bytes() == kept
    run.checkpoint.path.write_bytes(kept[:100])
    with pytest.raises(ValueError, match=r"no unfinished training .*delete it to begin again"):
        run.train()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kind": "mlp"}, "kind='mlp': choose one of lm-head, affine"),
        ({"loss": "l2"}, "loss='l2': choose one of cross-entropy, distil"),
        ({"exit_layer": 0}, "exit_layer=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_length": 0}, "max_length=0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"weight_decay": -1.0}, "weight_decay=-1"),
        ({"warmup_ratio": 1.5}, "warmup_ratio=1.5"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_recipes_are_checked(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HeadRecipe(**({"exit_layer": 2} | changes))


def test_mistakes_are_found_before_anything_is_written(model_folder: ModelFolder, tmp_path: Path) -> None:
    data, folder = write_texts(tmp_path / "texts.jsonl"), model_folder("llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    before = sorted(tmp_path.rglob("*"))
    for named, recipe, out in (
        ("exit_layer=4: with 4 layers choose 1 to 3", replace(QUICK, exit_layer=4), "head"),
        (r"out='.*full' is there already", QUICK, "full"),
        (r"out='.*texts.jsonl' is there already", QUICK, "texts.jsonl"),
        (r"out='.*none/head': give a new folder in one that exists", QUICK, "none/head"),
        (r"its held-out texts have no 401 tokens", replace(QUICK, max_length=400), "head"),
    ):
        with pytest.raises(ValueError, match=named):
            run_on(folder, data, recipe, out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"line 2: no JSON at column"),
        ("a.jsonl", b'{"text": "a"}\n{"other": "b"}', r'line 2: no text under "text" or "prompt"'),
        ("a.jsonl", b'{"text": ""}', r'line 1: no text under "text" or "prompt"'),
        ("a.jsonl", b'{"text": "a"}\n', r"holds 1 different texts; at least 2"),
        ("a.jsonl", b'{"text": "a"}\n' * 3, r"holds 1 different texts; at least 2"),
        ("a.txt", b"one\ntwo \xff\n", r"line 2: no UTF-8 text"),
        ("a.txt", b"", r"holds 0 different texts"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{named}"):
        read_texts(str(tmp_path / name))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none: No such file or directory; give a file of texts, or 'demo'"):
        read_texts(str(tmp_path / "none"))


def test_held_out_texts_are_kept_from_training(tmp_path: Path) -> None:
    texts = read_texts(str(write_texts(tmp_path / "a.jsonl", 100)))
    assert (len(texts.training), len(texts.held_out)) == (96, 4)
    assert not set(texts.training) & set(texts.held_out)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join([lines[0], *reversed(lines), lines[3]]))
    assert set(read_texts(str(tmp_path / "b.jsonl")).held_out) == set(texts.held_out)


def test_a_text_that_fills_a_file_is_trained_on_or_held_out(tmp_path: Path) -> None:
    for other in range(8):
        lines = [json.dumps({"text": text}) for text in ["the same"] * 97 + [f"{other}{i}" for i in range(3)]]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        texts = read_texts(str(tmp_path / "a.jsonl"))
        assert (len(set(texts.held_out)), len(set(texts.training))) == (1, 3)


def test_a_plain_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} " + "Grüße, 東京. " * 30 for i in range(200)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    texts = read_texts(str(tmp_path / "a.txt"))
    assert sum(text.count("Paragraph") for text in (*texts.training, *texts.held_out)) == 200
    assert all(text.startswith("Paragraph") for text in texts.training)
    assert len(texts.held_out) == 1


def test_the_demo_corpus_keeps_its_own_split() -> None:
    texts = read_texts("demo")
    assert not set(texts.training) & set(texts.held_out)
    assert len(texts.training) > 20 * len(texts.held_out) / 2
    assert len(texts.held_out) > 10


def test_rows_of_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ("The quick", "brown fox jumps")
    ids = [[*tokenizer.encode(text), END_ID] for text in texts]
    flat = list(itertools.chain(*ids))
    rows = token_rows(tokenizer, texts, 3, VOCAB_SIZE)
    assert rows.shape == (len(flat) // 4, 4)
    assert rows.flatten().tolist() == flat[: len(flat) // 4 * 4]


@torch.no_grad()
def test_a_comparison_token_by_token(model_folder: ModelFolder) -> None:
    """Full depth chooses and each head ranks as the runtime's sampler does."""
    stage, ks = load_stage(model_folder("llama")), (1, 3, 5)
    head = new_head(LM_HEAD, stage.model)
    shake(head)
    generator = torch.Generator().manual_seed(2)
    passes = []
    for length in (9, 6):
        states, final = (torch.randn(1, length, 32, generator=generator) for _ in range(2))
        passes.append((states, stage.head(states + 0.3 * final), torch.arange(length)))
    comparison = compare_heads(stage.head, head, passes, ks, seed=7)
    greedy = Sampler(SamplingParams())
    for network, scores in ((stage.head, comparison.before), (head, comparison.after)):
        hits: Counter[tuple[str, int]] = Counter()
        for number, (states, final, _) in enumerate(passes):
            sampler = Sampler(SamplingParams(temperature=1.0, seed=7 + number))
            for position, (logits, full) in enumerate(zip(network(states)[0], final[0], strict=True)):
                history = [1] * position
                sampled = sampler.choose(full, history)
                for k in ks:
                    hits["greedy", k] += greedy.choose(full, history) in greedy.rank(logits, history, k)
                    hits["shared_noise", k] += sampled in sampler.rank(logits, history, k)
                    hits["logits", k] += sampled in greedy.rank(logits, history, k)
        assert scores.match_rates == {way: {k: hits[way, k] / 15 for k in ks} for way in WAYS}
    labels = torch.cat([labels for *_, labels in passes])
    finals = torch.cat([final[0] for _, final, _ in passes])
    assert comparison.final_loss == pytest.approx(float(F.cross_entropy(finals, labels)), rel=1e-5)
    after = torch.cat([head(states)[0] for states, *_ in passes])
    assert comparison.after.loss == pytest.approx(float(F.cross_entropy(after, labels)), rel=1e-5)
    divergence = (finals.softmax(-1) * (finals.log_softmax(-1) - after.log_softmax(-1))).sum(-1).mean()
    assert comparison.after.divergence == pytest.approx(float(divergence), rel=1e-4)
    assert comparison.num_tokens == 15
