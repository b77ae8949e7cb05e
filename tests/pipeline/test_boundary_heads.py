"""Heads of boundaries: shared, trained, of a shortlist of the vocabulary; whatever they guess, tokens are the same."""

import json
import re
from collections import Counter

import pytest
import torch
from heads_for_tests import make_head
from node_trees import chain_behind
from pipeline_runs import PROMPTS, Bench, begin_message

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.models.trained.exit_heads import ModelHead, OracleHead, ShortlistSampler
from ppd_runtime.models.trained.heads import describe_heads, load_head
from ppd_runtime.models.trained.shortlist import shortlist
from ppd_runtime.pipeline.messages import MISS, Guesses, PromptStates, Rows, Token
from ppd_runtime.pipeline.ports import next_wait
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.layouts import DECIDER

SAMPLED = {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.1, "seed": 4}


@pytest.fixture(scope="module")
def heads(tmp_path_factory, folder):
    """A folder of heads for layers 1 and 3, one of each kind."""
    place = tmp_path_factory.mktemp("heads")
    make_head(place / "first", folder, "affine", 1)
    make_head(place / "second", folder, "lm-head", 3)
    return place


@pytest.mark.parametrize(
    ("own", "sampling"),
    [
        ({"guess_vocab": 100}, {}),
        ({"guess_vocab": 100}, SAMPLED),
        ({"trained": True}, {"temperature": 1.0, "seed": 3}),
        ({"trained": True, "guess_vocab": 50}, {}),
        ({"trained": True, "guess_vocab": 50}, SAMPLED),
        ({"guess_vocab": 1, "k": 1}, {"temperature": 1.0, "seed": 3}),
    ],
    ids=str,
)
def test_tokens_are_ordinary_decodings(folder, heads, own, sampling):
    settings = {"stages": 3, **own}
    if settings.pop("trained", False):
        settings["exit_head"] = heads
    ordinary = OrdinaryDecoding(folder)
    with PPDRuntime(folder, transport="local", rows=2, **settings) as runtime:
        expected = ordinary.generate(PROMPTS[1], max_new_tokens=16, ignore_eos=True, **sampling)
        result = runtime.generate(PROMPTS[1], max_new_tokens=16, ignore_eos=True, **sampling)
    assert result.token_ids == expected.token_ids
    outside = [token for token in result.token_ids if token >= own.get("guess_vocab", 300)]
    assert result.stats.outside_guess_vocab == len(outside)


def test_heads_stand_at_the_boundaries_behind_their_layers(folder, heads):
    runtime = PPDRuntime(folder, stages=3, exit_head=heads)
    assert runtime.cuts == (1, 3)
    found = {spec.rank: getattr(spec.exit_head, "kind", spec.exit_head) for spec in runtime._specs}
    assert found == {0: "shared", 1: "affine", 2: "lm-head"}
    runtime = PPDRuntime(folder, cuts="1,2,3", exit_head=heads / "second")
    assert [getattr(spec.exit_head, "kind", spec.exit_head) for spec in runtime._specs] == [*["shared"] * 3, "lm-head"]


def test_an_oracle_is_right_at_the_first_boundary(folder):
    prompt, told = [1, 2, 3], {"max_new_tokens": 12, "ignore_eos": True}
    expected = OrdinaryDecoding(folder).generate(prompt, **told).token_ids
    oracle = OracleHead(((*prompt, *expected),), 1.0, 300)
    with PPDRuntime(folder, stages=3, k=2, exit_head=oracle, transport="local") as runtime:
        result = runtime.generate(prompt, **told)
    assert result.token_ids == expected
    assert result.stats.first_boundary == (11, 0, 0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_shortlists_head_has_its_rows_alone(model_folder, tied):
    info, tokens = describe(str(model_folder("llama", tied=tied))), (3, 5, 8, 250)
    whole = load_layers(info, 3, torch.float32, "cpu", 2)
    short = load_layers(info, 3, torch.float32, "cpu", 2, tokens)
    assert short.lm_head.weight.untyped_storage().nbytes() == 4 * 4 * whole.config.hidden_size
    assert _bytes(short) == _bytes(whole) - 4 * (info.vocab_size - 4) * whole.config.hidden_size
    hidden = torch.randn(1, 2, whole.config.hidden_size, generator=torch.Generator().manual_seed(0))
    of_all, of_some = (LayerRange(model, None, 2).token_logits(hidden) for model in (whole, short))
    torch.testing.assert_close(of_some, of_all[:, list(tokens)])


def _bytes(model):
    """Of the memory behind a model's weights, each once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(size for size in storages.values() if size > 4)


def test_a_trained_heads_shortlist_is_its_rows(folder, heads):
    info, tokens = describe(str(folder)), (1, 4, 299)
    for layer, head in describe_heads(heads, info).items():
        whole, short = (
            load_layers(info, layer, torch.float32, "cpu"),
            load_layers(info, layer, torch.float32, "cpu", 0, tokens),
        )
        hidden = torch.randn(1, 1, head.hidden_size, generator=torch.Generator().manual_seed(1))
        of_all, of_some = load_head(head, whole)(hidden), load_head(head, short, tokens)(hidden)
        torch.testing.assert_close(of_some, of_all[..., list(tokens)])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, SAMPLED, {"frequency_penalty": 0.5}], ids=str)
def test_a_shortlist_is_ranked_as_if_there_were_no_others(settings):
    sampler, tokens, text = Sampler(SamplingParams(**settings)), tuple(range(0, 300, 7)), [3, 14, 14, 15]
    logits = 3 * torch.randn(300, generator=torch.Generator().manual_seed(2))
    others = torch.full_like(logits, -torch.inf)
    others[list(tokens)] = logits[list(tokens)]
    ranked = ShortlistSampler(sampler, tokens, 300)
    assert ranked.rank(logits[list(tokens)], text, 5) == sampler.rank(others, text, 5)
    (expected,) = sampler.guesses(others[None], [text], 5)
    (found,) = ranked.guesses(logits[None, list(tokens)], [text], 5)
    for (token, chance), (right, its_chance) in zip(found, expected, strict=True):
        assert token == right
        assert chance == pytest.approx(its_chance)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.3}]
)
@pytest.mark.parametrize("some", [False, True])
def test_a_sampler_ranks_alike_behind_a_text_and_a_copy_of_it(settings, some):
    """The noise is that of the text's length, penalties are for its tokens."""
    tree, nodes = chain_behind(list(range(30)), (55, 44, 32))
    logits = torch.randn(len(nodes), 60, generator=torch.Generator().manual_seed(1))
    sampler, texts = Sampler(SamplingParams(**settings)), [tree.text(node) for node in nodes]
    ranked = ShortlistSampler(sampler, tuple(range(60)), 90) if some else sampler
    found = ranked.guesses(logits, texts, 3)
    assert found == ranked.guesses(logits, [[*text] for text in texts], 3)
    assert (found == ranked.guesses(logits, texts[:1] * 4, 3)) == sampler.plain


def test_states_leave_before_the_head_is_asked(folder):
    bench, sent = Bench.of(folder), []

    class Watched(ModelHead):
        def guesses(self, hidden, texts, k):
            sent.append("head")
            return super().guesses(hidden, texts, k)

    params, stage = SamplingParams(max_new_tokens=4), bench.stage(2)
    begin = begin_message([1, 2, 3], params)

    def send(addresses, message):
        if isinstance(message, Rows | PromptStates | Guesses):
            sent.append(type(message).__name__)

    head = Watched(stage, Sampler(params))
    machine = FirstStage(TreeRange(stage, 8), head, 2, 2, 1, send, begin, repetitions=False).serve()
    for reply in (None, None, Token(DECIDER, begin.request, 3, 5, MISS), None, None, None):
        next_wait(machine, reply)
    assert sent[:4] == ["PromptStates", "head", "Rows", "head"]


def test_the_shortlist_by_counts_and_by_the_tokenizers_order(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({"7": 5, "9": 5, "2": 1, "4": 90}))
    assert shortlist(3, 10) == (0, 1, 2)
    assert [shortlist(size, 10, str(file)) for size in (1, 2, 4, 6)] == [(4,), (4, 7), (2, 4, 7, 9), (0, 1, 2, 4, 7, 9)]
    assert Counter(shortlist(10, 10, str(file))) == Counter(range(10))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"guess_vocab": 301}, "guess_vocab=301: the vocabulary has 300 tokens"),
        ({"guess_counts": "f"}, "guess_counts='f': is for guess_vocab, give that too"),
        ({"stages": 2, "guess_counts": "f"}, "guess_counts='f': is for guess_vocab, give that too"),
        ({"stages": 2, "guess_vocab": 0}, "guess_vocab=0: must be at least 1"),
        ({"stages": 2, "guess_vocab": True}, "guess_vocab=True: give a whole number"),
        ({"stages": 2, "guess_vocab": 301}, "guess_vocab=301: the vocabulary has 300 tokens"),
        ({"stages": 2, "guess_vocab": 2, "k": 3}, "k=3 is more than guess_vocab=2 tokens"),
        ({"stages": 2, "guess_vocab": 2, "guess_counts": "/none"}, "guess_counts='/none': No such file"),
        ({"stages": 2, "exit_head": "/none"}, "exit_head='/none': holds no exit_head.json"),
        ({"stages": 2, "exit_head": "HEADS"}, "was trained for layer 1, behind which there is no boundary"),
        ({"cuts": "2", "exit_head": "HEADS/second"}, "was trained for layer 3, behind which there is no boundary"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(folder, heads, settings, words):
    if "HEADS" in str(settings.get("exit_head")):
        settings = {**settings, "exit_head": settings["exit_head"].replace("HEADS", str(heads))}
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        PPDRuntime(folder, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is no JSON file"),
        ("[]", "holds no object"),
        ('{"a": 1}', "'a' is no token id below 300"),
        ('{"300": 1}', "'300' is no token id below 300"),
        ('{"1": -1}', "token 1: count=-1: give a finite number"),
        ("\xff", "is no JSON file"),
    ],
)
def test_a_file_that_holds_no_counts(folder, tmp_path, content, words):
    file = tmp_path / "counts.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=re.escape(words)):
        PPDRuntime(folder, stages=2, guess_vocab=5, guess_counts=file)


def test_two_heads_for_one_layer(folder, heads, tmp_path):
    for name in ("a", "b"):
        make_head(tmp_path / name, folder, "affine", 2)
    with pytest.raises(ValueError, match="a and b are both for layer 2, keep one of them"):
        PPDRuntime(folder, stages=2, exit_head=tmp_path)
