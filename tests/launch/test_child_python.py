"""What another Python of ours imports: what the program does, and nothing from where it happens to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_folder import HostileFolder

import ppd_runtime
from ppd_runtime.launch.child_python import folders_here, kept_path

PACKAGE = Path(ppd_runtime.__file__).parent
LOOK = """
import json, random, sys
import ppd_runtime

def main():
    print(json.dumps([sys.path, random.__file__, ppd_runtime.__file__, sys.argv]))
"""
PROGRAM = """
import subprocess, sys
{before}
from ppd_runtime.launch.child_python import child_command, child_environment
subprocess.run(child_command("look", "a word"), env=child_environment(), check=True)
"""


class Places:
    """A hostile current folder, a program in a folder of its own, and modules in another that PYTHONPATH names."""

    def __init__(self, tmp_path: Path) -> None:
        self.hostile = HostileFolder(tmp_path)
        self.script, self.modules = tmp_path / "scripts" / "program.py", tmp_path / "modules"
        for folder in (self.script.parent, self.modules):
            folder.mkdir()
        (self.modules / "look.py").write_text(LOOK)
        self.write()

    def write(self, before: str = "") -> None:
        """The program, with a line that comes first."""
        self.script.write_text(PROGRAM.format(before=before))

    def run(self, *command: str, pythonpath: str | None = None, cwd: Path | None = None) -> list[object]:
        """Import path, two modules' files and arguments of the program's child."""
        paths = f"{self.modules}{os.pathsep}{PACKAGE.parent}" if pythonpath is None else pythonpath
        words = command or (str(self.script),)
        shown = subprocess.run(
            [sys.executable, *words],
            cwd=cwd or self.hostile.path,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr
        return json.loads(shown.stdout.splitlines()[-1])


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def test_it_imports_nothing_from_the_current_folder_nor_beside_the_script(places: Places) -> None:
    (places.script.parent / "random.py").write_text("raise SystemExit('run')")
    path, of_random, of_package, words = places.run()
    assert of_random == __import__("random").__file__
    assert of_package == str(PACKAGE / "__init__.py")
    assert words == ["look", "a word"]
    assert not {"", str(places.hostile.path), str(places.script.parent)} & set(path)
    assert places.hostile.was_run() == []


def test_what_a_program_adds_is_handed_down(places: Places, tmp_path: Path) -> None:
    places.write(f"sys.path.append({str(tmp_path / 'added')!r}); sys.path.append('')")
    path, *_ = places.run()
    assert path[-1] == str(tmp_path / "added")
    assert "" not in path


def test_a_program_that_went_elsewhere_hands_down_no_folder_that_it_was_in(places: Places, tmp_path: Path) -> None:
    places.write("import os; sys.path.append(os.getcwd()); import ppd_runtime.launch.child_python; os.chdir('/')")
    path, *_ = places.run(cwd=tmp_path)
    assert not {"", str(tmp_path), "/"} & set(path)


def test_a_folder_that_pythonpath_names_stays_though_it_is_the_current_one(places: Places) -> None:
    paths = f"{places.modules}{os.pathsep}{PACKAGE.parent}"
    for command in ((), ("-m", "program")):
        cwd = places.modules if not command else places.script.parent
        found = f"{places.script.parent}{os.pathsep}{paths}" if command else paths
        path, *_ = places.run(*command, pythonpath=found, cwd=cwd)
        assert path[: found.count(os.pathsep) + 1] == found.split(os.pathsep)
        assert path.count(str(cwd)) == 1


def test_a_package_that_only_the_current_folder_has_is_found_and_comes_last(tmp_path: Path) -> None:
    """A checkout that is not installed: an older version that is installed is not taken for it."""
    checkout, modules, installed = tmp_path / "checkout", tmp_path / "modules", tmp_path / "older"
    for folder in (checkout, modules, installed / "ppd_runtime"):
        folder.mkdir(parents=True)
    (checkout / "ppd_runtime").symlink_to(PACKAGE)
    (checkout / "random.py").write_text("raise SystemExit('run')")
    (installed / "ppd_runtime" / "__init__.py").touch()
    (modules / "look.py").write_text(LOOK)
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before="")],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": f"{modules}{os.pathsep}{installed}"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    path, of_random, of_package, _ = json.loads(shown.stdout.splitlines()[-1])
    assert (of_random, path[-1]) == (__import__("random").__file__, str(checkout))
    assert of_package == str(checkout / "ppd_runtime" / "__init__.py")


def test_a_program_without_a_path_of_its_own_has_such_children(places: Places) -> None:
    places.write(f"sys.path[:0] = [{str(places.modules)!r}, {str(PACKAGE.parent)!r}]")
    path, of_random, *_ = places.run("-I", str(places.script), pythonpath=str(places.hostile.path))
    assert of_random == __import__("random").__file__
    assert str(places.hostile.path) not in path
    assert places.hostile.was_run() == []


@pytest.mark.parametrize(
    ("path", "own", "kept"),
    [
        (["/here", "/lib", "/site"], [], ["/lib", "/site"]),
        (["/here", "/lib", "/here"], ["/lib", "/here"], ["/lib", "/here"]),  # an editable install of what is here
        (["/here", "/here", "/lib"], ["/here", "/lib"], ["/here", "/lib"]),  # PYTHONPATH
        (["/here", "/lib"], ["/here", "/lib"], ["/here", "/lib"]),  # the program has removed what Python put first
        (["/other/../here", "/lib"], ["/lib"], ["/lib"]),
    ],
)
def test_which_folders_stay(path: list[str], own: list[str], kept: list[str]) -> None:
    assert kept_path(path, {"/here"}, own) == kept


def test_a_current_folder_that_is_gone_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert kept_path(["", "/lib"], folders_here()) == ["/lib"]
