"""Texts of speculative methods by the ten thousand, and how well they follow the law of the model's own logits."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from models_for_tests import build_model
from scipy.stats import chi2
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime.methods.speculation import SpeculationCounts, SpeculativeMethod, speculate
from ppd_runtime.methods.swift import sparse_subset
from ppd_runtime.methods.verification import AcceptanceRule, RejectionSampling, Verdict, acceptance_rule
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.slicing import LayerSet
from ppd_runtime.sampling.noise import Draws
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.text import StopRule

VOCABULARY, LENGTH = 3, 5
"""Tokens that there are, and new tokens of a text that are looked at."""
MOST_TOKENS = 7
"""New tokens that are asked for: drafts reach beyond those looked at."""
PROMPT = (1, 2)
LONELY = 1e-3
"""Below this chance, corrected for how many were asked for, samples are taken not to follow their law."""

Text = tuple[int, ...]
Rule = Callable[[SamplingParams, SpeculativeMethod, int], AcceptanceRule]
"""Makes a request's rule; the last is how many tokens its prompt has."""


def rejection(params: SamplingParams, method: SpeculativeMethod, prompt_length: int) -> AcceptanceRule:
    """As `SelfSpeculativeDecoding` does."""
    return acceptance_rule("rejection", Sampler(params), prompt_length, method.steered_by)


def same_numbers(params: SamplingParams, method: SpeculativeMethod, prompt_length: int) -> AcceptanceRule:
    """A mistake: every request with one seed has the same numbers."""
    return acceptance_rule("rejection", Sampler(params))


class KeyedByPosition(RejectionSampling):
    """A mistake: a place's numbers are the same again in the next round, which a draft that was thrown away steered."""

    def __init__(self, params: SamplingParams, method: SpeculativeMethod, prompt_length: int) -> None:
        super().__init__(Sampler(params), Draws(params.seed, 0))
        self._seed, self._position = params.seed, 0

    def choose(self, logits, history):
        self._draws = Draws(self._seed, len(history))
        return super().choose(logits, history)

    def propose(self, logits, history, most=1):
        self._draws = Draws(self._seed, len(history), 1)
        return super().propose(logits, history, most)

    def judge(self, draft, logits, history) -> Verdict:
        self._position = len(history)
        return super().judge(draft, logits, history)

    def _decide(self, draft, node, chances):
        self._draws = Draws(self._seed, self._position, 2)
        self._position += 1
        return super()._decide(draft, node, chances)


def text_of(
    method: SpeculativeMethod, stage: LayerRange, params: SamplingParams, rule: Rule = rejection, prompt: Text = PROMPT
) -> Text:
    """The first `LENGTH` new tokens of a request."""
    stop, made = StopRule(params, frozenset(), None), rule(params, method, len(prompt))
    steps = speculate(method, stage, made, prompt, params.max_new_tokens, stop, SpeculationCounts())
    return tuple(token for token, _, _ in itertools.islice(steps, LENGTH))


def law(stage: LayerRange, params: SamplingParams) -> np.ndarray:
    """`[VOCABULARY] * LENGTH` chances of all texts, by an ordinary pass for each."""
    sampler, chances = Sampler(params), np.ones(())
    for length in range(LENGTH):
        nexts = [_next(stage, sampler, text) for text in itertools.product(range(VOCABULARY), repeat=length)]
        chances = chances[..., None] * np.array(nexts).reshape((VOCABULARY,) * (length + 1))
    return chances


def _next(stage: LayerRange, sampler: Sampler, text: Text) -> np.ndarray:
    history = [*PROMPT, *text]
    stage.begin(len(history))
    logits = stage.logits(stage.run(0, stage.num_layers, history, 0))
    return sampler.distribution(logits, history).double().numpy()


def counts(texts: Iterable[Text]) -> np.ndarray:
    """How often there was each text, `[VOCABULARY] * LENGTH`."""
    found = np.zeros((VOCABULARY,) * LENGTH)
    for text, times in Counter(texts).items():
        found[text] = times
    return found


def p_value(found: np.ndarray, chances: np.ndarray) -> float:
    """How likely counts this far from their law are: the least p-value, times their number, of chi-squared tests of all
    texts together and of each token behind each few tokens before it."""
    assert found[chances == 0].sum() == 0, "a token that the filters drop"
    expected = chances * found.sum()
    values = [_chi_squared(found.ravel(), expected.ravel())]
    for end in range(1, LENGTH + 1):
        for begin in range(end):
            others = tuple(i for i in range(LENGTH) if not begin <= i < end)
            rows = zip(*(a.sum(others).reshape(-1, VOCABULARY) for a in (found, expected)), strict=True)
            values += [_chi_squared(row, want * (row.sum() / want.sum())) for row, want in rows if row.any()]
    told = [value for value in values if value is not None]
    return min(1.0, min(told) * len(told))


def _chi_squared(found: np.ndarray, expected: np.ndarray) -> float | None:
    """None where there is too little to tell; rare kinds count as one."""
    rare = expected < 5
    found, expected = (np.append(some[~rare], some[rare].sum()) for some in (found, expected))
    enough = expected >= 5
    if (kinds := np.count_nonzero(enough)) < 2:
        return None
    found, expected = found[enough], expected[enough]
    return float(chi2.sf(((found - expected) ** 2 / expected).sum(), kinds - 1))


def memoryless_model(chances: Sequence[float], drafted: Sequence[float]) -> PreTrainedModel:
    """Two layers: behind any text the next token has `chances`, and `drafted` after the first layer."""
    model = _empty_model(2)
    _add_axis(model, 1)
    stage = _begun(model)
    early = stage.run(0, 1, [0], 0)
    _fit_head(model, {stage.run(1, 2, early, 0): chances, early: drafted})
    return model


def memoryless_for_swift(
    chances: Sequence[float], no_attention: Sequence[float], no_mlp: Sequence[float]
) -> PreTrainedModel:
    """Three layers: as above, with other chances where the inner layer's attention or its MLP is left out."""
    model = _empty_model(3)
    _add_axis(model, 1)
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight[0, 0] = attention.o_proj.weight[2, 0] = 1
    wanted = {_begun(model).run(0, 3, [0], 0): chances}
    for left_out, drafted in ((LayerSet(attention=(1,)), no_attention), (LayerSet(mlp=(1,)), no_mlp)):
        stage = _begun(model)
        wanted[stage.run_subset(sparse_subset(stage, left_out), [0], 0)] = drafted
    _fit_head(model, wanted)
    return model


def _empty_model(num_layers: int) -> PreTrainedModel:
    """Its layers add nothing; states are on axis 0, and tell by a trifle on another one of which token they are."""
    model = build_model("llama", num_layers=num_layers, hidden_size=8, vocab_size=VOCABULARY, tied=False)
    for parameter in model.requires_grad_(False).parameters():
        parameter.fill_(parameter.ndim == 1)  # norms of 1, nothing else
    model.model.embed_tokens.weight[:, 0] = 1
    model.model.embed_tokens.weight[:, 7] = torch.arange(VOCABULARY) * 1e-3
    return model


def _add_axis(model: PreTrainedModel, layer: int) -> None:
    """The layer's MLP turns towards axis 1."""
    mlp = model.model.layers[layer].mlp
    mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 1
    mlp.down_proj.weight[1, 0] = 4  # far enough for a head that tells states with it from those without


def _begun(model: PreTrainedModel) -> LayerRange:
    stage = LayerRange(model)
    stage.begin(1)
    return stage


def _fit_head(model: PreTrainedModel, chances: Mapping[Tensor, Sequence[float]]) -> None:
    """Behind each of these states the next token has these chances."""
    normed = torch.stack([model.model.norm(state)[0, 0] for state in chances]).double()
    wanted = torch.tensor(list(chances.values()), dtype=torch.float64)
    weight = torch.linalg.solve(normed @ normed.T, wanted.log()).T @ normed  # the least of those that fit
    model.lm_head.weight.copy_(weight)
    found = model.lm_head(normed.float()).softmax(-1).double()
    assert torch.allclose(found, wanted, atol=1e-4), f"{found} instead of {wanted}"
