"""The wheel, installed away from the checkout: the harness is whole in it and runs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from text_models import make_tokenizer, save_models

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    source = folder / "source"  # a build leaves files where it runs
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "results", "tests"))
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    built = subprocess.run(build, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if built.returncode and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("the build needs setuptools, which cannot be had here")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "install", "--quiet", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    return folder / "site"


@pytest.mark.slow
def test_the_harness_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    save_models(make_tokenizer(), tmp_path, ("target",))
    command = [sys.executable, "-m", "hf_specdec.cli", "bench", "--model", str(tmp_path / "target"), "--limit", "2"]
    command += ["--strategy", "suffix", "--repeats", "1", "--max-new-tokens", "6", "--output", str(tmp_path / "out")]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import hf_specdec_eval; print(hf_specdec_eval.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(installed))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["tasks"]["builtin"]["compared"] == 2
    checkout, wheel = (
        {str(each.relative_to(folder)) for each in folder.rglob("*") if each.suffix in (".py", ".yaml", ".jsonl")}
        for folder in (ROOT / "eval", installed / "hf_specdec_eval")
    )
    assert checkout == wheel
