"""What is uploaded: what is in it, that it works where little else is installed, and that it says what it is."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import cdgrab

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind: str, source: Path, out: Path) -> Path:
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    skip = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results", "records")
    shutil.copytree(ROOT, folder / "tree", ignore=skip)
    return build("build_sdist", folder / "tree", folder / "out")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """From the source distribution alone."""
    with tarfile.open(sdist) as tar:
        tar.extractall(sdist.parent.parent, filter="data")
    return build("build_wheel", sdist.parent.parent / sdist.name.removesuffix(".tar.gz"), sdist.parent.parent / "wheel")


def sources() -> set[str]:
    kinds = (".py", ".typed", ".html", ".css", ".js")
    found = (path for path in (ROOT / "src").rglob("*") if path.suffix in kinds or path.name == "py.typed")
    return {str(path.relative_to(ROOT / "src")) for path in found if ".egg-info" not in str(path)}


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == sources()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_what_the_wheel_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    beside = {name for name in names if not name.startswith("src/")}
    written = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "MANIFEST.in", "pyproject.toml"}
    assert beside == written | {"PKG-INFO", "setup.cfg"}
    assert {name.removeprefix("src/") for name in names if name.startswith("src/") and "egg-info" not in name} == (
        sources()
    )


def needed(package: str, found: set[str]) -> set[str]:
    """The package and all that it cannot be without, as far as it is installed here."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return found  # of another system
    if package not in found:
        found.add(package)
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement:
                needed(re.split(r"[^\w.-]", requirement, maxsplit=1)[0], found)
    return found


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, torch and numpy; these two are those of this environment."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in needed("torch", needed("numpy", set())):
        distribution = importlib.metadata.distribution(package)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    python = folder / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    return python


TRAIN = """
import sys, cdgrab, torch
assert cdgrab.__file__.startswith(sys.prefix), cdgrab.__file__
data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
model = torch.nn.Linear(3, 1)
ordering = cdgrab.Ordering(data, batch_size=4, seed=0)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=ordering.sampler)
ordering.attach(model)
for epoch in range(2):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
assert ordering.metrics()["epoch"] == 1
print(cdgrab.__version__)
"""


def test_the_wheel_trains_with_torch_and_numpy_alone(empty: Path, tmp_path: Path) -> None:
    done = subprocess.run([empty, "-I", "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == cdgrab.__version__
    command = subprocess.run([empty.parent / "cdgrab"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert command.returncode == 2
    assert 'pip install "cdgrab[experiments]"' in command.stderr


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert f"\nversion: {cdgrab.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(cdgrab.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_what_is_declared_is_what_is_tested() -> None:
    """The oldest Python and torch are named once for users and once for the workflows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert project["requires-python"] == f">={pythons[0]}"
    tested = re.search(r"python: \[(.*)\]", workflow)
    assert tested is not None
    assert set(pythons) <= set(re.findall(r"3\.\d+", tested[1]))
    (torch,) = (found for found in project["dependencies"] if found.startswith("torch"))
    assert f"packages: torch=={torch.removeprefix('torch>=')}.0 " in workflow
