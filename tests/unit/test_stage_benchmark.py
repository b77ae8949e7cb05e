"""What `benchmarks.stages` decodes."""

from benchmarks import stages
from ppd_runtime.tune.prompt_files import read_prompts


def test_prompts_that_repeat_themselves_are_named() -> None:
    texts = [prompt.text for prompt in read_prompts(str(stages._REPEATING_FILE))]
    assert len(texts) == 6
    for text in texts:
        lines = [line for line in text.splitlines() if line.strip()]
        words = [word for line in lines for word in line.split()]
        assert len(set(words)) < 0.7 * len(words)
