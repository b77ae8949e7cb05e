"""The staged layout's machines over real stages: every token is ordinary decoding's, whatever the order of messages."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from grids import pairs_first
from guessing_turns import TakesTurns
from machine_network import MachineNetwork
from node_trees import chain_behind
from pipeline_runs import PROMPTS, Bench, begin_message

from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.cli.generate import print_stream
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.loading import load_layers
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.messages import PromptStates
from ppd_runtime.pipeline.ports import Call, give_result, next_wait
from ppd_runtime.pipeline.staged.first_stage import FirstStage
from ppd_runtime.pipeline.staged.last_stage import LastStage
from ppd_runtime.pipeline.staged.ports import Logits
from ppd_runtime.results import NOTHING_NEW, News
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.tracing.spans import Kind
from ppd_runtime.tracing.timeline import Timeline


@pytest.mark.parametrize(
    ("family", "layout", "temperature", "dtype"),
    pairs_first(
        ["llama", "gemma2", "mistral"],
        [((2,), 1, 1), ((1, 2, 3), 3, 4), ((1, 3), 2, 8)],
        [0.0, 1.0],
        ["float32", "bfloat16"],
    ),
)
def test_tokens_and_bits_are_ordinary_decodings(model_folder, family, layout, temperature, dtype):
    cuts, k, rows = layout
    bench = Bench.of(model_folder(family), dtype)
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    for number, text in enumerate(PROMPTS[1:3]):
        prompt = bench.prompt_ids(text)
        ordinary = bench.ordinary(prompt, params)
        staged = bench.staged(prompt, params, cuts, k, rows, seed=number or None, impatience=0.003 * (number % 2))
        assert staged.tokens == ordinary.tokens
        assert staged.reason == ordinary.reason
        assert all(a.equal(b) for a, b in zip(staged.decisive, ordinary.decisive, strict=True))


def test_the_first_boundary_of_each_token_is_counted(model_folder):
    bench = Bench.of(model_folder("llama"))
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    staged = bench.staged(bench.prompt_ids(PROMPTS[2]), params, (1, 3), k=300, rows=1)
    assert staged.first.first_boundary == [19, 0, 0], "among so many candidates is every token"
    staged = bench.staged(bench.prompt_ids(PROMPTS[2]), params, (1, 3), k=1, rows=1)
    assert sum(staged.first.first_boundary) == 19


@pytest.mark.parametrize("tied", [True, False])
def test_each_weight_is_in_one_stage(model_folder, tied):
    """But for the heads: each boundary has the final norm and the head, too."""
    info = describe(str(model_folder("llama", tied=tied)))
    whole = load_layers(info, info.num_layers, torch.float32, "cpu")
    head = {"lm_head.weight", "model.norm.weight"}
    sizes = {name: tensor.numel() for name, tensor in whole.state_dict().items()}
    found: Counter[str] = Counter()
    for first, last in pairwise([0, 1, 3, info.num_layers]):
        stage = load_layers(info, last, torch.float32, "cpu", first)
        stored = {name: tensor for name, tensor in stage.state_dict().items() if occupied(tensor) == tensor.nbytes}
        assert all(occupied(t) == 4 for name, t in stage.state_dict().items() if name not in stored)
        found.update(list(stored))
    embedding = {"model.embed_tokens.weight"}
    assert found.keys() == sizes.keys()
    assert {name for name, times in found.items() if times > 1} == head | (embedding if tied else set())


def occupied(tensor):
    """Bytes of memory behind a tensor."""
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stages": 0}, "stages=0: must be at least 1"),
        ({"stages": 1, "repetitions": False}, "repetitions=False with stages=1: give drafter"),
        ({"stages": 1, "exit_head": "heads"}, "exit_head='heads' with stages=1: is for boundaries"),
        ({"stages": 1, "k": 0}, "k=0: must be at least 1"),
        ({"stages": 5}, "stages=5: with 4 layers choose 2 to 4"),
        ({"stages": True}, "stages=True: give a whole number"),
        ({"cuts": "3,2"}, "cuts=3,2: give layers in ascending order"),
        ({"cuts": "0,3"}, "cuts=0: must be at least 1"),
        ({"cuts": "a"}, "cuts='a': give layers"),
        ({"cuts": ""}, "cuts='': give layers"),
        ({"cuts": (1, 4)}, "cuts='1,4': with 4 layers give layers from 1 to 3"),
        ({"cuts": "1,2", "stages": 4}, "cuts=1,2 with stages=4: 2 borders make 3 stages"),
        ({"stages": 2, "exit_layer": 2}, "exit_layer=2 with stages=2: is for the paper's layout"),
        ({"stages": 2, "workers": 1}, "workers=1 with stages=2: is for the paper's layout"),
        ({"stages": 2, "rows": 0}, "rows=0: must be at least 1"),
        ({"rows": 2}, "rows=2: is for the staged layout"),
        ({"repetitions": False}, "repetitions=False: is for the staged layout"),
        ({"stages": 2, "run_ahead": False}, "run_ahead=False with stages=2: is for the paper's layout"),
        ({"stages": 2, "repetitions": 1}, "repetitions=1: give True or False"),
        ({"stages": 2, "k": 0}, "k=0: must be at least 1"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(model_folder, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        PPDRuntime(model_folder("llama", num_layers=4), **settings)


def test_in_threads_with_a_trace(model_folder):
    folder = model_folder("llama", num_layers=4)
    expected = OrdinaryDecoding(folder).generate("word1 word2", max_new_tokens=20, ignore_eos=True)
    with PPDRuntime(folder, stages=3, transport="local", trace=True) as runtime:
        result = runtime.generate("word1 word2", max_new_tokens=20, ignore_eos=True)
    assert result.token_ids == expected.token_ids
    assert sum(result.stats.first_boundary) == result.stats.hits + result.stats.misses == 19
    names = [result.trace.name(process.rank) for process in result.trace.processes]
    assert sorted(names) == ["stage 1", "stage 2", "stage 3"]
    assert {box.row for box in Timeline(result.trace, 12, str).boxes()} == {0, 1, 2}


@pytest.mark.parametrize("passes", [False, True])
def test_a_stream_tells_who_named_each_token_and_what_is_computed_where_that_is_wanted(model_folder, passes):
    folder = model_folder("llama", num_layers=4)
    settings = {"max_new_tokens": 20, "ignore_eos": True}
    expected = OrdinaryDecoding(folder).generate("word1 word2", **settings)
    with PPDRuntime(folder, stages=3, transport="local") as runtime:
        stream = runtime.stream("word1 word2", boundaries=not passes, passes=passes, **settings)
        events = [*stream]
        news = [*(event.news for event in events), stream.result.news]
        plain = runtime.stream("word1 word2", **settings)
        assert not any(event.news.boundaries for event in plain)
        assert not plain.result.news.boundaries
        assert sum(plain.result.stats.first_boundary) == 19, "it is counted all the same"
        assert not runtime.generate("word1 word2", **settings).news.boundaries, "nobody reads along"
    assert stream.result.token_ids == expected.token_ids
    named = dict(pair for told in news for pair in told.boundaries)
    first = len(expected.prompt_ids)
    assert sorted(named) == list(range(first, first + 19)), "all but the last"
    counts = Counter(max(boundary, 1) for boundary in named.values())
    assert tuple(counts[boundary] for boundary in (1, 2, 3)) == stream.result.stats.first_boundary
    spans = {process.rank: process.spans for told in news for process in told.spans}
    assert set(spans) == ({0, 1, 2} if passes else set())
    assert stream.result.trace is None
    chosen = [s.token for told in news for p in told.spans for s in p.spans if p.rank == 0 and s.kind == Kind.CHOOSE]
    assert chosen == (list(expected.token_ids) if passes else [])


class Replayed:
    """A stream's events once more."""

    def __init__(self, events):
        self._events = events

    def __iter__(self):
        return self._events


def test_colours_in_a_terminal_say_who_named_a_token(model_folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    folder = model_folder("llama", num_layers=4)
    with PPDRuntime(folder, stages=2, transport="local", speculation="always") as runtime:
        stream = runtime.stream("word1 word2", max_new_tokens=12, ignore_eos=True, boundaries=True)
        events = [replace(event, text=f" {event.position}") for event in stream]
    news = [*(event.news for event in events), stream.result.news]
    named = dict(pair for told in news for pair in told.boundaries)
    named[events[3].position] = None  # it was lost
    told = [
        tuple(pair for pair in named.items() if pair[0] == event.position - 1 and pair[1] is not None)
        for event in events
    ]
    replayed = Replayed(replace(e, news=News(pairs)) for e, pairs in zip(events, told, strict=True))
    replayed.result = replace(stream.result, news=NOTHING_NEW)
    print_stream(replayed, "word1 word2", stages=2, legend=True)
    printed = capsys.readouterr()
    styles = {0: "\x1b[36m {}\x1b[0m", 1: "\x1b[32m {}\x1b[0m", 2: " {}", None: " {}"}
    expected = "".join(styles[named.get(event.position)].format(event.position) for event in events)
    assert printed.out == f"\x1b[2mword1 word2\x1b[0m{expected}\n"
    assert {named[event.position] for event in events[:3]} != {2}
    assert re.sub(r"\x1b\[\d*m", "", printed.err) == (
        "named first by guesses before layer 1, boundary 1; plain: by none\n"
    )


class NotedHead:
    """Names the right token at all times; it notes which it is asked about."""

    def __init__(self, text):
        self._text, self.asked = text, set()

    def guesses(self, hidden, texts, k):
        self.asked |= {len(text) for text in texts if [*text] == self._text[: len(text)]}
        return [[(self._text[len(text)], 1.0)] for text in texts]


@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
def test_heads_are_asked_while_the_policy_has_something_guessed(model_folder, cuts):
    bench = Bench.of(model_folder("llama", num_layers=3))
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    prompt = bench.prompt_ids(PROMPTS[1])
    expected = bench.ordinary(prompt, params)
    start = len(prompt)
    head = NotedHead([*prompt, *expected.tokens])
    staged = bench.staged(prompt, params, cuts, k=1, head=head, policy=TakesTurns(8, 24))
    assert staged.tokens == expected.tokens
    assert all(torch.equal(a, b) for a, b in zip(staged.decisive, expected.decisive, strict=True))
    rests = {*range(start + 12, start + 31), *range(start + 44, start + 63)}
    assert not head.asked & rests, "what is in flight is at most three tokens further on"
    assert {*range(start, start + 8), *range(start + 33, start + 40)} <= head.asked


def test_guesses_are_those_behind_the_certain_text():
    tree, (prompt, *nodes) = chain_behind(list(range(100)), range(101, 106))
    assert tree.guessed(prompt) == []
    for number, node in enumerate(nodes, start=1):
        assert tree.guessed(node) == [*range(101, 101 + number)]
        assert [*tree.text(node)] == [*range(100), *tree.guessed(node)]


def test_a_text_is_what_it_was_though_its_history_goes_on():
    history = list(range(100))
    tree, (prompt, first, second) = chain_behind(history, (200, 201))
    texts = {node: tree.text(node) for node in (prompt, first, second)}
    history += [200, 300]
    tree.settle()
    for behind, text in enumerate(texts.values()):
        expected = [*range(100), *(200, 201)[:behind]]
        assert ([*text], len(text)) == (expected, len(expected))
        for place in (0, 99, -1, -len(expected), slice(-3, None), slice(1, 9, 2)):
            assert text[place] == expected[place]
        with pytest.raises(IndexError):
            text[len(expected)]


def test_heads_are_given_texts_that_nobody_has_copied(model_folder):
    """Of a long text each copy takes longer than all else that a stage does for a row besides its layers."""
    bench, given = Bench.of(model_folder("llama")), []
    begin = begin_message([5, 9, 5, 9, 5], SamplingParams(max_new_tokens=8))
    stage = FirstStage(TreeRange(bench.stage(2), 8), None, 2, 1, 4, lambda addresses, message: None, begin)
    stage.head = SimpleNamespace(guesses=lambda hidden, texts, k: given.extend(texts) or [[(9, 0.5)] for _ in texts])
    machine = stage.serve()
    while next_wait(machine, None).patience == 0:
        pass
    assert [[*text] for text in given][:2] == [[5, 9, 5, 9, 5], [5, 9, 5, 9, 5, 9]]
    assert all(text.history is stage.history for text in given)


def test_repetitions_are_looked_for_behind_the_prompts_states(model_folder):
    """Nobody waits for that: with a long prompt it takes milliseconds."""
    bench, sent = Bench.of(model_folder("llama")), []
    begin = begin_message([5, 9, 5, 9, 5], SamplingParams(max_new_tokens=8))
    stage = FirstStage(TreeRange(bench.stage(2), 8), None, 2, 1, 4, MachineNetwork(None).send, begin)

    def drafts():
        (drafter,) = stage.chooser._drafters
        return [draft.token for draft in drafter.guesses(drafter.newest)]

    stage.send = lambda addresses, message: sent.append((type(message), drafts()))
    stage.head = SimpleNamespace(guesses=lambda hidden, texts, k: [[(9, 0.5)] for _ in texts])
    machine = stage.serve()
    while next_wait(machine, None).patience == 0:
        pass
    assert sent[0] == (PromptStates, [])
    assert drafts() == [9]
    assert stage.chooser._successors[0].by_boundary.keys() == {0, 1}


def test_the_last_stage_decides_before_it_looks_for_messages(model_folder):
    """All the others wait for the decision."""
    bench = Bench.of(model_folder("llama"))
    begin = begin_message([5, 9, 5], SamplingParams(max_new_tokens=8))
    before = bench.stage(2)
    before.begin(8)
    states = before.run(0, 2, [5, 9, 5], 0)
    last = LastStage(TreeRange(bench.stage(first=2), 8), 4, (1,), lambda addresses, message: None, begin)
    machine = last.decode(Sampler(begin.params), bench._stop(begin.params))
    wanted = next_wait(machine, None)
    while wanted.patience == 0:
        wanted = next_wait(machine, None)
    machine.send(PromptStates(1, 1, last.epoch, 0, states))
    awaited = machine.send(None)
    while isinstance(awaited, Call):
        awaited = give_result(machine, awaited)
    assert isinstance(awaited, Logits)
