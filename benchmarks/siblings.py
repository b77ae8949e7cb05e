"""How often tokens stay ordinary decoding's where candidates are run several in a pass, which rounds differently.

    python -m benchmarks.siblings --k 3 --workers 1 --dtype bfloat16
    python -m benchmarks.siblings --k 3 --workers 1 --dtype bfloat16 --temperature 1

A text that differs once goes on differently, so texts are counted up to and with their first other token: the rate is
that of tokens that are ordinary decoding's as long as all before them are.
"""

import argparse

from benchmarks.models import MODEL_HELP, model_folder
from benchmarks.recording import Figures, markdown, new_parser, positive, run
from ppd_runtime import OrdinaryDecoding, PPDRuntime
from ppd_runtime.tune.comparison.methods import common_start
from ppd_runtime.tune.prompt_files import read_prompts


def measure(options: argparse.Namespace) -> Figures:
    """Decode every prompt in both ways; the figures by name."""
    texts = [prompt.text for prompt in read_prompts(options.prompts, options.limit)]
    ask = {"max_new_tokens": options.tokens, "temperature": options.temperature, "seed": 1, "ignore_eos": True}
    layout = {"k": options.k, "workers": options.workers, "launcher": options.launcher}
    counted = same = whole = hits = 0
    with model_folder(options.model) as model:
        ordinary = OrdinaryDecoding(model, dtype=options.dtype)
        prompts = [ordinary.tokenizer.encode(text)[: options.prompt_tokens] for text in texts]
        with PPDRuntime(model, dtype=options.dtype, **layout) as runtime:
            for prompt in prompts:
                expected, got = (each.generate(prompt, **ask) for each in (ordinary, runtime))
                equal = common_start(expected.token_ids, got.token_ids)
                same, hits = same + equal, hits + got.stats.hits
                counted += min(equal + 1, options.tokens)
                whole += equal == options.tokens
        dtype = str(ordinary.stage.model.dtype).removeprefix("torch.")
    return {
        "model": options.model,
        "dtype": dtype,
        "k": options.k,
        "workers": runtime.config.num_subs,
        "temperature": options.temperature,
        "texts": len(prompts),
        "identical_texts": whole,
        "tokens": counted,
        "identical_tokens": same,
        "rate": same / counted,
        "hits": hits,
    }


def table(figures: Figures) -> str:
    """The figures in Markdown."""
    names = ["model", "dtype", "k", "workers", "temperature", "texts", "identical_texts", "tokens", "rate", "hits"]
    return markdown([name.replace("_", " ") for name in names], [[figures[name] for name in names]])


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    options = new_parser(__doc__)
    options.add_argument("--model", default="demo", help=MODEL_HELP)
    options.add_argument("--prompts", default="demo", help="a JSON Lines file, or the embedded prompts")
    options.add_argument("--limit", type=positive, default=24, help="texts")
    options.add_argument("--prompt-tokens", type=positive, default=200, help="of each prompt, at the most")
    options.add_argument("--k", type=positive, default=3)
    options.add_argument("--workers", type=positive, default=1)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--tokens", type=positive, default=64, help="new tokens for each text")
    options.add_argument("--launcher", choices=("ray", "processes"), default="processes")
    return options


if __name__ == "__main__":
    run(parser(), measure, table)
