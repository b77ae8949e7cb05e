"""Decode with a model of your own in compiled code: a folder with config.json, a tokenizer and safetensors.

python examples/compiled_model.py path/to/model "Once upon a time"

The first run compiles each kind of layer, in 10 to 30 seconds and with a C++ compiler; later runs load what it kept.
"""

import sys

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams


def main(model: str = "demo", prompt: str = "import os\n") -> None:
    """Pipelined and ordinary decoding, both compiled, give the same tokens."""
    params = SamplingParams(max_new_tokens=24)
    with PPDRuntime(model, k=1, compile=True) as runtime:
        early = runtime.generate(prompt, params)
    with OrdinaryDecoding(model, compile=True) as ordinary:
        plain = ordinary.generate(prompt, params)
    print(prompt + early.text)
    for name, result in (("pipelined", early), ("ordinary", plain)):
        print(f"{name}: {1000 * result.stats.time_per_token_s:.2f} ms a token")
    print("same tokens:", early.token_ids == plain.token_ids)


if __name__ == "__main__":
    main(*sys.argv[1:3])
