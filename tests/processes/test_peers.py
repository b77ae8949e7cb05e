"""`ppd serve` asked by programs that others wrote; skipped where the extra `peers` is not installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grids import nightly
from served import Served

from ppd_runtime.models.checkpoint.description import describe
from ppd_runtime.models.checkpoint.hub import DEMO

DOCUMENTS = (
    {"text": "import os\n\ndef main():\n    return os.", "choices": ["path", " environ", "Zwölf 東京"], "gold": 0},
    {"text": "for i in range(", "choices": ["len(x)):", "10):\n", "é"], "gold": 1},
    {"text": 'class Error(Exception):\n    """naïve ', "choices": [" a", "b", "café 🦊 "], "gold": 2},
    {"text": "import sys\nif __name__ == ", "choices": ["'__main__'", '"__main__"'], "gold": 0},
)
TASKS = (
    {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
    },
    {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n\n", ")"], "max_gen_toks": 24, "do_sample": False},
    },
    {"task": "perplexity", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("serve") / "log", "--stages", "2", "--dtype", "float32") as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[peers]'")
    found = tmp_path_factory.mktemp("tasks")
    (found / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    return found


@pytest.fixture(scope="module")
def of_transformers(folder: Path) -> dict[str, list[Any]]:
    return evaluated("hf", f"pretrained={describe(DEMO).folder},dtype=float32,device=cpu", folder, 1)


def evaluated(model: str, settings: str, folder: Path, batch_size: int) -> dict[str, list[Any]]:
    """What one of lm-eval's models answers to each task's requests, in order."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder / "cache")}
    tasks = [{**task, "dataset_path": "json", "dataset_kwargs": dict(data), "test_split": "test"} for task in TASKS]
    found = simple_evaluate(
        model=model,
        model_args=settings,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    return {
        task: [answer for sample in samples for (answer,) in sample["resps"]]
        for task, samples in found["samples"].items()
    }


@nightly
@pytest.mark.parametrize("at_once", [1, 3])
def test_lm_eval_gets_what_its_hf_backend_gives(
    folder: Path, of_transformers: dict[str, list[Any]], served: Served, at_once: int
) -> None:
    url = f"model=demo,base_url={served.url}/v1/completions,tokenizer={describe(DEMO).folder}"
    answers = evaluated("local-completions", f"{url},num_concurrent={at_once}", folder, at_once)
    assert answers["write"] == of_transformers["write"]
    assert [is_greedy for _, is_greedy in answers["choose"]] == [
        is_greedy for _, is_greedy in of_transformers["choose"]
    ]
    assert {is_greedy for _, is_greedy in answers["choose"]} == {True, False}
    for kind in ("choose", "perplexity"):
        assert sums(answers[kind]) == pytest.approx(sums(of_transformers[kind]), rel=1e-5)


def sums(answers: list[Any]) -> list[float]:
    """Log-probabilities of answers that are one, or one and whether greedy decoding gives the text."""
    return [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
