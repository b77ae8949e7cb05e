"""A pass over rows, which stops between two layers once a decision has dropped all rows."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange
from ppd_runtime.pipeline.ports import Awaited
from ppd_runtime.pipeline.staged.ports import RowsPass
from ppd_runtime.pipeline.staged.tree import Node, NodeTree

Look = Callable[[], Generator[Awaited, Any, bool]]
"""Takes waiting messages; returns True if the whole pass is of no use."""


def run_nodes(
    stage: TreeRange, tree: NodeTree, nodes: Sequence[Node], inputs: Sequence[int] | Tensor, look: Look | None
) -> Generator[Awaited, Any, tuple[list[Node], Tensor]]:
    """Run nodes as one pass; returns those that may still become certain, and their states `[1, nodes, hidden_size]`.

    If no node is certain, the pass looks for decisions every few layers and goes on with the remaining rows. If no row
    remains, the pass stops, the tree is told of no node, and the stage's entries of the nodes are free again. A pass
    with a certain token runs through. `look` is None if other requests wait for this pass.
    """
    running, layer = list(nodes), 0
    states: Any = inputs
    while layer < stage.num_layers:
        if layer and look:
            over = yield from look()
            alive = [] if over else [row for row, node in enumerate(running) if not node.is_dropped]
            if len(alive) < len(running):
                running, states = [running[row] for row in alive], states[:, alive]
            if not running:
                return [], states
        size = stage.layers_at_once if look and not any(node.is_certain for node in running) else stage.num_layers
        layers = range(layer, min(layer + size, stage.num_layers))
        states = yield RowsPass(stage, states, [tree.path(node) for node in running], layers)
        layer = layers.stop
    for node in running:
        tree.note_run(node)
    return running, states
