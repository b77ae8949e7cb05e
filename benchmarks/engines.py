"""What decodes greedily on CPUs, ours and others', each behind the same call; a process of its own for each."""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peer_files import gguf_file, llama_cpp
from ppd_runtime.launch.cpu_affinity import on_cores
from ppd_runtime.tune.compare import CannotDecodeError

Answer = tuple[list[int], float]
"""New tokens, and the seconds of one of them after the first."""


@dataclass(frozen=True)
class Task:
    """What an engine is to be."""

    engine: str
    """One of `ENGINES`."""
    weights: str
    """The format in which it holds them."""
    threads: int
    model: str
    """The model's folder."""
    folder: str
    """Where files made of it are kept and found."""
    context: int
    """Tokens of a prompt and its text, at the most."""


class Ours:
    """This project's ordinary decoding, its stages, or the layout that it chooses."""

    def __init__(self, task: Task) -> None:
        from ppd_runtime import OrdinaryDecoding, PPDRuntime
        from ppd_runtime.settings.config import FORMATS

        settings: dict[str, Any] = {"dtype": "float32", "compile": task.engine != EAGER}
        if task.weights in FORMATS:
            settings["weights"] = task.weights
        if task.engine == STAGES:
            self._decoding: Any = PPDRuntime(task.model, stages=task.threads, launcher="processes", **settings)
        elif task.engine == AUTO:
            self._decoding = PPDRuntime(task.model, layout="auto", draft_memory_mb=0, **settings)
        else:
            self._decoding = OrdinaryDecoding(task.model, threads=task.threads, **settings)

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        """So many tokens, whether or not the text ends among them."""
        result = self._decoding.generate(prompt, max_new_tokens=num_tokens, ignore_eos=True)
        return list(result.token_ids), result.stats.time_per_token_s


class Transformers:
    """transformers' `generate`."""

    def __init__(self, task: Task) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(task.threads)
        self._model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.weights)).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        import torch

        seen = _TimesOfTokens()
        ids = torch.tensor([prompt])
        self._model.generate(ids, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0, streamer=seen)
        return [int(token) for token in seen.values[1:]], _time_per_token(seen.times[1:], num_tokens)


class _TimesOfTokens:
    """When transformers gives a prompt and each new token."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.values.append(value)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


class LlamaCpp:
    """llama.cpp by its own C interface, with the settings that it has by default."""

    def __init__(self, task: Task) -> None:
        self._lib = lib = llama_cpp()
        lib.llama_backend_init()
        path = gguf_file(Path(task.model), task.weights, Path(task.folder))
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        settings = lib.llama_context_default_params()
        settings.n_ctx = task.context
        settings.n_threads = settings.n_threads_batch = task.threads
        self._context = self._model and lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise ValueError(f"llama.cpp does not open {path.name}")
        self._sampler = lib.llama_sampler_init_greedy()

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        lib, tokens, times = self._lib, list(prompt), []
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        given = prompt
        for _ in range(num_tokens):
            ids = (lib.llama_token * len(given))(*given)  # a batch only points to them
            batch = lib.llama_batch_get_one(ids, len(given))
            if lib.llama_decode(self._context, batch):
                raise ValueError(f"llama.cpp decodes no token {len(tokens)}")
            given = [lib.llama_sampler_sample(self._sampler, self._context, -1)]
            tokens += given
            times.append(time.perf_counter())
        return tokens[len(prompt) :], _time_per_token(times, num_tokens)


class LlamaCppLookup:
    """llama.cpp's own speculation: prompt lookup of the Python package, with what that advises on CPUs."""

    def __init__(self, task: Task) -> None:
        llama_cpp()
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        path = gguf_file(Path(task.model), task.weights, Path(task.folder))
        self._llama = Llama(
            str(path),
            n_ctx=task.context + _LOOKED_UP + 1,
            n_threads=task.threads,
            n_threads_batch=task.threads,
            logits_all=True,  # else its table of scores is too short for a longer prompt
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=_LOOKED_UP),
            verbose=False,
        )

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        """As `Ours.generate`."""
        tokens, times = [], []
        for token in self._llama.generate(prompt, temp=0.0, reset=True):
            tokens.append(int(token))
            times.append(time.perf_counter())
            if len(tokens) == num_tokens:
                break
        return tokens, _time_per_token(times, num_tokens)


_LOOKED_UP = 2  # tokens behind a match
_START_S, _ANSWER_S, _END_S = 900.0, 600.0, 10.0
_ENGINE: Any = None
EAGER, COMPILED, STAGES, AUTO = "ours-eager", "ours-compiled", "ours-stages", "ours-auto"
LLAMA_CPP, LOOKUP = "llama.cpp", "llama.cpp-lookup"
FILE = "the file's"
"""The formats that a GGUF file's matrices have."""
ENGINES: Mapping[str, Callable[[Task], Any]] = {
    **dict.fromkeys((EAGER, COMPILED, STAGES, AUTO), Ours),
    "transformers": Transformers,
    LLAMA_CPP: LlamaCpp,
    LOOKUP: LlamaCppLookup,
}
"""How each is opened; llama.cpp comes with the extra `peers`."""


def _time_per_token(times: list[float], num_tokens: int) -> float:
    return (times[-1] - times[0]) / (num_tokens - 1)


class EngineProcess:
    """An engine in a process of its own, on cores of its own, until it is closed."""

    def __init__(self, task: Task) -> None:
        self._reason, self._processes = "", list[Any]()
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with on_cores(sorted(os.sched_getaffinity(0))[-task.threads :]), contextlib.suppress(CannotDecodeError):
            self._ask(_START_S, _open, task)

    def generate(self, prompt: list[int], num_tokens: int) -> Answer:
        """What the engine answers; raises `CannotDecodeError` where it has ended, or there is none."""
        if self._reason:
            raise CannotDecodeError(self._reason)
        return self._ask(_ANSWER_S, _answer, prompt, num_tokens)

    def _ask(self, deadline_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = self._pool.submit(call, *arguments)
            self._processes = self._processes or list(self._pool._processes.values())
            return answer.result(deadline_s)
        except Exception as error:  # the engines raise all kinds, and may end their process
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self._reason = f"no answer within {deadline_s:.0f} s" if isinstance(error, TimeoutError) else said
            self.close()
            if isinstance(error, BrokenProcessPool):
                self._reason = f"ended with code {self._processes[0].exitcode}, a signal where it is negative"
            raise CannotDecodeError(self._reason) from error

    def close(self) -> None:
        """End it, whatever it does."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.join(_END_S)
            process.kill()


def _open(task: Task) -> None:
    """Open the engine of this process."""
    global _ENGINE  # noqa: PLW0603 (one for each process)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # what an engine prints is no figure
    _ENGINE = ENGINES[task.engine](task)


def _answer(prompt: list[int], num_tokens: int) -> Answer:
    return _ENGINE.generate(prompt, num_tokens)
