"""Compiled pipelined decoding gives compiled ordinary decoding's tokens; what is compiled is compiled once."""

import contextlib
import itertools
import random
import socket
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


def check(ordinary: OrdinaryDecoding, **layout: object) -> None:
    """Greedy and sampled tokens, with candidates that are right at seven positions in ten."""
    folder, dtype = ordinary.config.model, ordinary.config.dtype
    prompts = [[5], [40, 7, 291, 65, 133]]
    for extra in (GREEDY, SAMPLED):
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


@pytest.mark.parametrize(("dtype", "k", "exit_layer"), [("float32", 1, 3), ("bfloat16", 3, 4)])
def test_threads(model_folder, dtype, k, exit_layer, monkeypatch):
    """The stages share the code that ordinary decoding has compiled."""
    folder = str(model_folder("llama", num_layers=5))
    ordinary = OrdinaryDecoding(folder, dtype=dtype, compile=True)
    monkeypatch.setattr("ppd_runtime.models.compiled.export._compile", lambda *_: pytest.fail("compiled again"))
    check(ordinary, k=k, exit_layer=exit_layer, transport="local")


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=nightly), "int4"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [("layerskip", {"compile": True, "num_speculations": 16})]
    + [
        pytest.param("swift", {"compile": compiled, "bayes_interval": 0}, marks=nightly)  # or scikit-learn would change
        for compiled in (True, False)  # this process' environment
    ]
    + [pytest.param(name, {"compile": False}, marks=nightly) for name in ("layerskip", "kangaroo", "adaspeed")],
)
def test_methods_with_weights_of_few_bits(monkeypatch, method, settings, weights):
    """Their products round states to few bits. So what several tokens in a pass, or the library's code beside compiled
    code, round differently would be another token in every third of these texts.
    """
    sizes, run_tree = Counter(), CompiledLayers.run_tree

    def counted(self, first, last, hidden, tree, caches):
        sizes[tree.size > MOST_SEVERAL] += 1
        return run_tree(self, first, last, hidden, tree, caches)

    monkeypatch.setattr(CompiledLayers, "run_tree", counted)
    ordinary = OrdinaryDecoding("demo", compile=settings["compile"], weights=weights)
    with open_method("demo", method, weights=weights, **settings) as drafting:
        for number, prompt in enumerate(read_prompts("demo", 4)):
            params = SamplingParams(120, float(number % 2), seed=number, ignore_eos=True)
            assert drafting.generate(prompt.text, params).token_ids == ordinary.generate(prompt.text, params).token_ids
    assert sizes[True] > 10 or not settings["compile"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits(model_folder, tmp_path, weights):
    folder, quantised = model_folder("llama", num_layers=5), tmp_path / "quantised"
    quantise_model(str(folder), quantised, weights)
    ordinary = OrdinaryDecoding(folder, compile=True, weights=weights)
    staged = [(quantised, {"stages": stages, "k": 2, "rows": 4}) for stages in (1, 3)]
    for model, layout in ((folder, {"k": 1, "weights": weights}), *staged):
        with PPDRuntime(model, compile=True, transport="local", **layout) as runtime:
            for sampling in ({}, {"temperature": 0.9, "seed": 5}):
                settings = {"max_new_tokens": 14, "ignore_eos": True, **sampling}
                expected = ordinary.generate("a fox", **settings).token_ids
                assert runtime.generate("a fox", **settings).token_ids == expected, (layout, sampling)


@pytest.mark.parametrize("stages", [1, 2])
def test_requests_of_one_pass(model_folder, monkeypatch, stages):
    """Tokens and the bits of their probabilities are those that each request has alone; some are cancelled."""
    joined = Counter()
    run_trees = CompiledLayers.run_trees

    def counted(self, first, last, hidden, trees, caches):
        joined[len(trees)] += 1
        return run_trees(self, first, last, hidden, trees, caches)

    monkeypatch.setattr(CompiledLayers, "run_trees", counted)
    folder, draw = str(model_folder("llama", num_layers=5)), random.Random(SEED)
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
    layout = {"stages": stages, "rows": 4, "transport": "local", "max_requests": 6}
    with PPDRuntime(folder, dtype="float32", compile=True, **layout) as runtime, ThreadPoolExecutor(6) as pool:
        got = list(pool.map(partial(decode, runtime), range(len(prompts))))
    assert got == expected
    assert set(joined) >= {2, 3, 4}


@nightly
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
        texts = [runtime.generate([5], max_new_tokens=9, **sampling).token_ids for sampling in (GREEDY, SAMPLED)]
    expected = {**output_hashes(ordinary.stage), "the model's files": model_fingerprint(ordinary.info)}
    assert [of_worker.hashes for of_worker in bits] == [expected] * 2, "another's code, or none"
    assert texts == [ordinary.generate([5], max_new_tokens=9, **sampling).token_ids for sampling in (GREEDY, SAMPLED)]

    def refuse(order, kinds):
        raise ValueError("compile: no toolkit")

    monkeypatch.setattr(workers, "compile_code", ray.remote(refuse))
    with pytest.raises(ValueError, match=r"^compile: no toolkit$"):
        PPDRuntime(folder, **layout, **settings).start()
