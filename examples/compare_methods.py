"""Compare decoding methods on prompts of your own: tokens per second, and whether every text is ordinary decoding's.

python examples/compare_methods.py "import os" "def area("

`ppd bench` does the same with quartiles, draft statistics and charts.
"""

import sys

from ppd_runtime import open_method

METHODS = ("autoregressive", "layerskip", "adaspeed", "kangaroo", "ppd")


def main(prompts: list[str]) -> None:
    """A short first run warms each method up; it is not counted."""
    expected: list[tuple[int, ...]] = []
    for name in METHODS:
        settings = {"k": 1} if name == "ppd" else {}
        with open_method("demo", name, dtype="float32", **settings) as method:
            method.generate(prompts[0], max_new_tokens=4)
            results = [method.generate(prompt, max_new_tokens=48) for prompt in prompts]
        tokens = [result.token_ids for result in results]
        expected = expected or tokens
        seconds = sum(result.stats.latency_s for result in results)
        speed = sum(map(len, tokens)) / seconds
        print(f"{name:15} {speed:6.0f} tokens/s, same texts: {tokens == expected}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["import os\n", "def area(radius):"])
