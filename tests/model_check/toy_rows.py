"""Some layers of a toy model over the rows of a tree, and the heads behind them: see `toy.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model_check.toy import CHUNK, ToyModel, ToyStage, choose, embed, run_layer, to_numbers, to_tensor
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.tracing.recorder import Recorder


class ToyRows:
    """Layers `first` to `last` of a toy model; see `ppd_runtime.models.stage.tree_range.TreeRange`."""

    layer_seconds, cache, states_dtype = ToyStage.layer_seconds, ToyStage.cache, ToyStage.states_dtype
    layer_passes = 0
    layers_at_once = 1
    most_together = 1
    cached_tokens = 0

    def __init__(self, model: ToyModel, first: int, last: int, trees: bool = False) -> None:
        self.model, self.first, self.num_layers, self.state_size = model, first, last - first, model.config.hidden_size
        self.joins_requests, self.only_chains = trees, not trees
        self.joins_heads = trees
        self.recorder = Recorder()
        self.begin(0)

    def another(self) -> "ToyRows":
        """The same layers for another request."""
        return ToyRows(self.model, self.first, self.first + self.num_layers, self.joins_requests)

    def begin(self, capacity: int, prompt: Sequence[int] = ()) -> None:
        """Forget the last sequence."""
        self.capacity = capacity
        self.kept: list[list[int]] = [[] for _ in range(self.num_layers)]
        """Each layer's entries of the certain tokens."""
        self.nodes: dict[int, list[int]] = {}
        """Entries of each node in flight, one a layer."""
        self.begun: dict[int, list[int]] = {}
        """The same of nodes whose pass is under way."""

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk of a prompt; they are short."""
        return [range(first, min(first + CHUNK, tokens)) for first in range(0, tokens, CHUNK)]

    def run_prompt(self, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run a prompt's next chunk, before all else."""
        states = self._states(inputs)
        assert all(len(kept) == position for kept in self.kept), "a chunk runs behind those before it"
        for place, layer in enumerate(range(self.first, self.first + self.num_layers)):
            states, added = run_layer(layer, states, self.kept[place], len(states))
            self.kept[place] += added
        return to_tensor([states])

    def run_rows(self, inputs: Sequence[int] | Tensor, paths: Sequence[Sequence[int]], layers: range) -> Tensor:
        """Run nodes, each behind the kept tokens and the nodes before it on its path."""
        rows = zip(self._states(inputs), paths, strict=True)
        return to_tensor([[self._run(state, path, layers) for state, path in rows]])

    @staticmethod
    def top(hidden: Tensor) -> Tensor:
        """There are no other states."""
        return hidden

    @staticmethod
    def run_together(
        asked: "Sequence[tuple[ToyRows, Sequence[int] | Tensor, Sequence[Sequence[int]]]]", layers: range
    ) -> list[Tensor]:
        """What each of several requests would have alone."""
        return [stage.run_rows(inputs, paths, layers) for stage, inputs, paths in asked]

    @staticmethod
    def logits_together(asked: "Sequence[tuple[ToyRows, Tensor]]") -> list[Tensor]:
        """The same of the head."""
        return [stage.logits(hidden) for stage, hidden in asked]

    def _states(self, inputs: Sequence[int] | Tensor) -> list[int]:
        return to_numbers(inputs)[0] if isinstance(inputs, Tensor) else [embed(token) for token in inputs]

    def _run(self, state: int, path: Sequence[int], layers: range) -> int:
        *before, node = path
        assert node not in self.nodes, "a node runs once"
        held_by = self.begun | self.nodes
        if missing := [number for number in before if number not in held_by]:
            raise RuntimeError(f"a row attends to the nodes {missing}, which are not held")
        entries = self.begun.setdefault(node, [])
        assert len(entries) == layers.start, "a pass goes on where it was"
        for place in layers:
            held = [*self.kept[place], *(held_by[number][place] for number in before)]
            (state,), added = run_layer(self.first + place, [state], held, 1)
            entries += added
        if layers.stop == self.num_layers:
            self.nodes[node] = self.begun.pop(node)
        return state

    def keep(self, node: int) -> None:
        """Put a node's entries behind the kept ones."""
        for kept, entry in zip(self.kept, self.nodes.pop(node), strict=True):
            kept.append(entry)
        if len(self.kept[0]) > self.capacity:
            raise IndexError(f"a cache for {self.capacity} tokens cannot hold {len(self.kept[0])}")

    def drop(self, node: int) -> None:
        """Forget a node, if it has run."""
        self.nodes.pop(node, None)
        self.begun.pop(node, None)

    def unread_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`."""
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[VOCAB]`, of which one is 1; no token is decided but by ordinary decoding's very state."""
        texts = [self.model.text(prompt, len(self.kept[0])) for prompt in self.model.prompts]
        assert to_numbers(hidden)[0][-1] in [self.model.ordinary(text).states[-1] for text in texts], (
            f"the token behind {len(texts[0])} others is decided by a state that ordinary decoding does not have"
        )
        return choose(hidden)


@dataclass(frozen=True)
class BoundaryPattern(OracleHead):
    """Names the right token at the rank that the model's pattern says, from the boundary on that it says."""

    model: ToyModel | None = None
    boundary: int = 1
    layer: int = 1
    """The layers before it."""

    def guesses(self, hidden: Tensor, texts: Sequence[Sequence[int]], k: int) -> Sequence[Sequence[tuple[int, float]]]:
        """k tokens for each text, at most one of them right; the states have to be those of these very texts."""
        assert self.model is not None
        expected = [self.model.ordinary(tuple(text)).states[self.layer] for text in texts]
        assert to_numbers(hidden)[0] == expected, f"what follows {texts} is named by other states"
        return [[(token, 0.6 / (rank + 1)) for rank, token in enumerate(self._named(tuple(text), k))] for text in texts]

    def _named(self, text: tuple[int, ...], k: int) -> list[int]:
        assert self.model is not None
        right = self.model.text(text, len(text) + 1)[-1]
        winner = self.model.winner(len(text)) if self.model.first_boundary(len(text)) <= self.boundary else 0
        return self.model.named(right, winner, k)
