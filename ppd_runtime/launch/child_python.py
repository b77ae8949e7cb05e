"""A child Python for a module of ours: it imports what this program imports, and nothing from the current folder.

`python -m` and `python -c` look for each module in the current folder first: they would run a `random.py` there, such
as a downloaded model's. So a child begins with this very file, `python child_python.py MODULE ARGUMENTS…`. It takes
over the program's import path without the folders that Python itself puts first for a program, loads this package from
where the program has it, and calls the module's `main`.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

_TOLD = "PPD_IMPORT_PATH"
"""The variable that tells the child where to look; it is removed before a module of ours is imported."""
PACKAGE = Path(__file__).parents[1]


def child_command(module: str, *arguments: str) -> list[str]:
    """The command for a module's `main`, with `sys.argv` as under `python -m`; it needs `child_environment`."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    return [sys.executable, *(flag for flag, is_set in flags.items() if is_set), __file__, module, *arguments]


def child_environment() -> dict[str, str]:
    """This program's variables, and what the child is told."""
    told = {"path": [entry for entry in sys.path if isinstance(entry, str)], "here": sorted(folders_here())}
    return os.environ | {_TOLD: json.dumps(told)}


def folders_here() -> set[str]:
    """Folders from which only the program imports: its script's, and the current one, now and when it began."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return {_BEGAN_IN, _folder(""), *([str(Path(_folder(script)).parent)] if script else [])}


def kept_path(path: Sequence[str], here: Collection[str], own: Collection[str] = ()) -> list[str]:
    """An import path without the folders `here`.

    Args:
        own: the child's own path, from PYTHONPATH and what is installed. One of the folders that is in it keeps its
            last place.
    """
    folders, installed = list(map(_folder, path)), set(map(_folder, own))
    return [
        entry
        for behind, (entry, folder) in enumerate(zip(path, folders, strict=True), start=1)
        if folder not in here or (folder in installed and folder not in folders[behind:])
    ]


def _folder(entry: str) -> str:
    try:
        return str(Path(entry).resolve())
    except (OSError, RuntimeError):  # the current folder has been removed; links that lead nowhere
        return entry


_BEGAN_IN = _folder("")


def _begin() -> None:
    """Run what the command line names, in a Python that has just begun."""
    told = json.loads(os.environ.pop(_TOLD))
    own = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    sys.path[:] = kept_path(told["path"], told["here"], own)
    if str(PACKAGE.parent) not in sys.path:  # a checkout that is not installed, perhaps with what it needs beside it
        sys.path.append(str(PACKAGE.parent))
    found = importlib.util.spec_from_file_location(PACKAGE.name, PACKAGE / "__init__.py")
    assert found is not None
    assert found.loader is not None
    package = sys.modules[PACKAGE.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(package)
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    _begin()
