"""What workers compare before they serve tells models apart, too: no two stages hold the same layers."""

from ppd_runtime import PPDRuntime
from ppd_runtime.workers.worker import Worker


def bits_of_stages(folder):
    """Of the workers of two stages, in this process."""
    runtime = PPDRuntime(str(folder), stages=2, transport="local", dtype="float32")
    return [Worker(spec).bits() for spec in runtime._specs]


def test_another_model_in_the_same_place_is_noticed(model_folder):
    """As on two hosts whose folders of the same path hold different weights."""
    last, first = bits_of_stages(model_folder("llama", num_layers=4))
    assert first.different(last) == []
    _, other = bits_of_stages(model_folder("llama", num_layers=4, seed=1))
    assert "the model's files" in other.different(last)
