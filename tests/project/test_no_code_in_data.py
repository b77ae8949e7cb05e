"""Nothing in the tree turns data into code: a search through every tracked file."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "pickle": r"\b(c?pickle|cloudpickle|dill|joblib|jsonpickle)\b|allow_pickle\s*=\s*True",
    "torch.load": r"\btorch\.load\b",
    "eval": r"(?<![\w.])eval\(",
    "exec": r"(?<![\w.])exec\(",
    "remote code": r"""trust_remote_code["']?\s*[=:]\s*True""",
    "marshal": r"\bmarshal\b",
    "shelve": r"\bshelve\b",
    "yaml.load": r"\byaml\.(load|full_load|unsafe_load)\b",
    "a shell": r"\bshell\s*=\s*True|\bos\.(system|popen)\b",
}
ALLOWED = {
    "README.md": ("pickle", "says that there is none"),
    "SECURITY.md": ("pickle", "says that there is none"),
    "pyproject.toml": ("pickle", "the linter's ban on importing it"),
    "constraints.txt": ("pickle", "versions of what Ray and scikit-learn need"),
    "ppd_runtime/models/demo/card.json": ("pickle", "names of the files that the demo model learned from"),
}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def found_in(text: str) -> set[str]:
    return {what for what, pattern in FORBIDDEN.items() if re.search(pattern, text)}


def test_no_tracked_file_turns_data_into_code() -> None:
    names = tracked_files()
    assert len(names) > 200
    found = {}
    for name in names:
        if name != f"tests/project/{Path(__file__).name}":
            allowed = ALLOWED.get(name, ("", ""))[0]
            content = (ROOT / name).read_bytes()
            bad = set() if b"\0" in content else found_in(content.decode(errors="replace")) - {allowed}
            found |= {name: bad} if bad else {}
    assert not found


def test_no_weights_but_safetensors_are_tracked() -> None:
    bad = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy", ".npz", ".h5", ".msgpack", ".gguf"}
    assert not [name for name in tracked_files() if Path(name).suffix in bad]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import pickle", "pickle"),
        ("from joblib import load", "pickle"),
        ("np.load(file, allow_pickle=True)", "pickle"),
        ("state = torch.load(path)", "torch.load"),
        ("value = eval(text)", "eval"),
        ("exec(code)", "exec"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "remote code"),
        ('{"trust_remote_code": True}', "remote code"),
        ("marshal.loads(data)", "marshal"),
        ("shelve.open(path)", "shelve"),
        ("yaml.load(stream)", "yaml.load"),
        ("subprocess.run(command, shell=True)", "a shell"),
        ("os.system(command)", "a shell"),
    ],
)
def test_the_search_finds_what_it_is_for(text: str, what: str) -> None:
    assert found_in(text) == {what}


@pytest.mark.parametrize("text", ["model.eval()", "def retrieval(x):", "yaml.safe_load(x)", "trust_remote_code=False"])
def test_the_search_leaves_the_rest_alone(text: str) -> None:
    assert not found_in(text)
