"""Chains of drafts that compiled code makes and verifies in one call: what the same passes give one by one, to the last
bit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from damage import with_numbers
from grids import nightly, pairs_first
from models_for_tests import END_ID, load_stage
from transformers import PreTrainedModel

from ppd_runtime import OrdinaryDecoding, RequestError, open_method
from ppd_runtime.methods.drafts import Draft
from ppd_runtime.methods.fused_drafting import GreedyChains
from ppd_runtime.methods.kangaroo import Kangaroo
from ppd_runtime.methods.layerskip import LayerSkip
from ppd_runtime.methods.speculation import Propose, SpeculationCounts, SpeculativeMethod, speculate
from ppd_runtime.methods.stopping import Stopping
from ppd_runtime.methods.swift import Swift, SwiftSettings
from ppd_runtime.methods.verification import acceptance_rule
from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.compiled import passes as compiled
from ppd_runtime.models.compiled.export import MOST_SEVERAL
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.compiling import compile_ahead
from ppd_runtime.models.native.drafts import DraftRule
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.caches import ATTENDED_ROWS
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet
from ppd_runtime.models.trained.adapter import new_adapter
from ppd_runtime.models.trained.probe import Probe
from ppd_runtime.sampling import highest
from ppd_runtime.sampling.highest import NO_TOKEN
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.text import StopRule

pytestmark = needs_compiler  # adapters and sparse layers are mistral's alone by day: each is compiled for itself
ModelFolder = Callable[..., Path]
PROMPT = [40, 7, 291, 65, 133]
ROUNDS = 24
STOPPINGS = [
    Stopping("constant", 1),
    Stopping("constant", 5),
    Stopping("confidence", 6, 0.15),
    Stopping("product", 9, 0.02),
    Stopping("constant", 20),
]


def compiled_stage(folder: Path) -> LayerRange:
    model = load_stage(folder).model
    return LayerRange(model, CompiledLayers(model, files_of(folder)))


def files_of(folder: Path) -> dict[int, tuple[Path, ...]]:
    return compile_ahead(describe(str(folder)), torch.float32, "cpu", (1, PassKind.SEVERAL))


def layerskip(stage: LayerRange, stopping: Stopping) -> LayerSkip:
    return LayerSkip(stage, 2, stopping)


def kangaroo(stage: LayerRange, stopping: Stopping) -> Kangaroo:
    return Kangaroo(stage, adapter_of(stage.model), 1, stopping)


def probed(stage: LayerRange, stopping: Stopping) -> LayerSkip:
    return LayerSkip(stage, 2, replace(stopping, rule="probe"), probe_of(stage))


def probe_of(stage: LayerRange) -> Probe:
    """One that says of half the states that their drafts will stay, and is not sure of most."""
    probe = Probe(stage.model.config.hidden_size).requires_grad_(False)
    probe.direction += torch.linspace(-2, 2, len(probe.direction))
    probe.bias += 0.5
    return probe


def swift(stage: LayerRange, stopping: Stopping) -> Swift:
    stage.compile_for(*SwiftSettings.pass_kinds)
    return Swift(stage, LayerSet((1,), (2,)), stopping, widest=1)


def adapter_of(model: PreTrainedModel) -> PreTrainedModel:
    return new_adapter(model, 1).requires_grad_(False)


def greedy(stage: LayerRange) -> Propose:
    return Propose(acceptance_rule("shared-noise", Sampler(SamplingParams())), stage.recorder)


def one_by_one(stage: LayerRange) -> Propose:
    propose = greedy(stage)
    propose.takes_highest_logit = False
    return propose


def lengths(method: SpeculativeMethod) -> list[int]:
    stages = [method.stage, *([method.adapter] if isinstance(method, Kangaroo) else [])]
    return [stage.length(layer) for stage in stages for layer in range(stage.num_layers)]


def passes(method: SpeculativeMethod) -> list[int]:
    return [method.stage.layer_passes, *([method.adapter.layer_passes] if isinstance(method, Kangaroo) else [])]


def entries(method: SpeculativeMethod) -> list[torch.Tensor]:
    caches = method.stage.cache.layers + (method.adapter.cache.layers if isinstance(method, Kangaroo) else [])
    return [rows[: cache.length] for cache in caches for rows in cache.rows]


def choices(method: SpeculativeMethod, draft: Draft, position: int) -> list[int]:
    """The whole model's behind each node, verified by now."""
    if draft.verified:
        return list(draft.verified.choices)
    return highest.choices(method.stage.token_logits(method.verify(draft, position)))


@pytest.mark.parametrize("family", ["mistral", pytest.param("llama", marks=nightly)])
@pytest.mark.parametrize(("make", "stopping"), pairs_first([layerskip, kangaroo, probed, swift], STOPPINGS))
def test_a_chain_is_its_drafts_one_by_one(
    model_folder: ModelFolder, family: str, make: Callable[..., SpeculativeMethod], stopping: Stopping
) -> None:
    """Tokens, choices, entries and counts, whatever is kept of each; past a step of the attended rows, and past the
    longest chain that there is code to verify."""
    folder = model_folder(family, quiet_from=1)
    both = [make(compiled_stage(folder), stopping) for _ in range(2)]
    chains = getattr(both[0], "_chains", None)
    assert isinstance(chains, GreedyChains)
    assert chains.possible, "else both ways would be the same"
    capacity, prompt = ATTENDED_ROWS + 250, list(range(30, 30 + ATTENDED_ROWS - 10))
    for method in both:
        method.begin(capacity)
        method.read(prompt)
    history, sizes = [*prompt, 9], set()
    for number in range(ROUNDS):
        most = min(stopping.most, number * 7 % 22, capacity - len(history) - 1)
        drafts = [
            method.draft(history, most, propose(method.stage))
            for method, propose in zip(both, (greedy, one_by_one), strict=True)
        ]
        assert drafts[0].tokens == drafts[1].tokens
        assert (drafts[0].parents, drafts[0].steps) == (drafts[1].parents, drafts[1].steps)
        assert not drafts[1].verified
        assert bool(drafts[0].verified) == (len(drafts[0].tokens) <= MOST_SEVERAL)
        chosen = [choices(method, draft, len(history) - 1) for method, draft in zip(both, drafts, strict=True)]
        assert chosen[0] == chosen[1]
        assert lengths(both[0]) == lengths(both[1])
        assert all(map(torch.equal, *map(entries, both))), "to the last bit"
        assert passes(both[0]) == passes(both[1])
        kept = number * 7 % len(drafts[0].tokens)
        history += [*drafts[0].tokens[1 : kept + 1], (number * 31) % 290 + 1]
        for method, draft in zip(both, drafts, strict=True):
            method.keep(draft, range(kept + 1), history)
        assert lengths(both[0]) == lengths(both[1])
        sizes.add(len(drafts[0].tokens) - 1)
    assert len(history) > ATTENDED_ROWS + 4
    assert max(sizes) <= stopping.most
    assert len(sizes) > 2 or stopping.most == 1
    assert max(sizes) > MOST_SEVERAL or stopping.most < MOST_SEVERAL or make is probed


def test_there_must_be_room_for_the_longest_chain(model_folder: ModelFolder) -> None:
    stage = compiled_stage(model_folder("llama"))
    chains = GreedyChains(stage, 2)
    stage.begin(12)
    stage.run(0, 4, PROMPT, 0)
    with pytest.raises(IndexError, match="a cache for 12 tokens cannot hold 13"):
        chains.draft(9, 5, DraftRule(7, 0.0, False))
    with pytest.raises(RuntimeError, match="layer 0 holds 5 tokens, the pass starts at position 6"):
        chains.draft(9, 6, DraftRule(1, 0.0, False))
    assert len(chains.draft(9, 5, DraftRule(6, 0.0, False)).tokens) == 6
    assert [stage.length(layer) for layer in range(4)] == [12, 12, 12, 12]
    stage.truncate(11)
    stage.cache.layers[2].length = 5
    with pytest.raises(RuntimeError, match="layer 2 holds 5 tokens, the pass starts at position 11"):
        chains.draft(9, 11, DraftRule(0, 0.0, False))
    for unknown in (-1, 300):
        stage.truncate(5)
        with pytest.raises(IndexError, match=f"token {unknown}: the embedding has 300"):
            chains.draft(unknown, 5, DraftRule(1, 0.0, False))


NAN, INF = float("nan"), float("inf")


def spoil(weight: torch.Tensor, what: str) -> set[int]:
    """Make some logits equal, or no numbers, or infinite; the tokens that can be chosen then."""
    if what == "no number":
        weight[[7, 260]] = NAN
        return {NO_TOKEN}
    if what == "the last no number":
        weight[299] = NAN
        return {NO_TOKEN}
    if what == "infinite":
        weight[11, 0], weight[290, 0] = INF, -INF
        return {NO_TOKEN}
    if what == "all equal":
        weight[:] = 0
        return {0}
    weight[[20, 250]], weight[[30, 260]] = 50 * weight[9], -50 * weight[9]
    return {20, 30}


@pytest.mark.parametrize("what", ["no number", "the last no number", "infinite", "all equal", "two equal"])
def test_choices_are_the_first_highest_logits(model_folder: ModelFolder, what: str) -> None:
    """As those of ordinary decoding, and none where it has none. Drafts are likewise, and where they end: what is no
    number before all others.
    """
    folder = model_folder("llama", quiet_from=1)
    for stopping in (Stopping("constant", 4), Stopping("confidence", 4, 0.1), Stopping("product", 4, 0.1)):
        made = []
        for propose in (greedy, one_by_one):
            model = load_stage(folder).model
            with torch.no_grad():
                possible = spoil(model.lm_head.weight, what)
            method = layerskip(LayerRange(model, CompiledLayers(model, files_of(folder))), stopping)
            method.begin(40)
            method.read(PROMPT)
            draft = method.draft([*PROMPT, 9], 4, propose(method.stage))
            made.append((draft.tokens, choices(method, draft, len(PROMPT))))
        assert made[0] == made[1]
        assert set(made[0][1]) <= possible, "else it is not what was to be tested"


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {"method": "layerskip"}), ("mistral", {"method": "swift", "widest": 1})], ids=str
)
def test_a_text_that_comes_to_no_number_ends_there(
    model_folder: ModelFolder, tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    """With ordinary decoding's tokens up to there, and its error."""
    folder = model_folder(family, quiet_from=1, tied=False)
    whole = OrdinaryDecoding(str(folder), dtype="float32").generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    last = next(place for place, token in enumerate(whole.token_ids[10:], 10) if token not in whole.token_ids[:place])
    place = ("model.embed_tokens.weight", whole.token_ids[last], NAN)
    damaged = str(with_numbers(folder, tmp_path / "damaged", *place))
    for prompt in (PROMPT, [*PROMPT, *whole.token_ids[:4]]):
        with open_method(damaged, dtype="float32", compile=True, **options) as method:
            stream, found = method.stream(prompt, max_new_tokens=40, ignore_eos=True), []
            with pytest.raises(RequestError, match=f"position {len(PROMPT) + last + 1} are NaN or infinite"):
                found.extend(event.token_id for event in stream)
            assert [*prompt, *found] == [*PROMPT, *whole.token_ids[: last + 1]]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("make", [layerskip, kangaroo, probed, swift])
def test_rounds_are_counted_and_traced_as_those_of_single_passes(
    model_folder: ModelFolder, make: Callable[..., SpeculativeMethod], traced: bool
) -> None:
    """Whole texts, so adapters have states of the round before to read, and the last round drafts nothing."""
    shown = []
    for at_once in (True, False):
        method = make(compiled_stage(model_folder("mistral", quiet_from=1)), Stopping("constant", 3))
        rule = acceptance_rule("shared-noise", Sampler(SamplingParams()))
        rule.takes_highest_logit = at_once
        recorder, progress = method.stage.recorder, SpeculationCounts()
        recorder.begin(traced)
        began = time.perf_counter()
        params = SamplingParams(max_new_tokens=25)
        stop = StopRule(params, frozenset(), None)
        text = list(speculate(method, method.stage, rule, PROMPT, params.max_new_tokens, stop, progress))
        took, ledger, spans = time.perf_counter() - began, recorder.ledger(), recorder.spans(0)
        counts = progress.drafted, progress.accepted, progress.lengths, passes(method)
        assert 0 < progress.draft_s < took
        assert 0 < progress.verify_s < took - progress.draft_s
        assert 0 < ledger.layers_s < took
        assert 0 < ledger.heads_s < took - ledger.layers_s
        assert ledger.python_s >= 0
        if spans:
            ends = [0, *(span.ended_ns for span in spans.spans)]
            assert all(span.began_ns >= end for span, end in zip(spans.spans, ends, strict=False)), "one by one"
        kept = [span._replace(began_ns=0, ended_ns=0) for span in spans.spans] if spans else []
        assert bool(kept) == traced
        shown.append((text, counts, kept))
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.5),
        SamplingParams(logits_processors=(max,)),
    ],
)
def test_only_the_highest_logit_is_drafted_this_way(params: SamplingParams) -> None:
    stage = type("_", (), {"recorder": None})
    for rule in ("shared-noise", "rejection"):
        assert not Propose(acceptance_rule(rule, Sampler(params)), stage.recorder).takes_highest_logit
        assert Propose(acceptance_rule(rule, Sampler(SamplingParams())), stage.recorder).takes_highest_logit


def test_where_layers_are_launched_from_python(model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or not compiled at all, there are no chains, and drafts are made one by one."""
    folder = model_folder("llama", quiet_from=1)
    assert not GreedyChains(load_stage(folder), 2).possible
    assert GreedyChains(compiled_stage(folder), 2).possible
    monkeypatch.setattr(compiled, "calls_python", lambda path: True)
    method = layerskip(compiled_stage(folder), Stopping("constant", 3))
    method.begin(20)
    method.read(PROMPT)
    assert not GreedyChains(method.stage, 2).possible
    draft = method.draft([*PROMPT, 9], 3, greedy(method.stage))
    assert len(draft.tokens) == 4
    assert not draft.verified


@pytest.mark.parametrize("eos", [None, END_ID + 70])
@pytest.mark.parametrize(
    ("method", "family", "settings"),
    [
        ("layerskip", "llama", {"exit_layer": 2, "num_speculations": 4}),
        ("adaspeed", "llama", {"exit_layer": 1, "threshold": 0.1}),
        ("swift", "mistral", {"widest": 1, "num_speculations": 5, "search_steps": 40, "bayes_interval": 0}),
    ],
)
def test_texts_are_ordinary_decodings(
    model_folder: ModelFolder, method: str, family: str, settings: dict[str, object], eos: int | None
) -> None:
    """With a search meanwhile, which changes what is left out, and with ends inside drafts."""
    folder = str(model_folder(family, quiet_from=1))

    def texts(name: str, **others: object) -> list[Sequence[int]]:
        prompts = ([5], [40, 7, 291, 65, 133])
        with open_method(folder, name, dtype="float32", compile=True, **others) as generator:
            if eos is not None:  # not in the model's file: it would be compiled again
                generator.info = replace(generator.info, eos_token_ids=frozenset({eos}))
            return [generator.generate(prompt, max_new_tokens=90).token_ids for prompt in prompts]

    assert texts(method, **settings) == texts("autoregressive")
