"""What `ray job submit --working-dir . -- python -m cluster.job …` runs: a batch of prompts, each once, or a server."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.results import ResultsFile
from ppd_runtime.cli import options
from ppd_runtime.cli.errors import OneLineGroup, one_line_errors
from ppd_runtime.cli.options import Settings, takes
from ppd_runtime.cli.serve import check_installed
from ppd_runtime.imports import quick_imports
from ppd_runtime.sampling.params import SamplingParams
from ppd_runtime.server.settings import ServerSettings
from ppd_runtime.settings.config import RuntimeConfig, without_earlier_texts

if TYPE_CHECKING:
    from ppd_runtime import PPDRuntime
    from ppd_runtime.methods.generation import Generation
    from ppd_runtime.results import GenerationResult, Stats

app = typer.Typer(cls=OneLineGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def job() -> None:
    """Pipelined decoding as a job on a running Ray cluster."""


_RUNTIME = options.runtime_but(
    "layout", "launcher", "ray_address", "bind_interface", "run_ahead", "trace", "drafter_device"
)
"""All but what a job decides itself."""
BindInterface = Annotated[
    str | None, typer.Option(help="The driver's address, or auto: workers may be on any host then.")
]


@app.command()
@takes(runtime=options.group(RuntimeConfig, _RUNTIME), sampling=options.sampling(*options.SAMPLING))
def generate(
    prompt_file: Annotated[
        str, typer.Option(help='JSON Lines with a "prompt" each, a .txt with one a line, or "demo".')
    ],
    out: Annotated[Path, typer.Option(help="A JSON line for each prompt is added here; a rerun skips those it holds.")],
    limit: options.Limit = None,
    bind_interface: BindInterface = None,
    *,
    runtime: Settings,
    sampling: Settings,
) -> None:
    """Continue every prompt of a file; the tokens are ordinary decoding's. Each further prompt has the next seed."""
    with one_line_errors(generate):
        with quick_imports():
            from ppd_runtime import PPDRuntime
            from ppd_runtime.tune.prompt_files import read_prompts

        if bind_interface == "auto":
            bind_interface = _own_address()
        prompts = [prompt.text for prompt in read_prompts(prompt_file, limit)]
        params = SamplingParams(**sampling)
        config = RuntimeConfig(launcher="ray", bind_interface=bind_interface, **runtime)
        opened = PPDRuntime(config=config, progress=_say)
        params = opened.settled(params)
        requests = _requests(opened, prompts, params)
        with ResultsFile(lasting(out), prompts, {**_settings(opened), **params.as_dict()}) as results:
            _answer(opened, prompts, requests, results)


@app.command()
@takes(runtime=options.group(RuntimeConfig, _RUNTIME), server=options.group(ServerSettings))
def serve(
    bind_interface: BindInterface = None,
    *,
    runtime: Settings,
    server: Settings,
) -> None:
    """Answer OpenAI's clients, as `ppd serve` does, until the job is stopped; clients reach the driver's host."""
    with one_line_errors(serve):
        check_installed()
        with quick_imports():
            from ppd_runtime import PPDRuntime
            from ppd_runtime.server.run import Prepared, serve_prepared

        prepared = Prepared(ServerSettings(**server))
        runtime = without_earlier_texts(runtime)
        if bind_interface == "auto":
            bind_interface = _own_address()
        config = RuntimeConfig(launcher="ray", bind_interface=bind_interface, **runtime)
        opened = PPDRuntime(config=config, progress=_say)
        _connect()
        with opened:
            serve_prepared(opened, prepared, lambda: _say(f"{opened.info.name} at {prepared.url}"))


def _requests(runtime: "PPDRuntime", prompts: Sequence[str], sampling: SamplingParams) -> "list[Generation]":
    """All requests, checked; each further prompt has the next seed."""
    requests = []
    for index, prompt in enumerate(prompts):
        try:
            requests.append(runtime.request(prompt, replace(sampling, seed=sampling.seed + index), live=False))
        except ValueError as error:
            raise ValueError(f"prompt {index + 1} of {len(prompts)}: {error}") from error
    return requests


def _settings(runtime: "PPDRuntime") -> dict[str, Any]:
    """What the results depend on: everything but where the workers are and how their messages travel."""
    config = runtime.config
    cuts = list(config.cuts) if config.cuts else None
    stages = {"stages": config.stages, "cuts": cuts} if config.stages else {}
    weights = {"weights": config.weights} if config.weights else {}
    return {
        **stages,
        **weights,
        "model": config.model,
        "k": config.k,
        "workers": config.num_subs,
        "exit_layer": runtime.exit_layer,
        "dtype": runtime.dtype,
        "device": runtime.device,
        "threads": config.threads_per_worker,
        "compile": config.compile,
        "exit_head": config.exit_head,
    }


def lasting(out: Path) -> Path:
    """Where `out` lasts: Ray throws its copy of the working directory away, so a relative path is the home folder's."""
    return Path.home() / out if "runtime_resources" in Path.cwd().parts else out


def _answer(
    runtime: "PPDRuntime", prompts: Sequence[str], requests: "Sequence[Generation]", results: ResultsFile
) -> None:
    left = [index for index in range(len(requests)) if index not in results.done]
    _say(f"{len(results.done)} of {len(requests)} prompts are done in {results.path}")
    if not left:
        return
    from ppd_runtime.methods.generation import as_they_end

    _connect()
    with runtime:
        pace = _Pace()
        for number in as_they_end([requests[index] for index in left], runtime.max_requests):
            index = left[number]
            result = requests[index].result
            results.append(index, {"prompt": prompts[index], **_row(result)})
            _say(
                f"{len(results.done)}/{len(requests)} prompts, {pace.after(result.stats)}, {runtime.restarts} restarts"
            )


def _connect() -> None:
    """Join the cluster that the job runs on; what the workers log comes back with their names before each line."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read when Ray is imported
    from ppd_runtime.launch.choice import check_ray_address, ray_is_initialized
    from ppd_runtime.launch.ray.session import join

    if not ray_is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        check_ray_address(address, "RAY_ADDRESS")  # Ray itself would try for minutes
        join(address, 0, lambda line: None, log_to_driver=True)


def _own_address() -> str:
    """The address by which the cluster knows the host of this process."""
    _connect()
    from ppd_runtime.launch.ray.placement import this_host

    return this_host()


def _row(result: "GenerationResult") -> Mapping[str, Any]:
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "match_rate": stats.match_rate,
        "hits": stats.hits,
        "misses": stats.misses,
        "latency_s": stats.latency_s,
        "time_to_first_token_s": stats.time_to_first_token_s,
        "tokens_per_second": stats.tokens_per_second,
        "stall_s": stats.stall_s,
    }


class _Pace:
    """How fast a run is, and how often candidates are right."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tokens = self._hits = self._misses = 0

    def after(self, stats: "Stats") -> str:
        """In words, with one more result."""
        self._tokens += stats.new_tokens
        self._hits += stats.hits
        self._misses += stats.misses
        rate = self._hits / max(1, self._hits + self._misses)
        return f"{self._tokens / (time.monotonic() - self._began):.1f} tokens/s, hit rate {rate:.2f}"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    app()
