"""A model's own generation settings in every method, at the command line, in the server and in `ppd bench`."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch
from commands import ppd, printed
from generation_files import DEMO, generated, with_generation
from models_for_tests import build_model, build_tokenizer
from servers import running

from ppd_runtime import OrdinaryDecoding, open_method

ModelFolder = Callable[..., Path]
PROMPT, NEW = "def read_lines(path):\n", 40
WAYS = {
    "pipelined, k=1": {"method": "ppd", "speculation": "always", "k": 1, "transport": "local"},
    "pipelined, k=3": {"method": "ppd", "speculation": "always", "k": 3, "transport": "local"},
    "three stages, few guessed": {
        "method": "ppd",
        "speculation": "always",
        "stages": 3,
        "guess_vocab": 100,
        "transport": "local",
    },
    "layerskip": {"method": "layerskip", "exit_layer": 2, "num_speculations": 4},
    "swift": {"method": "swift", "threshold": 0.3, "context_window": 6, "search_steps": 40},
}


@pytest.fixture(scope="module")
def plain() -> Iterator[OrdinaryDecoding]:
    """The demo model, whose file has no such fields."""
    with OrdinaryDecoding("demo", dtype="float32") as ordinary:
        yield ordinary


@pytest.fixture(scope="module")
def text(plain: OrdinaryDecoding) -> tuple[int, ...]:
    """Its greedy text."""
    return plain.generate(PROMPT, max_new_tokens=NEW).token_ids


@pytest.fixture(scope="module")
def tiny(model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose file has many of the fields."""
    fields = {
        "eos_token_id": [65, 70],
        "repetition_penalty": 1.15,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 25,
        "suppress_tokens": [72, 73],
        "begin_suppress_tokens": [91],
        "bad_words_ids": [[101, 102], [103]],
        "sequence_bias": [[[104], 1.5]],
        "encoder_repetition_penalty": 1.1,
        "encoder_no_repeat_ngram_size": 3,
        "exponential_decay_length_penalty": [35, 1.02],
        "top_k": 40,
        "top_p": 0.95,
    }
    of = model_folder("llama", num_layers=5, quiet_from=2)
    return with_generation(tmp_path_factory.mktemp("tiny") / "model", of, fields)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_ordinary_decodings_tokens(tiny: Path, way: str) -> None:
    """Guesses go through the same changes, or hardly any were right."""
    prompt, hits = [40, 7, 291, 65, 133, 9, 12, 250], 0
    cases = [{}, {"temperature": 0.8, "seed": 3}, {"logit_bias": {60: 3.0, 61: -100}, "temperature": 0.6, "seed": 4}]
    with OrdinaryDecoding(tiny, dtype="float32") as ordinary, open_method(tiny, **WAYS[way], dtype="float32") as method:
        assert ordinary.generate(prompt, max_new_tokens=NEW).token_ids == generated(tiny, prompt, NEW)
        for settings in cases:
            expected = ordinary.generate(prompt, max_new_tokens=NEW, **settings)
            result = method.generate(prompt, max_new_tokens=NEW, **settings)
            assert result.token_ids == expected.token_ids, settings
            hits += result.stats.hits
    assert hits > 12


@pytest.mark.parametrize("acceptance", ["shared-noise", "rejection"])
def test_kangaroo_keeps_to_them(tmp_path: Path, text: tuple[int, ...], acceptance: str) -> None:
    fields = {"eos_token_id": 0, "repetition_penalty": 1.1, "suppress_tokens": [text[2], text[5]], "min_new_tokens": 20}
    folder = with_generation(tmp_path / "model", DEMO, fields)
    with open_method(folder, "kangaroo", acceptance=acceptance, dtype="float32") as method:
        result = method.generate(PROMPT, max_new_tokens=NEW)
        assert result.token_ids == generated(folder, list(result.prompt_ids), NEW)
        assert result.stats.hits > 5
        sampled = method.generate(PROMPT, max_new_tokens=NEW, temperature=1.0, top_k=5, seed=3)
        assert not {text[2], text[5]} & {*sampled.token_ids}
        assert method.generate(PROMPT, max_new_tokens=NEW, temperature=1.0, top_k=1).token_ids == result.token_ids


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model each of whose tokens has a twin with the same logit, 150 further on."""
    folder = tmp_path_factory.mktemp("tied")
    model = build_model("llama", num_layers=5, quiet_from=2, tied=False)
    with torch.no_grad():
        model.lm_head.weight[150:] = model.lm_head.weight[:150]
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", ["ordinary", "pipelined, k=3", "layerskip"])
def test_where_one_token_is_asked_for_ties_go_as_greedily(tied: Path, way: str) -> None:
    prompt, asked = [40, 7, 91, 65, 133, 9, 12, 150], {"max_new_tokens": 16, "ignore_eos": True}
    way_in = WAYS.get(way, {"method": "autoregressive"})
    with OrdinaryDecoding(tied, dtype="float32") as ordinary, open_method(tied, **way_in, dtype="float32") as method:
        greedy = ordinary.generate(prompt, **asked).token_ids
        assert max(greedy) < 150, "the first of two"
        for seed, only_one in enumerate(({"top_k": 1}, {"min_p": 1}, {"top_p": 0}, {"temperature": 1e-9})):
            settings = {"temperature": 1.0, "seed": seed, **only_one}
            assert method.generate(prompt, **asked, **settings).token_ids == greedy


def run(*arguments: object) -> str:
    return printed(*arguments, "--dtype", "float32")


def test_the_command_line_takes_and_leaves_them(tmp_path: Path, text: tuple[int, ...]) -> None:
    folder = with_generation(tmp_path / "model", DEMO, {"eos_token_id": 0, "repetition_penalty": 1.2})
    asked = ("generate", PROMPT, "--model", folder, "--method", "autoregressive", "--max-new-tokens", NEW, "--json")
    by_file = json.loads(run(*asked))
    assert tuple(by_file["token_ids"]) == generated(folder, by_file["prompt_ids"], NEW)
    for option in (["--no-generation-config"], ["--repetition-penalty", 1.0]):
        assert tuple(json.loads(run(*asked, *option))["token_ids"]) == text


def test_a_seed_by_chance_is_told(text: tuple[int, ...]) -> None:
    asked = ("generate", PROMPT, "--method", "autoregressive", "--max-new-tokens", 12, "--temperature", 1)
    told = [json.loads(run(*asked, "--json", "--seed", -1)) for _ in range(2)]
    assert told[0]["token_ids"] != told[1]["token_ids"]
    for result in told:
        assert json.loads(run(*asked, "--json", "--seed", result["seed"]))["token_ids"] == result["token_ids"]
    shown = ppd(*asked, "--seed", -1)
    assert re.search(r", seed \d+\n", shown.stderr)


def test_each_request_draws_a_seed_of_its_own(plain: OrdinaryDecoding) -> None:
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": -1}
    results = [*plain.generate([PROMPT] * 3, **asked), *plain.generate(PROMPT, n=2, **asked)]
    assert len({result.seed for result in results}) == 5
    assert results[4].seed == results[3].seed + 1
    for result in results:
        again = plain.generate(PROMPT, **{**asked, "seed": result.seed})
        assert (again.token_ids, again.seed) == (result.token_ids, result.seed)
    assert plain.generate(PROMPT, max_new_tokens=1).seed == 0


def test_a_bench_compares_with_them(tiny: Path, tmp_path: Path) -> None:
    """Transformers' own methods among the rows: what it gives there is `generate`'s with the same fields."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ("The quick brown fox", "A model writes")))
    rows = "ppd:k=1;transport=local,layerskip:exit_layer=2,assistant_early_exit:exit_layer=2,prompt_lookup"
    asked = ("bench", "--model", tiny, "--prompts", prompts, "--methods", rows, "--max-new-tokens", 30, "--out", out)
    run(*asked)
    report = json.loads(out.read_text())
    assert report["sampling"]["repetition_penalty"] == 1.15
    assert len(report["rows"]) == 5
    assert not report.get("failures")
    assert {row["equal_tokens"] for row in report["overall"].values()} == {1.0}
    run(*asked, "--no-generation-config")
    assert json.loads(out.read_text())["sampling"]["repetition_penalty"] == 1.0


def test_match_rates_are_measured_with_them(tiny: Path) -> None:
    asked = ("match-rate", "--model", tiny, "--limit", 1, "--max-new-tokens", 8, "--json")
    for option, penalty in ((), 1.15), (("--no-generation-config",), 1.0):
        assert json.loads(run(*asked, *option))["sampling"]["repetition_penalty"] == penalty


def test_a_servers_clients_have_them(tiny: Path) -> None:
    """The temperature too, as with vLLM: whether to sample is the request's own business, how is the model's."""
    fields = {**json.loads((tiny / "generation_config.json").read_text()), "temperature": 0.5, "do_sample": True}
    folder = with_generation(tiny.parent / "served", tiny, fields)
    own = {"repetition_penalty": 1.0, "top_k": -1}
    cases = [
        ({}, {"temperature": 0.5}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1.2}, {"temperature": 1.2}),
        ({"top_p": 1, "extra_body": own}, {"temperature": 0.5, "top_p": 1, **own}),
    ]
    with OrdinaryDecoding(folder, dtype="float32") as ordinary, running(ordinary, served_model_name="tiny") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for asked, meant in cases:
            answer = client.completions.create(model="tiny", prompt="The quick", max_tokens=24, seed=5, **asked)
            expected = ordinary.generate("The quick", max_new_tokens=24, seed=5, **meant)
            assert answer.choices[0].text == expected.text
        client.close()
