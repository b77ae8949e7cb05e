"""A folder like a downloaded model's, with files named as modules that programs import; each tells when it is run."""

import sys
from collections.abc import Sequence
from pathlib import Path

_OTHERS = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "zmq", "ray", "psutil", "packaging",
    "filelock", "huggingface_hub", "ppd_runtime", "accelerate", "kernels", "sitecustomize", "usercustomize",
)  # fmt: skip
_TELL = "with open({marker!r}, 'a') as marker: marker.write(__name__ + '\\n')\n"


class HostileFolder:
    """Files named as all modules of the standard library, and as what the runtime needs or looks for."""

    def __init__(self, within: Path) -> None:
        self.path, self._marker = within / "downloaded", within / "marker"
        self.path.mkdir()
        for name in {*sys.stdlib_module_names, *_OTHERS}:
            (self.path / f"{name}.py").write_text(_TELL.format(marker=str(self._marker)))

    def was_run(self) -> Sequence[str]:
        """The modules of the folder that somebody has imported."""
        return sorted(set(self._marker.read_text().split())) if self._marker.exists() else []
