"""The wheel holds every package, whatever it is built from."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_house import LINKED, ROOT, package_files, python_files

BUILD = "import sys, setuptools.build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def build(kind: str, sources: Path, made: Path) -> Path:
    """The archive that setuptools makes from sources."""
    made.mkdir()
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(made)]
    subprocess.run(command, cwd=sources, check=True, capture_output=True)
    (archive,) = made.iterdir()
    return archive


@pytest.mark.slow
def test_an_archive_without_links_gives_the_whole_package(tmp_path: Path) -> None:
    """Zip files of a repository may hold text in place of its links."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    for name in ("autopar", *LINKED):
        shutil.copytree(ROOT / name, sources / name, symlinks=True)
    for name in LINKED:
        (sources / "autopar" / name).unlink()
        (sources / "autopar" / name).write_text(f"../{name}")
    with tarfile.open(build("sdist", sources, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("autopar-*")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as archive:
        archive.extractall(installed)
    listed = {str(path.resolve().relative_to(ROOT)) for path in package_files()}
    in_package = {name if name.startswith("autopar") else f"autopar/{name}" for name in listed}
    assert {str(path.relative_to(installed)) for path in python_files(installed)} == in_package
    code = "import autopar.passes.core, autopar.cost_model.tables as t; print(t.__file__)"
    environment = {"PYTHONPATH": str(installed)}
    printed = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert printed.stdout.startswith(str(installed))


@pytest.mark.slow
def test_pip_installs_from_a_repository(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of git")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--target", str(tmp_path)]
    pip = [sys.executable, "-m", "pip", "install", *options, f"git+file://{ROOT}"]
    subprocess.run(pip, check=True, capture_output=True)
    assert (tmp_path / "autopar" / "cost_model" / "tables" / "dgx-h100.json").exists()
