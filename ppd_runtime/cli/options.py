"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help='A local folder, a hub name (or name@revision), or "demo".')]
Prompts = Annotated[
    str, typer.Option(help='A JSON Lines file with a "prompt" in each line, or "demo" for the shipped prompts.')
]
Limit = Annotated[int | None, typer.Option(help="Take so many prompts from the file; default: all.")]
ExitHead = Annotated[str, typer.Option(help='"shared" (the model\'s own), or the folder of a trained one.')]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate for each prompt at the most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens with this share, in (0, 1].")]
TopK = Annotated[int, typer.Option(help="Sample among so many likeliest tokens; 0 or -1 is all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: less repetition, of the prompt too.")]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: tokens that were generated become less likely.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Above 0: the less likely, the oftener they were generated.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="End behind this token; may be given again.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text; each further prompt has the next one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Threads = Annotated[int, typer.Option(help="CPU threads for each worker.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="Write what every process did and when into this JSON file, for ui.perfetto.dev.")
]
TimelineFile = Annotated[Path | None, typer.Option(help="Draw the first tokens on the clock into this image.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Write the same JSON into this file.")]
KeptOut = Annotated[
    Path | None, typer.Option(help="Write the same JSON into this file; results are kept beside it until then.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="host:port of a running Ray cluster, auto for one that runs here, or local for one of its own; "
        "default: RAY_ADDRESS.",
        rich_help_panel="Pipelined decoding",
    ),
]
