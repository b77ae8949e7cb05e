"""`ppd search-layers`: find what SWIFT may leave out of a model, before it decodes anything that matters."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppd_runtime.cli import options
from ppd_runtime.cli.errors import one_line_errors
from ppd_runtime.cli.generate import show_progress
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.outputs import check_outputs
from ppd_runtime.methods.choices import SearchSettings

if TYPE_CHECKING:
    from ppd_runtime.methods.layer_search import LayerSearch


@takes(place=options.IN_PROCESS)
def search_layers(
    out: Annotated[Path, typer.Option(help="Write the set here, for `ppd generate --method swift --layer-set`.")],
    model: options.Model = "demo",
    prompts: options.Prompts = "demo",
    skip_ratio: Annotated[
        float, typer.Option(help="Share of attentions and MLPs to leave out.")
    ] = SearchSettings.skip_ratio,
    search_steps: Annotated[int, typer.Option(help="Sets to try at the most.")] = SearchSettings.steps,
    bayes_interval: Annotated[
        int, typer.Option(help="Choose every so many sets by Bayesian optimisation; 0: all at random.")
    ] = SearchSettings.bayes_interval,
    search_windows: Annotated[
        int, typer.Option(help="Score a set by so many windows of text before its score ends the search.")
    ] = 4,
    max_new_tokens: options.MaxNewTokens = 128,
    limit: options.Limit = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same search.")] = SearchSettings.seed,
    *,
    place: Settings,
    as_json: options.AsJson = False,
) -> None:
    """Run SWIFT's search to its end over given prompts, greedily (Self-SD's offline search)."""
    with one_line_errors(search_layers):
        from ppd_runtime.tune.layer_sets import find_layer_set
        from ppd_runtime.tune.prompt_files import read_prompts

        check_outputs(out)
        texts = [prompt.text for prompt in read_prompts(prompts, limit)]
        search = find_layer_set(
            out,
            model,
            texts,
            max_new_tokens,
            _show,
            skip_ratio=skip_ratio,
            search_steps=search_steps,
            bayes_interval=bayes_interval,
            search_windows=search_windows,
            search_seed=seed,
            **place,
        )
    if as_json:
        print(json.dumps(json.loads(out.read_text(encoding="utf-8"))))
        return
    best = search.best
    found = f"the best predicts {search.matchness:.3f} of the tokens" if search.steps else "so it is the uniform one"
    print(f"{out}: {search.steps} sets tried, {found}")
    print(f"left out, layers counted from 0: attention {list(best.attention)}, MLP {list(best.mlp)}")


def _show(search: "LayerSearch") -> None:
    line = f"{search.steps} of at most {search.settings.steps} sets, the best {search.matchness:.3f}"
    show_progress("" if search.finished else line)
