"""A greedy text and a sampled one, to compare ways of decoding by."""

from ppd_runtime.methods.base import TextGenerator


def texts(generator: TextGenerator) -> list[tuple[int, ...]]:
    """What a prompt gives, greedy and sampled."""
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    samplings = ({}, {"temperature": 0.9, "seed": 5})
    return [tuple(generator.generate("a fox", **settings, **sampling).token_ids) for sampling in samplings]
