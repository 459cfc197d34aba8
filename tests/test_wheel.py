"""sdist → wheel → a host folder with its own `model`, `metrics`, `scheduler` and `cache_pool`.

`.ci/wheel` does the same in an empty environment with all dependencies.
"""

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import drumline
from tests.checkpoints import llama, random_model, save
from tests.processes import ROOT, run_python

FOLDERS = ("cache_pool", "metrics", "model", "scheduler")
DATA = {"py.typed", "metrics/alerts.yml", "metrics/dashboards/drumline.json", "scheduler/live.html"}
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def sources() -> set[str]:
    """Every Python file of ours as it lies in the package."""
    own = {file.name for file in (ROOT / "src" / "drumline").glob("*.py")}
    return own | {str(file.relative_to(ROOT)) for name in FOLDERS for file in (ROOT / name).rglob("*.py")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel built from it, of a copy: building writes beside the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in ("src", "tests", *FOLDERS):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    target = tmp_path_factory.mktemp("dist")
    run = run_python("-m", "build", "--no-isolation", "--outdir", target, copy, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return target


def test_the_sdist_holds_real_files(dist: Path):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        assert [member.name for member in archive if not (member.isfile() or member.isdir())] == []
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {f"src/drumline/{name}" for name in sources() | DATA} <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names
    assert [name for name in names if name.startswith(("tests/", *(f"{folder}/" for folder in FOLDERS)))] == []


def test_the_wheel_holds_one_package(dist: Path):
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
        (scripts,) = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    info = f"drumline-{drumline.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"drumline", info}
    inside = {name.removeprefix("drumline/") for name in names if name.startswith("drumline/")}
    assert inside == sources() | DATA
    assert f"{info}/licenses/LICENSE" in names
    assert "drumline = drumline.scheduler.cli:main" in scripts
    assert "License-Expression: Apache-2.0" in metadata
    assert "# drumline" in metadata


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    shutil.copytree(ROOT / "tests" / "host", folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "examples" / "embed_service.py", folder)
    return folder


@pytest.fixture
def site(dist: Path, tmp_path: Path) -> Path:
    """The wheel unpacked, which is all that an installation of pure Python is."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


CHECK = ("-c", "import sys, host; host.check(sys.argv[1])")
FINE = f"drumline {drumline.__version__} ran beside the host's own modules\n"


def test_a_host_with_modules_of_the_same_names_imports_it(site: Path, host: Path):
    run = run_python(*CHECK, site, cwd=host, PYTHONPATH=str(site))
    assert (run.returncode, run.stdout, run.stderr) == (0, FINE, "")


@pytest.mark.soak
def test_a_host_with_modules_of_the_same_names_embeds_it(site: Path, host: Path, tmp_path: Path):
    """Kernels of another place are compiled anew, which takes long even for float32."""
    checkpoint = save(tmp_path / "tiny", random_model(llama()))
    options = ("--model", checkpoint, "--precision", "float32")
    run = run_python("host.py", site, *options, cwd=host, timeout=200, PYTHONPATH=str(site))
    assert (run.returncode, run.stderr) == (0, "")
    assert '"stop_reason": "' in run.stdout
    assert run.stdout.endswith(FINE)


def test_the_host_would_notice_another_drumline(host: Path, tmp_path: Path):
    """Without the wheel on its path it finds this checkout, and says so."""
    run = run_python(*CHECK, tmp_path / "site", cwd=host, PYTHONPATH=str(ROOT / "src"))
    assert run.returncode == 1
    assert run.stderr.startswith("drumline came from ")
