"""Sample with a seed in three layouts: ordinary decoding, one sub-process, three sub-processes. The text is the same.

python examples/same_text_three_layouts.py 7
"""

import sys

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams


def main(seed: str = "7") -> None:
    """The noise belongs to (seed, position), so the layout does not matter; another seed gives another text."""
    prompt = "class Reader:"
    params = SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.95, seed=int(seed))
    layouts = {
        "ordinary decoding": OrdinaryDecoding("demo", dtype="float32"),
        "one sub-process": PPDRuntime("demo", k=1, dtype="float32"),
        "three sub-processes, exit at layer 8": PPDRuntime("demo", k=3, exit_layer=8, dtype="float32"),
    }
    texts = []
    for name, layout in layouts.items():
        with layout:
            texts.append(layout.generate(prompt, params).text)
        print(f"{name}: {texts[-1]!r}")
    print("same text:", len(set(texts)) == 1)


if __name__ == "__main__":
    main(*sys.argv[1:2])
