"""A network that reads tokens alone hears the whole text, and names tokens from the prompt's end on."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pipeline_runs import GREEDY, PROMPTS, SAMPLED, Bench
from staged_runs import StagedRun
from torch import Tensor

from ppd_runtime.models.trained.exit_heads import ShortlistSampler
from ppd_runtime.pipeline.staged.network_drafts import NetworkDrafts
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler


class Reader:
    """Names the next token of a text that it knows; checks that it hears the text, from its beginning.

    Args:
        text: token ids.
        vocab_size: the model's.
    """

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self.text, self.tokens = text, range(vocab_size)
        self.position, self.asked_at = 0, list[int]()

    def begin(self, capacity: int) -> None:
        """Implements `DraftNetwork.begin`."""
        self.position = 0

    def follow(self, tokens: Sequence[int], states: Tensor) -> None:
        """Implements `DraftNetwork.follow`."""
        before, self.position = self.position, self.position + len(tokens)
        assert list(tokens) == list(self.text[before : self.position])
        assert not len(states)

    def draft(self, chains: Sequence[Sequence[int]]) -> Tensor:
        """Implements `DraftNetwork.draft`."""
        self.asked_at.append(self.position)
        logits = torch.zeros(len(chains), len(self.tokens))
        for row, chain in zip(logits, chains, strict=True):
            place = self.position + len(chain)
            row[self.text[place] if place < len(self.text) else 0] = 9.0
        return logits


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_it_hears_the_whole_text(model_folder: Callable[..., Path], params: SamplingParams, lost: int | None) -> None:
    """Also if a stage is lost; states that are told all the same are not for it."""
    bench = Bench.of(model_folder("llama", num_layers=3))
    ids, size = bench.prompt_ids(PROMPTS[4]), bench.info.vocab_size
    expected = bench.ordinary(ids, params).tokens
    for seed in range(3):
        reader = Reader([*ids, *expected], size)
        ranking = ShortlistSampler(Sampler(params, len(ids)), reader.tokens, size)
        drafts = NetworkDrafts(reader, ranking, 3, 0, lambda: 0.0, reads_prompt=True, reads_states=False)
        run = StagedRun(bench, ids, params, (1, 2), 2, 4, seed, lambda drafts=drafts: drafts)
        if lost is not None:
            run.network.plan[40 + 30 * seed] = lambda run=run: run.lose(lost)
        assert run.run() == expected
        assert reader.asked_at[0] == len(ids), "before any token is certain"
