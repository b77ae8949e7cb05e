"""Trees that grow and lose branches at random, run by a stage in passes of any sizes."""

import random
from collections.abc import Generator, Sequence

from torch import Tensor

from ppd_runtime.models.stage.tree_range import TreeRange

MOST_NODES = 24
Passes = Generator[tuple[list[int], list[list[int]]], Tensor, dict[int, Tensor]]


def followed(rows: TreeRange, prompt: int, sizes: Sequence[int], seed: int) -> dict[int, Tensor]:
    """The states of each node of a tree that grows and loses branches at random, the same for any `sizes` of passes."""
    (states,) = followed_together(rows, [(rows, following(rows, prompt, sizes, seed))])
    return states


def followed_together(rows: TreeRange, texts: Sequence[tuple[TreeRange, Passes]]) -> list[dict[int, Tensor]]:
    """The same of several texts, whose rows run together as long as they have any."""
    found: dict[int, dict[int, Tensor]] = {}
    asked = {i: next(passes) for i, (_, passes) in enumerate(texts)}
    while asked:
        got = rows.run_together([(texts[i][0], *given) for i, given in asked.items()])
        for i, states in zip(list(asked), got, strict=True):
            try:
                asked[i] = texts[i][1].send(states)
            except StopIteration as stop:
                found[i] = stop.value
                del asked[i]
    return [found[i] for i in range(len(texts))]


def following(rows: TreeRange, prompt: int, sizes: Sequence[int], seed: int) -> Passes:
    """Yields what the next pass is over, and is sent the states behind it."""
    rng, sizes_left = random.Random(seed), list(sizes)
    rows.begin(prompt + 60)
    rows.run_prompt([40 + i % 200 for i in range(prompt)], 0)
    paths: dict[int, list[int]] = {}
    states: dict[int, Tensor] = {}
    for number in range(8):
        new = range(10 * number, 10 * number + rng.randrange(1, 9))
        for node in new:
            paths[node] = [*paths.get(rng.choice([-1, *paths]), []), node]
        start = new.start
        while start < new.stop:
            together = range(start, min(new.stop, start + sizes_left[0]))
            sizes_left = [*sizes_left[1:], sizes_left[0]]
            got = yield [node + 5 for node in together], [paths[node] for node in together]
            states |= {node: got[0, i].clone() for i, node in enumerate(together)}
            start = together.stop
        kept = rng.choice([path[0] for path in paths.values()])
        for node in [node for node, path in paths.items() if path[0] != kept]:
            rows.drop(node)
            del paths[node]
        rows.keep(kept)
        paths = {node: path[1:] for node, path in paths.items() if path[1:]}
        while len(paths) > MOST_NODES - 9:
            leaf = max(paths, key=lambda node: len(paths[node]))
            rows.drop(leaf)
            del paths[leaf]
    return states
