"""Products of the same states in an exported graph, made by one call: queries, keys and values; gate and up.

The states are rounded once for weights of few bits, and what a call costs is paid once. No bit changes.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Node

from ppd_runtime.models.native.products import PRODUCTS, product

_aten = torch.ops.aten
_SAME_NUMBERS = {_aten.view.default, _aten.reshape.default, _aten.contiguous.default, _aten.clone.default}


def join_products(program: torch.export.ExportedProgram) -> None:
    """Have products that read the same states, each with a weight that is an input, made together in `program`."""
    graph, alike = program.graph_module.graph, defaultdict[object, list[Node]](list)
    for node in graph.nodes:
        if node.target is product.in_graphs() and _argument(node, 1).op == "placeholder":
            states = _argument(node, 0)
            alike[_source(states), tuple(map(str, states.meta["val"].shape))].append(node)
    for nodes in alike.values():
        for first in range(0, len(nodes), len(PRODUCTS)):
            if len(some := nodes[first : first + len(PRODUCTS)]) > 1:
                _join(graph, some)
    graph.lint()
    program.graph_module.recompile()


def _argument(node: Node, number: int) -> Node:
    found = node.args[number]
    assert isinstance(found, Node)
    return found


def _source(node: Node) -> Node:
    """The node whose numbers this one has, in another shape or another place."""
    while node.target in _SAME_NUMBERS:
        node = _argument(node, 0)
    return node


def _join(graph: torch.fx.Graph, nodes: Sequence[Node]) -> None:
    """Put one node in the place of the first of these products, and parts of its result in the places of all."""
    together = PRODUCTS[len(nodes) - 1].in_graphs()
    arguments = (_argument(nodes[0], 0), *(_argument(node, 1) for node in nodes))
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(together, arguments)
        joined.meta["val"] = together(*(node.meta["val"] for node in arguments))
        begin = 0
        for node in nodes:
            end = begin + node.meta["val"].shape[1]
            part = graph.call_function(_aten.slice.Tensor, (joined, 1, begin, end))
            part.meta["val"] = _aten.slice.Tensor(joined.meta["val"], 1, begin, end)
            node.replace_all_uses_with(part)
            begin = end
    for node in nodes:
        graph.erase_node(node)
