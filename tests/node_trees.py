"""Trees of tokens in flight that no stage holds entries of."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ppd_runtime.pipeline.staged.tree import Node, NodeTree


def node_tree(history: list[int]) -> NodeTree:
    """Behind a prompt, which is all of the history so far."""
    stage: Any = SimpleNamespace(keep=lambda node: None, drop=lambda node: None)
    return NodeTree(stage, history, len(history))


def chain_behind(history: list[int], tokens: Sequence[int]) -> tuple[NodeTree, list[Node]]:
    """A tree with these tokens one behind the other, and the nodes of the prompt's end and of all of them."""
    tree = node_tree(history)
    nodes = [tree.prompt]
    for number, token in enumerate(tokens, start=1):
        node = tree.add(number, token, nodes[-1].position + 1, nodes[-1].number)
        assert node is not None
        nodes.append(node)
    return tree, nodes
