"""Match rates: how often an intermediate layer's top-k holds the token that full depth gives (the paper's Table 2).

`MatchRateMeter` generates a text by ordinary decoding, then passes it once more through the layers for the hidden
states after every exit layer: all layers and all k come from these two.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppd_runtime.methods.ordinary import OrdinaryDecoding
from ppd_runtime.models.checkpoint.dtype import cpu_threads
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.trained.heads import HeadInfo, load_head
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.sampling.sampler import Sampler
from ppd_runtime.settings.checks import check_cuts, check_depth, check_whole
from ppd_runtime.settings.config import SHARED

LOGITS = "logits"
"""Candidates are an exit's likeliest tokens, as in the paper; with greedy decoding the runtime's are the same."""
SHARED_NOISE = "shared_noise"
"""Candidates are ranked by the sampling rule itself, with the noise that the token is drawn with, as in the runtime."""

ExitLogits = Callable[[Tensor, int], Tensor]
"""Hidden states after an exit layer, `[rows, hidden_size]`, and the layer → `[rows, vocab_size]` float32 logits."""

TextPlaces = dict[str, list[list[int]]]
"""The exits' places of each token of one generated text, by ranking: `[exit_layers][tokens]`, 0 is the first candidate,
max(ks) is no candidate."""
_ROWS = 128  # positions ranked at once: bounds the memory that a large vocabulary's logits take


@dataclass(frozen=True)
class MatchRateSetting:
    """What to measure on a model of `num_layers` layers; exit layers, ks and cuts are kept in rising order.

    Raises:
        ValueError: naming the value and the allowed range.
    """

    num_layers: int
    vocab_size: int
    exit_layers: tuple[int, ...]
    """Layers from 1, the last one excluded; Theorem 4.1 needs those from half depth on."""
    ks: tuple[int, ...]
    """Numbers of candidates."""
    sampling: SamplingParams
    """How full depth chooses the tokens; its seed is the first prompt's, the next prompt's is one more, and so on."""
    cuts: tuple[tuple[int, ...], ...] = ()
    """Layers after which the staged layout's stages end, for one or several numbers of stages; their exits are measured
    too."""

    def __post_init__(self) -> None:
        check_depth(self.num_layers, "an early exit")
        if not self.exit_layers or not self.ks:
            raise ValueError(f"no {'k' if self.exit_layers else 'exit layers'} to measure: give at least one")
        for k in self.ks:
            check_whole("k", k, 1)
            if k > self.vocab_size:
                raise ValueError(f"k={k} is more than the {self.vocab_size} tokens of the vocabulary: choose fewer")
        for layer in self.exit_layers:
            if layer not in range(1, self.num_layers):
                told = f"with {self.num_layers} layers choose 1 to {self.num_layers - 1}"
                raise ValueError(f"exit_layer={layer}: {told}")
        for cuts in self.cuts:
            check_cuts(self.num_layers, cuts)
        object.__setattr__(self, "exit_layers", tuple(sorted({*self.exit_layers, *itertools.chain(*self.cuts)})))
        object.__setattr__(self, "ks", tuple(sorted(set(self.ks))))
        object.__setattr__(self, "cuts", tuple(sorted(set(self.cuts), key=lambda cuts: (len(cuts), cuts))))

    @property
    def rankings(self) -> tuple[str, ...]:
        """How candidates are ranked, the runtime's way first."""
        return (LOGITS,) if self.sampling.greedy else (SHARED_NOISE, LOGITS)


def trained_head_meter(ordinary: OrdinaryDecoding, setting: MatchRateSetting, head: HeadInfo) -> "MatchRateMeter":
    """A meter of a trained head; raises ValueError if the setting has any other layer than the head's."""
    head.check_layers(setting.exit_layers)
    network = load_head(head, ordinary.stage.model)
    return MatchRateMeter(ordinary, setting, exit_logits_of(network), f"{head.kind} {head.weights_sha256}")


class MatchRateMeter:
    """Compares every token of a text that full depth generates with the candidates of every exit.

    The token at position t is compared with the candidates from the hidden states of position t - 1. Every
    generated token counts: the first one, whose candidates come from the prompt's pass, and the last one, whose
    candidates the runtime has no more use for.
    """

    def __init__(
        self,
        ordinary: OrdinaryDecoding,
        setting: MatchRateSetting,
        exit_logits: ExitLogits | None = None,
        exit_head: str = SHARED,
    ) -> None:
        """`exit_logits`: None is the shared head's; `exit_head` names the head."""
        self.ordinary, self.exit_head = ordinary, exit_head
        self.setting = replace(setting, sampling=ordinary.settled(setting.sampling))
        self._exit_logits = exit_logits or exit_logits_of(ordinary.stage.head)

    def measure(self, prompt_ids: Sequence[int], seed: int) -> TextPlaces:
        """Generate a text with the noise of `seed` and place its tokens."""
        sampling = replace(self.setting.sampling, seed=seed)
        token_ids = [*prompt_ids, *self.ordinary.generate(prompt_ids, sampling).token_ids]
        with cpu_threads(self.ordinary.config.threads_per_worker):
            sampler = Sampler(sampling, len(prompt_ids), self.ordinary.info.eos_token_ids)
            return self._place(token_ids, len(prompt_ids), sampler)

    @torch.inference_mode()
    def _place(self, token_ids: list[int], first: int, sampler: Sampler) -> TextPlaces:
        """The places of `token_ids[first:]`, the generated ones."""
        states = torch.stack(
            list(exit_states(self.ordinary.stage, token_ids[:-1], first - 1, self.setting.exit_layers))
        )
        parts = [
            self._place_rows(some_states, token_ids[: first + number * _ROWS + some_states.shape[1]], sampler)
            for number, some_states in enumerate(states.split(_ROWS, dim=1))
        ]
        return {ranking: torch.cat([part[ranking] for part in parts], dim=1).tolist() for ranking in parts[0]}

    def _place_rows(self, states: Tensor, token_ids: list[int], sampler: Sampler) -> dict[str, Tensor]:
        """Places of the last tokens, `[exit_layers, rows]`, by ranking; `states` are of the token before each,
        `[exit_layers, rows, hidden_size]`."""
        rows: dict[str, list[Tensor]] = {ranking: [] for ranking in self.setting.rankings}
        noise, position = Tensor(), len(token_ids) - states.shape[1]
        tokens = torch.tensor(token_ids[position:], device=states.device)
        histories = [token_ids[: position + row] for row in range(len(tokens))]
        if not sampler.params.greedy:
            noise = sampler.noise(position, len(tokens), self.setting.vocab_size).to(states.device)
        for layer, hidden in zip(self.setting.exit_layers, states, strict=True):
            logits = sampler.changed(self._exit_logits(hidden, layer), histories)
            for ranking, placed in rows.items():
                scores = logits if ranking == LOGITS else sampler.scores(logits, noise)
                placed.append(places_among_best(scores, tokens, max(self.setting.ks)))
        return {ranking: torch.stack(placed) for ranking, placed in rows.items()}


def exit_logits_of(head: Callable[[Tensor], Tensor]) -> ExitLogits:
    """A head for hidden states `[batch, tokens, hidden_size]`, the model's own or a trained one, at any exit layer."""
    return lambda hidden, exit_layer: head(hidden[:, None])[:, 0].float()


def exit_states(stage: LayerRange, token_ids: list[int], first: int, exit_layers: Sequence[int]) -> Iterator[Tensor]:
    """Hidden states of `token_ids[first:]` after each exit layer, in rising order: `[tokens, hidden_size]` each.

    `stage` still holds the entries of the tokens before them; newer ones are dropped. Layers with states run all tokens
    again. Layers that no exit needs do not run.
    """
    held = 0 if stage.has_states else first
    stage.truncate(held)
    inputs: list[int] | Tensor = token_ids[held:]
    for last, layer in zip((0, *exit_layers), exit_layers, strict=False):
        inputs = stage.run(last, layer, inputs, held)
        yield inputs[0, first - held :]


def places_among_best(scores: Tensor, tokens: Tensor, most: int) -> Tensor:
    """`[rows]` places of `tokens` among the `most` best of `scores`, `[rows, vocab_size]`; `most` if not among them.

    Among equals the best is the one that `argmax` chooses, as in `Sampler.rank`.
    """
    best, ranked = scores.argmax(-1, keepdim=True), scores.topk(most).indices
    place, best_place = _first_place(ranked == tokens[:, None], most), _first_place(ranked == best, most)
    place = (place + (best_place > place)).clamp(max=most)  # one place down if the best is not before it
    return torch.where(tokens == best[:, 0], 0, place)


def _first_place(found: Tensor, otherwise: int) -> Tensor:
    return torch.where(found.any(-1), found.int().argmax(-1), otherwise)
