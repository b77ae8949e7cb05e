"""Two exit heads beside each other on given text: losses, and how often each names full depth's choice."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.tune.match_rates import LOGITS, SHARED_NOISE, places_among_best

GREEDY = "greedy"
WAYS = (GREEDY, SHARED_NOISE, LOGITS)
"""Full depth greedy; at temperature 1 with the candidates ranked by the same noise; and ranked by logits alone."""

Logits = Callable[[Tensor], Tensor]
"""Hidden states `[rows, tokens, hidden_size]` → logits `[rows, tokens, vocab_size]`."""


@dataclass(frozen=True)
class HeadScores:
    """What one head reaches; losses are means over the tokens, in nats."""

    loss: float
    """Cross-entropy to the text's next token."""
    divergence: float
    """Kullback-Leibler divergence of full depth's distribution from the head's: 0 if they are the same."""
    match_rates: dict[str, dict[int, float]]
    """By way of `WAYS` and k."""


@dataclass(frozen=True)
class HeadComparison:
    """Two heads on the same tokens: before and after training."""

    num_tokens: int
    final_loss: float
    """Full depth's own."""
    before: HeadScores
    after: HeadScores

    def as_dict(self) -> dict[str, object]:
        """Everything as JSON values."""
        return asdict(self)


@dataclass
class _Sums:
    """Sums over tokens."""

    ks: tuple[int, ...]
    loss: float = 0.0
    divergence: float = 0.0
    hits: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, logits: Tensor, final: Tensor, labels: Tensor, noise: Tensor) -> None:
        """All `[tokens, vocab_size]` but the labels, `[tokens]`."""
        log_probs, final_log_probs = logits.log_softmax(-1), final.log_softmax(-1)
        self.loss += float(F.nll_loss(log_probs, labels, reduction="sum"))
        self.divergence += float(F.kl_div(log_probs, final_log_probs, log_target=True, reduction="sum"))
        sampled = (final + noise).argmax(-1)
        for way, chosen, scores in (
            (GREEDY, final.argmax(-1), logits),
            (SHARED_NOISE, sampled, logits + noise),
            (LOGITS, sampled, logits),
        ):
            places = places_among_best(scores, chosen, max(self.ks))
            for k in self.ks:
                self.hits[way, k] = self.hits.get((way, k), 0) + int((places < k).sum())

    def means(self, num_tokens: int) -> HeadScores:
        """The means over `num_tokens` tokens."""
        rates = {way: {k: self.hits[way, k] / num_tokens for k in self.ks} for way in WAYS}
        return HeadScores(self.loss / num_tokens, self.divergence / num_tokens, rates)


@torch.no_grad()
def compare_heads(
    before: Logits,
    after: Logits,
    passes: Iterable[tuple[Tensor, Tensor, Tensor]],
    ks: tuple[int, ...] = (1, 3, 5),
    seed: int = 0,
) -> HeadComparison:
    """Score both on the same hidden states.

    Args:
        before: the first head.
        after: the second one.
        passes: for each text, one at least, the hidden states after the exit layer `[1, tokens, hidden_size]`, full
            depth's logits `[1, tokens, vocab_size]`, and the next tokens `[tokens]`.
        ks: numbers of candidates.
        seed: of the first text's shared noise; the next text's is one more.
    """
    sums, num_tokens, final_loss = (_Sums(ks), _Sums(ks)), 0, 0.0
    for number, (states, final_logits, labels) in enumerate(passes):
        final = final_logits[0].float()
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed + number))
        noise = sampler.noise(0, *final.shape).to(final.device)
        for head, head_sums in zip((before, after), sums, strict=True):
            head_sums.add(head(states)[0].float(), final, labels, noise)
        num_tokens += len(labels)
        final_loss += float(F.cross_entropy(final, labels, reduction="sum"))
    return HeadComparison(num_tokens, final_loss / num_tokens, *(head_sums.means(num_tokens) for head_sums in sums))
