"""The demo model's corpus: the text that every Python installation carries, split into training and held-out files."""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Tests repeat themselves, and character tables teach a model to recite code pages.
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "msilib", "__pycache__"}
_SKIPPED_FILES = {"html/entities.py", "stringprep.py"}
_HELD_OUT_SHARE = 25  # one file in so many is held out


@dataclass(frozen=True)
class Document:
    """One file of the corpus: its path below the standard library, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training; decided by its path, so the split never drifts."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELD_OUT_SHARE == 0


def read_standard_library() -> list[Document]:
    """Read the running Python's standard library, tests and tables left out, and the texts of `pydoc_data.topics`."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    documents: list[Document] = []
    for path in filter(_is_prose_or_code, paths):
        text = (root / path).read_text(encoding="utf-8", errors="replace")
        documents.extend(_topics(path, text) if path == "pydoc_data/topics.py" else [Document(path, text)])
    return [document for document in documents if document.text.strip()]


def corpus_hash(documents: list[Document]) -> str:
    """SHA-256 over every path and text, in order, as hexadecimal digits."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.path, document.text):
            encoded = part.encode("utf-8", errors="surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def _is_prose_or_code(path: str) -> bool:
    parts = PurePosixPath(path).parts
    is_table = path in _SKIPPED_FILES or parts[-1].startswith("_sysconfigdata") or parts[0].startswith("config-")
    return not is_table and not _SKIPPED_FOLDERS & set(parts)


def _topics(path: str, source: str) -> Iterator[Document]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield Document(f"{path}#{name}", text)
