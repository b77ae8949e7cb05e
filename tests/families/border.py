"""`PYTHONPATH=tests python -m families.border`: what the token costs at which a long-RoPE text is read anew."""

import statistics
import tempfile
import time
from itertools import pairwise

from families.attack import prompts
from families.specimens import Specimen
from models_for_tests import build_tokenizer

from ppd_runtime import OrdinaryDecoding

_BORDER, _HEAD_DIM, _BEFORE = 2048, 64, 16
_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
_FACTORS = {"short_factor": [1.0] * (_HEAD_DIM // 2), "long_factor": [4.0] * (_HEAD_DIM // 2)}


def main() -> None:
    """Print the time of the token at the border, of the others, and of the prompt's first."""
    border = {"original_max_position_embeddings": _BORDER}
    rotary = {"rope_type": "longrope", "rope_theta": 10_000.0, **_FACTORS, **border}
    shape = _SHAPE | {"head_dim": _HEAD_DIM, "max_position_embeddings": 2 * _BORDER} | border
    with tempfile.TemporaryDirectory() as folder:
        Specimen("phi3", "long", shape | {"rope_parameters": rotary}).build().save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        (prompt,) = prompts([_BORDER + 1 - _BEFORE])
        times = [time.perf_counter()]
        for _ in OrdinaryDecoding(folder, dtype="float32").stream(prompt, max_new_tokens=2 * _BEFORE, ignore_eos=True):
            times.append(time.perf_counter())
    milliseconds = [1000 * (b - a) for a, b in pairwise(times)]
    at = milliseconds.pop(_BEFORE)
    usual = statistics.median(milliseconds[1:])
    print(f"at the border {at:.0f} ms, another token {usual:.1f} ms, the prompt and its token {milliseconds[0]:.0f} ms")


if __name__ == "__main__":
    main()
