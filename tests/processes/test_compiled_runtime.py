"""Compiled pipelined decoding gives compiled ordinary decoding's tokens; what is compiled is compiled once."""

import contextlib
import itertools
import json
import random
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
import ray
from compilers import needs_compiler
from grids import nightly
from seeds import SEED

from ppd_runtime import OrdinaryDecoding, PPDRuntime, SamplingParams
from ppd_runtime.files.cache_folder import cache_folder
from ppd_runtime.launch import startup
from ppd_runtime.launch.ray import workers
from ppd_runtime.methods.registry import open_method
from ppd_runtime.models.checkpoint.fingerprint import model_fingerprint
from ppd_runtime.models.checkpoint.quantised_folder import quantise_model
from ppd_runtime.models.compiled.export import MOST_SEVERAL
from ppd_runtime.models.compiled.passes import CompiledLayers
from ppd_runtime.models.stage.bit_probe import output_hashes
from ppd_runtime.models.stage.emulation import EmulatedDevice
from ppd_runtime.models.trained.exit_heads import OracleHead
from ppd_runtime.tune.prompt_files import read_prompts

NEW_TOKENS = 70  # past a step of the attended rows
GREEDY, SAMPLED = {}, {"temperature": 0.8, "seed": 3}
ADDRESSES = [
    place.address
    for places in psutil.net_if_addrs().values()
    for place in places
    if place.family == socket.AF_INET and not place.address.startswith("127.")
]


pytestmark = needs_compiler


def check(
    ordinary: OrdinaryDecoding, settings: tuple[dict[str, object], ...] = (GREEDY, SAMPLED), **layout: object
) -> None:
    """Greedy and sampled tokens, with candidates that are right at seven positions in ten."""
    folder, dtype = ordinary.config.model, ordinary.config.dtype
    prompts = [[5], [40, 7, 291, 65, 133]]
    for extra in settings:
        texts = [ordinary.generate(p, max_new_tokens=NEW_TOKENS, **extra) for p in prompts]
        known = tuple((*text.prompt_ids, *text.token_ids) for text in texts)
        head = OracleHead(known, 0.7, ordinary.info.vocab_size)
        layout |= {
            "exit_head": head,
            "speculation": "always",
            "emulate": EmulatedDevice(layer_ms=2.0),
        }  # slow enough for hits on busy cores
        with PPDRuntime(folder, dtype=dtype, compile=True, **layout) as runtime:
            got = [runtime.generate(p, max_new_tokens=NEW_TOKENS, **extra) for p in prompts]
        assert [r.token_ids for r in got] == [text.token_ids for text in texts]
        assert any(r.stats.hits for r in got)
        assert all(r.stats.misses for r in got)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads(model_folder, dtype, monkeypatch):
    """The stages share the code that ordinary decoding has compiled."""
    folder = str(model_folder("llama", num_layers=5))
    ordinary = OrdinaryDecoding(folder, dtype=dtype, compile=True)
    monkeypatch.setattr("ppd_runtime.models.compiled.export._compile", lambda *_: pytest.fail("compiled again"))
    for k, exit_layer in ((1, 3), (3, 4)):
        check(ordinary, k=k, exit_layer=exit_layer, transport="local")


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=nightly), "int4"])
@pytest.mark.parametrize(
    ("method", "compiled"),
    [("swift", True), ("layerskip", False)]
    + [pytest.param(name, False, marks=nightly) for name in ("swift", "kangaroo", "adaspeed")],
)
def test_methods_with_weights_of_few_bits(monkeypatch, method, compiled, weights):
    """Their products round states to few bits. So what several tokens in a pass, or the library's code beside compiled
    code, round differently would be another token in every third of these texts.
    """
    sizes, run_tree = Counter(), CompiledLayers.run_tree

    def counted(self, first, last, hidden, tree, caches):
        sizes[tree.size > MOST_SEVERAL] += 1
        return run_tree(self, first, last, hidden, tree, caches)

    monkeypatch.setattr(CompiledLayers, "run_tree", counted)
    place = {"compile": compiled, "weights": weights}
    own = {"bayes_interval": 0} if method == "swift" else {}  # scikit-learn would change this process' environment
    ordinary = OrdinaryDecoding("demo", **place)
    with open_method("demo", method, **own, **place) as drafting:
        for number, prompt in enumerate(read_prompts("demo", 4)):
            for temperature in (0.0, 1.0):
                params = SamplingParams(120, temperature, seed=number, ignore_eos=True)
                expected = ordinary.generate(prompt.text, params)
                assert drafting.generate(prompt.text, params).token_ids == expected.token_ids
    assert sizes[True] > 10 or not compiled


def test_stages_whose_layers_are_of_one_kind(model_folder):
    """The first has no layer without a window, and none of its rotary table."""
    folder = str(model_folder("gemma3_text", num_layers=4))
    check(OrdinaryDecoding(folder, dtype="float32", compile=True), stages=4, k=1, rows=1, transport="local")


def test_stages_whose_windows_are_longer_than_what_is_tried(model_folder):
    folder = str(model_folder("mistral", num_layers=4, sliding_window=2000))
    check(OrdinaryDecoding(folder, dtype="float32", compile=True), stages=2, k=2, rows=4, transport="local")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits(model_folder, tmp_path, weights):
    folder, quantised = model_folder("llama", num_layers=5), tmp_path / "quantised"
    quantise_model(str(folder), quantised, weights)
    ordinary = OrdinaryDecoding(folder, compile=True, weights=weights)
    for model, layout in (
        (folder, {"k": 1, "weights": weights}),
        (quantised, {"stages": 3, "k": 2, "rows": 4}),
    ):
        with PPDRuntime(model, compile=True, transport="local", **layout) as runtime:
            for sampling in ({}, {"temperature": 0.9, "seed": 5}):
                settings = {"max_new_tokens": 14, "ignore_eos": True, **sampling}
                expected = ordinary.generate("a fox", **settings).token_ids
                assert runtime.generate("a fox", **settings).token_ids == expected, (layout, sampling)


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=nightly)])
def test_requests_of_one_pass(model_folder, monkeypatch, family):
    """Tokens and the bits of their probabilities are those that each request has alone; some are cancelled."""
    joined = Counter()
    run_trees = CompiledLayers.run_trees

    def counted(self, first, last, hidden, trees, caches):
        joined[len(trees)] += 1
        return run_trees(self, first, last, hidden, trees, caches)

    monkeypatch.setattr(CompiledLayers, "run_trees", counted)
    folder, draw = str(model_folder(family, num_layers=5)), random.Random(SEED)
    ordinary = OrdinaryDecoding(folder, dtype="float32", compile=True)
    sizes = [1, 3, 20, 63, 70, 300]
    long = [draw.randrange(300) for _ in range(max(sizes))]  # of which a chunk is kept
    prompts = [[*long[: draw.choice(sizes) - 1], draw.randrange(300)] for _ in range(14)]
    settings = [
        {"max_new_tokens": draw.randint(2, 70), "temperature": i % 2, "seed": i, "ignore_eos": True, "logprobs": 2}
        for i in range(len(prompts))
    ]

    def decode(runtime, number):
        found = []
        with contextlib.closing(runtime.stream(prompts[number], **settings[number])) as stream:
            for event in itertools.islice(stream, 3 if number % 5 == 4 else None):
                found.append((event.token_id, event.logprobs))
        return found

    expected = [decode(ordinary, number) for number in range(len(prompts))]
    layout = {"stages": 2, "rows": 4, "transport": "local", "max_requests": 6}
    with PPDRuntime(folder, dtype="float32", compile=True, **layout) as runtime, ThreadPoolExecutor(6) as pool:
        got = list(pool.map(partial(decode, runtime), range(len(prompts))))
    assert got == expected
    assert set(joined) >= {2, 3, 4}


@nightly
def test_threads_with_fewer_workers_than_candidates(model_folder):
    ordinary = OrdinaryDecoding(str(model_folder("llama", num_layers=5)), dtype="float32", compile=True)
    check(ordinary, k=3, workers=1, exit_layer=3, transport="local")


@pytest.mark.parametrize(("k", "settings"), [(1, (SAMPLED,)), pytest.param(2, (GREEDY, SAMPLED), marks=nightly)])
def test_ray(ray_node, model_folder, k, settings):
    ordinary = OrdinaryDecoding(str(model_folder("llama", num_layers=5)), compile=True, dtype="float32")
    check(ordinary, settings, k=k, exit_layer=3, launcher="ray")


@pytest.mark.skipif(not ADDRESSES, reason="no address but this host's own")
def test_code_that_a_worker_compiles_travels_to_all(ray_node, model_folder, monkeypatch):
    """The program compiles nothing, as where its host has no GPU; why a worker cannot is the program's error."""
    monkeypatch.setattr(startup, "_sees_device", lambda spec: False)
    folder, settings = str(model_folder("llama", num_layers=5)), {"dtype": "float32", "compile": True}
    ordinary = OrdinaryDecoding(folder, **settings)
    layout = {"k": 1, "launcher": "ray", "bind_interface": ADDRESSES[0]}
    with PPDRuntime(folder, **layout, **settings) as runtime:
        assert ray.get(runtime._workers._code).startswith(b'{"machine": ["cpu", ')
        assert all(not spec.code for spec in runtime._specs)
        bits = [post.handle.bits for post in runtime._workers.supervisor._posts.values()]
        tokens = runtime.generate([5], max_new_tokens=9).token_ids
    expected = {**output_hashes(ordinary.stage), "the model's files": model_fingerprint(ordinary.info)}
    assert [of_worker.hashes for of_worker in bits] == [expected] * 2, "another's code, or none"
    assert tokens == ordinary.generate([5], max_new_tokens=9).token_ids

    def refuse(order, kinds):
        raise ValueError("compile: no toolkit")

    monkeypatch.setattr(workers, "compile_code", ray.remote(refuse))
    with pytest.raises(ValueError, match=r"^compile: no toolkit$"):
        PPDRuntime(folder, **layout, **settings).start()


def _layers_kept():
    """But for the products' code, which this process may have from another folder."""
    return {path: path.stat().st_mtime_ns for path in cache_folder().glob("*.pt2")}


@nightly
def test_the_command_line_compiles_once(model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # others write into the tests' own
    folder = str(model_folder("llama", num_layers=5))
    command = [sys.executable, "-m", "ppd_runtime.cli.main", "generate", "a fox", "--model", folder, "--compile"]
    command += ["--method", "autoregressive", "--max-new-tokens", "8", "--json"]
    ordinary = OrdinaryDecoding(folder, compile=True)
    before = _layers_kept()
    texts = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["text"] for _ in range(2)]
    assert _layers_kept() == before
    assert texts == [ordinary.generate("a fox", max_new_tokens=8).text] * 2
