"""A contiguous layer range of a Hugging Face decoder that any process can run piece by piece.

The library's own forward pass runs each piece, over a shallow copy of the model that holds only the piece's layers:
masks, rotary tables, windows and soft caps stay the library's business.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppd_runtime.models.stage.arena import RowArena
from ppd_runtime.models.stage.caches import StageCache
from ppd_runtime.models.stage.chunks import SEVERAL_ROWS, library_masks_fit, num_tokens, part_of, prompt_chunks
from ppd_runtime.models.stage.compiled_passes import CompiledPasses
from ppd_runtime.models.stage.decoder_parts import cache_argument, decoder_in, states_dtype
from ppd_runtime.models.stage.embedding import first_states
from ppd_runtime.models.stage.grouped_attention import choose_attention
from ppd_runtime.models.stage.held_sequence import HeldSequence
from ppd_runtime.models.stage.library_probe import cache_windows, kept_by_layers
from ppd_runtime.models.stage.rotary import RotaryTable, most_positions
from ppd_runtime.models.stage.slicing import FinalHead, LayerSubset, decoder_of, with_mask_of
from ppd_runtime.models.stage.states import new_cache
from ppd_runtime.models.stage.trees import Part, TokenTree, chain_of, token_tree
from ppd_runtime.models.stage.wide import NEWEST_ALONE, drops_tokens, state_size
from ppd_runtime.sampling.gpu_choice import UnreadLogits
from ppd_runtime.tracing.recorder import Recorder
from ppd_runtime.tracing.spans import Kind

Head = Callable[[Tensor], Tensor]
Pace = Callable[[Callable[[], Tensor], int, bool], Tensor]
"""Computes a pass and returns its result. It is given the pass, its number of layers, 0 for a head, and whether the
pass has rows of several texts or branches."""


class LayerRange(HeldSequence):
    """Layers 1 to `num_layers` of a model with its embedding and head, and the entries of one sequence.

    Hidden states are `[1, tokens, state_size]`; positions count from 0; layer ranges are half-open and count from 0.

    Args:
        model: its layers are the stage's.
        compiled: runs one-token passes, candidates of one position, and chains where it has code for them; prompts are
            run by the library over the same caches.
        first_layer: the first layer here, counted from 0.
        longest_in_chunks: the whole model's; see `ModelInfo`.
    """

    rows_of_a_pass: ClassVar[int | None] = None
    """Rows of every pass, if it is padded to a fixed number of them; see `RowsRange`."""
    reads_slots = False
    """Whether padded passes read the texts' caches where they lie; see `RowsRange`."""

    def __init__(
        self,
        model: PreTrainedModel,
        compiled: CompiledPasses | None = None,
        first_layer: int = 0,
        longest_in_chunks: int | None = None,
    ) -> None:
        choose_attention(model)
        self.model, self._compiled, self.first_layer = model, compiled, first_layer
        self._longest_in_chunks = longest_in_chunks
        self.device = model.device
        """The weights' device; the library would search all of a model's modules at each call."""
        self.states_dtype = states_dtype(model)
        """The dtype of states between layers."""
        self._on_cuda = self.device.type == "cuda"
        self.num_layers = len(decoder_in(model).layers)
        self.state_size = state_size(model.config)
        """Numbers of the state that goes from layer to layer: `hidden_size`, or those of a wide state."""
        self._of_prompts = {NEWEST_ALONE: True} if drops_tokens(decoder_in(model)) else {}
        self.layers_at_once = -(-self.num_layers // 2) if compiled else self.num_layers
        """Layers best run in one call: each call of the library has a cost, a compiled one a smaller cost."""
        self.layer_passes = 0
        """One-sequence layer passes run so far: a pass through one layer counts one, over candidates one for each."""
        self.layer_seconds = 0.0
        """Recent time of one layer for one token."""
        self.pace: Pace = lambda run, layers, of_rows: run()
        """Computes every pass and every head; an emulated device takes its time for it."""
        self.rows_share_passes = False
        """Whether further rows of a pass take less than a pass each, however they are run."""
        self.recorder = Recorder()
        self._ranges: dict[tuple[int, int], LayerSubset] = {}
        self._cache_argument = cache_argument(decoder_in(model))
        rotary = getattr(decoder_in(model), "rotary_emb", None)
        self._rotary = None if rotary is None else RotaryTable(rotary, most_positions(model.config))
        self._positions = torch.arange(0, device=model.device)[None]
        self._compiled_head = compiled.head if compiled else None
        """The compiled norm and head; None if no code for them is loaded."""
        self.head = self._compiled_head or FinalHead(model)
        if not self.has_states:
            cache_windows(model.config)  # refuses layers that leave something else than keys and values
        self._embed, self._kept = first_states(model), kept_by_layers(model.config)[: self.num_layers]
        self.cache = self._new_cache(0)
        self._masks: dict[int, Tensor] = {}  # the current pass's mask for each layer, if we make the masks
        self._says_masks = {tokens: not library_masks_fit(model, tokens) for tokens in (1, SEVERAL_ROWS)}

    def compile_for(self, *passes: int) -> None:
        """If passes are compiled, load code for these too, such as `SEVERAL`; the first time takes a while."""
        if self._compiled:
            self._compiled.add(*passes)

    def head_over(self, final: FinalHead) -> Head:
        """Another head of the same length, compiled if this stage's is."""
        return (self._compiled.head_of(final) if self._compiled else None) or final

    def compiles_chains(self, tokens: int) -> bool:
        """Whether there is compiled code for a chain of `tokens`."""
        return self._compiled is not None and self._compiled.runs_tree(tokens)

    def behind(self, part: PreTrainedModel) -> "LayerRange":
        """A stage for a one-layer model behind this one, compiled if this one is; it notes its times here."""
        code = self._compiled and self._compiled.of_part(part)
        stage = LayerRange(part, code, longest_in_chunks=self._longest_in_chunks)
        stage.recorder = self.recorder
        return stage

    def over(self, model: PreTrainedModel) -> "LayerRange":
        """A stage for a model of this one's first layer with other weights, run by the same code."""
        return type(self)(model, self._compiled and self._compiled.over(model))

    def chain_drafting(self, layers: "int | LayerSubset", behind: "LayerRange | None" = None) -> Any:
        """Drafts greedy chains in one call, through the first `layers` layers or a piece, perhaps a stage `behind`
        them, and a head, and verifies them if it can; None if passes are not compiled for it.
        """
        part = behind._compiled if behind else None
        table = self._embed.table
        if not self._compiled or table is None or (behind and not part):
            return None
        return self._compiled.chain_drafting(layers, part, table)

    def arena(self, room: int | None = None) -> RowArena | None:
        """Rows for several sequences whose tokens can run together, `room` tokens at a time; None if there is no code
        for that.
        """
        joins = self._compiled is not None and self._compiled.joins_texts
        windows = [layer.window for layer in self._kept]
        return RowArena(windows, self.first_layer, room, self._moves) if joins else None

    def begin(self, capacity: int, cache: StageCache | None = None) -> None:
        """Forget the last sequence; make room for one of at most `capacity` tokens, or take the cache of one."""
        self.turn_to(cache or self._new_cache(capacity))
        if self._compiled:
            self._compiled.forget()

    def _new_cache(self, capacity: int) -> StageCache:
        return new_cache(self._kept, capacity, self.first_layer, self.model.dtype, self._moves)

    @property
    def _moves(self) -> bool:
        """Whether a sequence's rows have to be consecutive."""
        return self._compiled is None or not self._compiled.reads_lists

    def turn_to(self, cache: StageCache) -> None:
        """Continue with the sequence of this cache, which `begin` made."""
        self.cache = cache
        if cache.capacity > self._positions.shape[1]:
            self._positions = torch.arange(cache.capacity, device=self.device)[None]

    def run(self, first: int, last: int, inputs: list[int] | Tensor, position: int) -> Tensor:
        """Run layers `first` to `last` (half-open), append to their caches, and return the hidden states.

        `inputs` are token ids if `first` is 0, else hidden states; the first is at `position`, which must be the number
        of entries in these layers. An empty range returns its inputs. Inputs at position 0 are a prompt, and run in its
        chunks.
        """
        if first == last and isinstance(inputs, Tensor):
            return self._here(inputs)
        if position:
            return self.run_pass(first, last, inputs, position)
        parts = [(part_of(inputs, chunk), chunk.start) for chunk in self.prompt_chunks(num_tokens(inputs))]
        states = [self.run_pass(first, last, part, start, in_prompt=True) for part, start in parts]
        return states[0] if len(states) == 1 else torch.cat(states, dim=1)

    def prompt_chunks(self, tokens: int) -> list[range]:
        """The positions of each chunk of a prompt of `tokens` tokens; each runs as a pass."""
        return prompt_chunks(tokens, self._longest_in_chunks)

    def run_pass(
        self, first: int, last: int, inputs: list[int] | Tensor, position: int, in_prompt: bool = False
    ) -> Tensor:
        """Like `run`, in one pass. In `layer_passes` a prompt's chunks count as one pass."""
        run = partial(self._run, first, last, inputs, position, in_prompt)
        return self._timed(run, position, first, last, 0 if in_prompt and position else 1)

    def run_rows(self, parts: Iterable[Part], position: int, first: int, last: int) -> Tensor:
        """Run layers `first` to `last` over tokens that follow different texts, in one pass with a row for each.

        `parts` makes the caches ready when it yields a part. A token alone has the bits of its own pass. The hidden
        states are `[1, rows, hidden_size]`; `position` is the last row's, for the record.
        """
        return self._timed(partial(self._run_rows, parts, first, last), position, first, last, None)

    def run_candidates(self, token_ids: Sequence[int], position: int) -> Tensor:
        """Run all layers over tokens that are all at `position`: a tree of roots, see `run_tree`."""
        return self.run_tree(token_ids, [-1] * len(token_ids), position)

    def run_tree(self, token_ids: Sequence[int], parents: Sequence[int], position: int) -> Tensor:
        """Run all layers over a tree: each token sees all tokens before `position`, its ancestors, and itself.

        `parents` has the index of each token's parent, which comes before it, or -1 for a root, which is at `position`.
        Returns the hidden states after the layers, `[1, tokens, hidden_size]`. The entries lie behind the first
        `position` tokens' until `keep_path` or `truncate`; the capacity must hold all. A chain is an ordinary pass.
        Other trees give each path's numbers, but not the same bits: a product with several rows may sum in another
        order.
        """
        if list(parents) == list(range(-1, len(parents) - 1)):
            return self.run(0, self.num_layers, list(token_ids), position)
        run = partial(self._run_tree, list(token_ids), parents, position)
        return self._timed(run, position, 0, self.num_layers, len(token_ids))

    def run_subset(self, subset: "LayerSubset", token_ids: list[int], position: int) -> Tensor:
        """Run a piece's layers over tokens from `position` on, and return the hidden states.

        They append to the caches of the piece's attending layers, which must hold `position` tokens each.
        """
        run = partial(self._run_subset, subset, token_ids, position)
        return self._timed(run, position, 0, self.num_layers, layers=subset.num_layers)

    def _timed(
        self, run: Callable[[], Tensor], position: int, first: int, last: int, passes: int | None = 1, layers: int = 0
    ) -> Tensor:
        """The states after a pass through the layers `first` to `last`, or `layers` of them; notes its time.

        It counts as `passes` of one sequence; None: one for each row.
        """
        began, layers, of_rows, recorded = time.perf_counter(), layers or last - first, passes is None, self._recorded
        hidden = self.pace(run, layers, of_rows)
        self._wait_for_device()
        ended = time.perf_counter()
        if (of_rows or hidden.shape[1] == 1 or not self.layer_seconds) and recorded == self._recorded:
            seconds, before = (ended - began) / layers, self.layer_seconds
            self.layer_seconds = 0.8 * before + 0.2 * seconds if before else seconds
        self.recorder.note(Kind.LAYERS, began, ended, position, -1, first, last)
        self.layer_passes += layers * (hidden.shape[1] if passes is None else passes)
        return hidden

    @property
    def _recorded(self) -> int:
        """Recordings made; a pass that makes one takes as long as several, and tells no layer's time."""
        return self._compiled.num_recorded if self._on_cuda and self._compiled else 0

    def most_together(self, position: int) -> int | None:
        """The most tokens from `position` on in one pass for which each gets the result of its own pass; None: any
        number. Long-RoPE models embed positions by the longest one of a pass."""
        return self._rotary.most_together(position) if self._rotary else None

    def logits(self, hidden: Tensor) -> Tensor:
        """`[vocab_size]` float32 logits for the newest token: final norm, head and whatever the model adds to it."""
        return self._timed_head(partial(self._head_over, hidden if hidden.shape[1] == 1 else hidden[:, -1:]))

    def token_logits(self, hidden: Tensor) -> Tensor:
        """`[tokens, vocab_size]` float32 logits for each token of `[1, tokens, hidden_size]`, as `logits` of one."""
        return self._timed_head(partial(self._head_over, hidden, hidden.shape[1]))

    def unread_logits(self, hidden: Tensor) -> Tensor | UnreadLogits:
        """The `logits`, not computed yet if a recording may give what is asked of them instead; see `RowsRange`."""
        return self.logits(hidden)

    def unread_token_logits(self, hidden: Tensor, head: Head | None = None) -> Tensor | UnreadLogits:
        """The `token_logits`, or another head's, as `unread_logits`."""
        return head(hidden)[0].float() if head else self.token_logits(hidden)

    def _timed_head(self, run: Callable[[], Tensor]) -> Tensor:
        began = time.perf_counter()
        logits = self.pace(run, 0, False)
        self.recorder.note(Kind.HEAD, began, time.perf_counter())
        return logits

    def _head_over(self, hidden: Tensor, *tokens: int) -> Tensor:
        """`[*tokens, vocab_size]` float32 logits."""
        hidden, compiled = self._here(hidden), self._compiled_head
        if compiled:
            return compiled(hidden, (*tokens, compiled.vocab_size))
        with torch.inference_mode():
            return self.head(hidden).view(*tokens, -1).float()

    def _run_rows(self, parts: Iterable[Part], first: int, last: int) -> Tensor:
        rows = [self._run(first, last, inputs, position, tree=tree) for inputs, position, tree in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def _run(
        self,
        first: int,
        last: int,
        inputs: list[int] | Tensor,
        position: int,
        in_prompt: bool = False,
        tree: Any = None,
    ) -> Tensor:
        """Run a chain, or a `tree` or several texts' trees, which need compiled code."""
        self.check_position(first, position)
        tokens = num_tokens(inputs)
        if self._compiled and not in_prompt and (tokens == 1 or self._compiled.runs_tree(tokens)):
            hidden = self._here(inputs) if isinstance(inputs, Tensor) else self._embed(inputs)
            if isinstance(tree, Sequence):
                return self._compiled.run_trees(first, last, hidden, tree, self.cache.layers)
            if tokens == 1:
                return self._compiled.run(first, last, hidden, self.cache.layers)
            tree = tree or chain_of(tokens, self.device)
            return self._compiled.run_tree(first, last, hidden, tree, self.cache.layers)
        return self._run_library(first, last, inputs, position, in_prompt=in_prompt)

    def _here(self, states: Tensor) -> Tensor:
        """States on the stage's device. On CPUs they are; asking takes ten microseconds between passes."""
        return states.to(self.device) if self._on_cuda else states

    @torch.inference_mode()
    def _run_subset(self, subset: "LayerSubset", token_ids: list[int], position: int) -> Tensor:
        self.check_position(subset.attending[0], position)
        if self._compiled and len(token_ids) == 1 and position and self._compiled.runs_subset(subset):
            return self._compiled.run_subset(subset, self._embed(token_ids), self.cache.layers)
        return self._call(subset, token_ids, position)

    @torch.inference_mode()
    def _run_tree(self, token_ids: list[int], parents: Sequence[int], position: int) -> Tensor:
        self.check_position(0, position)
        tree = token_tree(tuple(parents), self.device)
        if self._compiled and position and self._compiled.runs_tree(len(token_ids)):
            return self._compiled.run_tree(0, self.num_layers, self._embed(token_ids), tree, self.cache.layers)
        places = self._positions[:, position + tree.depths]
        return self._run_library(0, self.num_layers, token_ids, position, places, tree)

    def check_position(self, layer: int, position: int) -> None:
        """Raise RuntimeError if a layer holds other than `position` tokens."""
        length = self.cache.layers[layer].length
        if length != position:
            raise RuntimeError(f"layer {layer} holds {length} tokens, the pass starts at position {position}")

    def _wait_for_device(self) -> None:
        if self._on_cuda:  # sending or judging the result waits for it anyway
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def _run_library(
        self,
        first: int,
        last: int,
        inputs: list[int] | Tensor,
        position: int,
        places: Tensor | None = None,
        tree: TokenTree | None = None,
        in_prompt: bool = False,
    ) -> Tensor:
        return self._call(self._range(first, last), inputs, position, places, tree, in_prompt=in_prompt)

    def _range(self, first: int, last: int) -> LayerSubset:
        if (first, last) not in self._ranges:
            layers = dict(enumerate(decoder_in(self.model).layers))
            numbers = tuple(range(first, last))
            self._ranges[first, last] = self.subset({i: layers[i] for i in numbers}, numbers)
        return self._ranges[first, last]

    def _call(
        self,
        subset: "LayerSubset",
        inputs: list[int] | Tensor,
        position: int,
        places: Tensor | None = None,
        tree: TokenTree | None = None,
        in_prompt: bool = False,
    ) -> Tensor:
        """Run a piece in the library's own code: a chain's tokens, or a `tree`'s, which are at `places`."""
        states = inputs.to(self.device) if isinstance(inputs, Tensor) else self._embed(inputs)
        size = states.shape[1]
        places = self._positions[:, position : position + size] if places is None else places
        feed = {"inputs_embeds": states, "position_ids": places}
        if tree is None and position and self._says_masks[1 if size == 1 else SEVERAL_ROWS]:
            tree = chain_of(size, self.device)
        if tree is None:
            return self._output(subset, feed | self._of_prompts if in_prompt and size > 1 else feed)
        caches = {number: self.cache.layers[number] for number in subset.attending}
        self._masks.update(tree.masks(caches, self.model.dtype))
        try:
            return self._output(subset, feed | {"attention_mask": self._masks[subset.attending[0]]})
        finally:
            self._masks.clear()

    def _output(self, subset: "LayerSubset", feed: Mapping[str, Any]) -> Tensor:
        view = self.cache.view(subset.attending)
        return subset.decoder(**feed, **{self._cache_argument: view}, use_cache=True).last_hidden_state

    def subset(
        self, layers: Mapping[int, nn.Module], attending: tuple[int, ...], without_mlp: tuple[int, ...] = ()
    ) -> "LayerSubset":
        """Some layers by their numbers, or stand-ins for them; see `LayerSubset`."""
        hidden_from = {number: self._stand_in(number, layer) for number, layer in layers.items()}
        decoder = decoder_of(self.model, hidden_from, self._embed.scale)
        if self._rotary is not None:
            decoder.rotary_emb = self._rotary
        return LayerSubset(decoder, tuple(layers), attending, without_mlp)

    def _stand_in(self, number: int, layer: nn.Module) -> nn.Module:
        """The layer as pieces of the model have it."""
        return with_mask_of(self._masks, number, layer)
