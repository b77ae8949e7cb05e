"""Rows of a stage's pass that run together: each has the bits of a pass of its own, whatever is beside it and where."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from compilers import needs_compiler
from followed_trees import MOST_NODES, followed, followed_together, following
from grids import nightly
from models_for_tests import FAMILIES, load_stage
from torch import Tensor
from transformers import PreTrainedModel

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.models.compiled.export import compile_layers
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.pass_kinds import PassKind
from ppd_runtime.models.stage.caches import ATTENDED_ROWS
from ppd_runtime.models.stage.layer_range import LayerRange
from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.tune.prompt_files import read_prompts

pytestmark = needs_compiler
MOST_TOGETHER = dict.fromkeys(FAMILIES, 8) | {"gemma2": 1}
"""Rows of a pass: soft caps of attention are PyTorch's own, whose bits change with the rows beside a row."""
ModelFolder = Callable[..., Path]


class CountedLayers(CompiledLayers):
    """Notes how many rows each pass is over."""

    passes: Counter[int]
    joined = 0

    def run(self, first, last, hidden, caches):
        """A row alone."""
        self.passes[1] += 1
        return super().run(first, last, hidden, caches)

    def run_tree(self, first, last, hidden, tree, caches):
        """Rows together."""
        self.passes[hidden.shape[1]] += 1
        return super().run_tree(first, last, hidden, tree, caches)

    def run_trees(self, first, last, hidden, trees, caches):
        """Rows of several texts together."""
        self.joined += 1
        return super().run_trees(first, last, hidden, trees, caches)


class MovedLayers(CountedLayers):
    """Its sequences lie in the rows of their positions: what is kept of a tree moves there."""

    @property
    def reads_lists(self):
        """As if it had other attention."""
        return False


def counted_layers(
    model: PreTrainedModel, kinds: Sequence[int] = (1, PassKind.SEVERAL), first: int = 0
) -> CountedLayers:
    files = {kind: compile_layers(model.config, model.dtype, model.device, kind) for kind in kinds}
    layers = CountedLayers(model, files, first=first)
    layers.passes = Counter()
    return layers


def tree_range(model: PreTrainedModel, first: int = 0, moves: bool = False) -> tuple[TreeRange, CountedLayers]:
    layers = counted_layers(model, first=first)
    layers.__class__ = MovedLayers if moves else CountedLayers
    rows = TreeRange(LayerRange(model, layers, first), MOST_NODES)
    layers.passes.clear()
    return rows, layers


@pytest.mark.parametrize(
    "family", [family if family in ("llama", "mistral") else pytest.param(family, marks=nightly) for family in FAMILIES]
)
def test_a_rows_bits_are_its_paths(family: str, model_folder: ModelFolder) -> None:
    """Over random trees, in rows that change places or not; windows roll, and steps of the attended rows are passed."""
    model = load_stage(model_folder(family)).model
    (rows, layers), (in_place, _) = (tree_range(model, moves=moves) for moves in (False, True))
    in_place.most_together = 1
    for seed, prompt in enumerate((3, ATTENDED_ROWS - 4, ATTENDED_ROWS - 1, 2 * ATTENDED_ROWS + 7)):
        alone = followed(in_place, prompt, [1], seed)
        for sizes in ([8], [1, 2, 3], [2, 7, 1, 8], [5], [1]):
            together = followed(rows, prompt, sizes, seed)
            assert together.keys() == alone.keys()
            assert all(torch.equal(together[node], alone[node]) for node in alone)
            order = rows._cache.memory.order.rows(0, prompt + 8)
            assert isinstance(order, Tensor) == (MOST_TOGETHER[family] > 1), "the text's rows are not its positions"
    assert rows.most_together == MOST_TOGETHER[family]
    assert set(layers.passes) == set(range(1, MOST_TOGETHER[family] + 1))
    assert rows.joins_requests == (MOST_TOGETHER[family] > 1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_several_requests(family: str, model_folder: ModelFolder) -> None:
    """Each has the bits that it has alone, whosever rows are beside its own."""
    rows, layers = tree_range(load_stage(model_folder(family)).model)
    prompts = (3, 2 * ATTENDED_ROWS + 7, ATTENDED_ROWS - 4, 70)
    rows.most_together, found = 1, rows.most_together
    alone = [followed(rows, prompt, [1], seed) for seed, prompt in enumerate(prompts)]
    rows.most_together = found
    layers.passes.clear()
    stages = [rows.another() for _ in prompts]
    texts = list(enumerate(zip(stages, prompts, strict=True)))
    for sizes in ([8], [1], [2, 7, 1, 3]):
        passes = [following(stage, prompt, sizes, seed) for seed, (stage, prompt) in texts]
        together = followed_together(rows, list(zip(stages, passes, strict=True)))
        for one, other in zip(together, alone, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[node], other[node]) for node in one)
    assert layers.joined > 20


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_trees_bits_are_its_paths(family: str, model_folder: ModelFolder) -> None:
    """As the methods on one device run it, and candidates of one position; more of them than a pass has, too."""
    model = load_stage(model_folder(family)).model
    layers = counted_layers(model)
    layers.add(PassKind.HEAD)
    stage = LayerRange(model, layers)
    for position in (3, ATTENDED_ROWS - 2):
        for parents in ([-1, -1, -1], [-1, 0, 0, 1, 2, 1, -1, 6], [-1, *(node * 7 // 10 for node in range(39))]):
            stage.begin(position + len(parents))
            stage.run(0, 4, list(range(40, 40 + position)), 0)
            together = stage.run_tree(range(9, 9 + len(parents)), parents, position)
            logits = stage.token_logits(together)
            assert [stage.length(i) for i in range(4)] == [position + len(parents)] * 4
            stage.truncate(position)
            for node in range(len(parents)):
                path = [node]
                while (parent := parents[path[0]]) >= 0:
                    path.insert(0, parent)
                alone = [stage.run(0, 4, [9 + each], position + i) for i, each in enumerate(path)]
                stage.truncate(position)
                assert torch.equal(together[:, node : node + 1], alone[-1])
                assert torch.equal(logits[node], stage.logits(alone[-1]))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_what_is_kept_of_a_tree_has_its_bits_wherever_it_lies(family: str, model_folder: ModelFolder) -> None:
    """Passes of one token and of several, of our code and of the library's, and the entries that leave and come."""
    kinds = (
        {"layer_types": ["sliding_attention"] * 4} if family == "gemma2" else {}
    )  # of layers, each compiled for itself
    model, found = load_stage(model_folder(family, **kinds)).model, []
    for kind in (CountedLayers, MovedLayers):
        layers = counted_layers(model)
        layers.__class__ = kind
        stage, states = LayerRange(model, layers), []
        stage.begin(100)
        stage.run(0, 4, list(range(40, 90)), 0)
        for length, tokens in ((50, [9, 8, 7, 6, 5]), (52, [4, 3, 2, 1, 9])):
            states.append(stage.run_tree(tokens, [-1, -1, 1, 0, 2], length))
            stage.keep_path(length, [1, 2])
        in_order = isinstance(stage.cache.memory.order.rows(0, 54), slice)
        assert in_order == (kind is MovedLayers or family == "gemma2")
        states += [stage.run(0, 4, [7], 54), stage.run(0, 4, [6, 5, 4], 55), stage.run(0, 4, list(range(30, 50)), 58)]
        entries = stage.export_entries(49, 56, 4)
        stage.truncate(52)
        stage.import_entries(list(entries[3:]))
        states += [entries, stage.run(0, 4, [5], 56), *stage.cache.copy_rows(40, 57)]
        found.append(states)
    assert all(map(torch.equal, *found))


def test_siblings_share_a_pass(model_folder: ModelFolder) -> None:
    rows, layers = tree_range(load_stage(model_folder("llama")).model)
    rows.begin(40)
    rows.run_prompt([1, 2, 3], 0)
    rows.run_rows([5, 6, 7], [[0], [1], [2]])
    assert layers.passes == {3: 1}
    rows.run_rows(list(range(10)), [[i % 3, 10 + i] for i in range(10)])
    assert layers.passes == {3: 1, 8: 1, 2: 1}
    rows.run_rows([9], [[2, 12, 20]])
    assert layers.passes == {3: 1, 8: 1, 2: 1, 1: 1}


def test_where_company_changes_bits_each_row_runs_alone(model_folder: ModelFolder) -> None:
    model = load_stage(model_folder("llama")).model

    class Dependent(CountedLayers):
        """A number of each row but the first one depends on how many there are."""

        def run_tree(self, first, last, hidden, tree, caches):
            states = super().run_tree(first, last, hidden, tree, caches)
            states[0, -1, 0] += (hidden.shape[1] > 6) * 1e-6
            return states

    layers = counted_layers(model)
    layers.__class__ = Dependent
    rows = TreeRange(LayerRange(model, layers), MOST_NODES)
    assert rows.most_together == 1
    layers.passes.clear()
    rows.begin(40)
    rows.run_prompt([1, 2, 3], 0)
    rows.run_rows([5, 6, 7], [[0], [1], [0, 2]])
    assert layers.passes == {1: 3}


def test_stages_without_the_first_layers_and_without_the_code(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with windows that are all longer than what is tried."""
    model = load_stage(model_folder("llama")).model
    assert tree_range(model, first=2)[0].most_together == 8
    with monkeypatch.context() as patch:
        patch.setattr("ppd_runtime.models.stage.tree_range._LONGEST_TRIED_WINDOW", 1)
        assert tree_range(load_stage(model_folder("mistral")).model)[0].most_together == 8
    one_token = LayerRange(model, counted_layers(model, (1,)))
    for stage in (LayerRange(model), one_token):
        assert TreeRange(stage, MOST_NODES).most_together == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pass_leaves_the_states_that_it_is_given(model_folder: ModelFolder, compiled: bool) -> None:
    """They are a message's, of which another pass may run the rest."""
    stage = load_stage(model_folder("llama"))
    rows = tree_range(stage.model)[0] if compiled else TreeRange(stage, 16)
    rows.begin(20)
    rows.run_prompt([40, 41, 42], 0)
    states = torch.randn(1, 5, stage.model.config.hidden_size, generator=torch.manual_seed(0))
    before = states.clone()
    rows.run_rows(states[:, 1:4], [[1], [2], [1, 3]])
    assert torch.equal(states, before)


def test_bfloat16_rows_run_one_by_one(model_folder: ModelFolder) -> None:
    """Sums in another order are mostly rounded to the same number, so a trial may miss that they differ."""
    model = load_stage(model_folder("llama", dtype="bfloat16"), dtype="bfloat16").model
    layers = CompiledLayers(model, {PassKind.ONE: compile_layers(model.config, model.dtype, model.device)})
    layers._layers[PassKind.SEVERAL] = layers._layers[PassKind.ONE]  # which is not run: that there is code is enough
    stage = LayerRange(model, layers)
    assert stage.compiles_chains(8), "they could"
    rows = TreeRange(stage, MOST_NODES)
    assert (rows.most_together, rows.joins_requests) == (1, False)


@nightly
@pytest.mark.parametrize("prompt", [prompt.text for prompt in read_prompts("demo", 6)], ids=range(6))
def test_bfloat16_texts_in_stages_of_several_rows(prompt: str) -> None:
    """At temperature 1 a sixth of such texts had another token when rows ran together, on a CPU with AVX512-BF16."""
    place = {"dtype": "bfloat16", "compile": True}
    params = [SamplingParams(200, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3)]
    ordinary = OrdinaryDecoding("demo", **place)
    with PPDRuntime("demo", stages=2, k=3, rows=8, transport="local", **place) as runtime:
        for asked in params:
            assert runtime.generate(prompt, asked).token_ids == ordinary.generate(prompt, asked).token_ids
