"""Stream a completion with pipelined decoding: each token as soon as it is certain, then the figures of the run.

python examples/stream_a_completion.py "def read_lines(path):"
"""

import sys

from ppd_runtime import PPDRuntime


def main(prompt: str = "def read_lines(path):") -> None:
    """One main process and one sub-process, on the bundled demo model."""
    with PPDRuntime("demo", k=1) as runtime:
        print(prompt, end="")
        generation = runtime.stream(prompt, max_new_tokens=48)
        for event in generation:
            print(event.text, end="", flush=True)
        stats = generation.result.stats
    print(f"\n\n{stats.new_tokens} tokens, {stats.hits} started early, {stats.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
