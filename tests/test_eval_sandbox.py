"""Programs run within limits: what each limit stops, and what a program may not see or leave behind."""

import os
import time
from pathlib import Path

import pytest

from hf_specdec import SpecDecError
from hf_specdec_eval import sandbox
from hf_specdec_eval.sandbox import Limits, check_sandbox, run_program

FAST = Limits(wall_seconds=1.0)


def test_output_and_exit_status():
    outcome = run_program("import sys\nprint('é')\nprint('bad', file=sys.stderr)\nsys.exit(3)")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (3, "é\n", "bad\n")
    assert run_program("1 / 0").stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_the_program_is_main_and_reads_nothing():
    outcome = run_program("import sys\nprint(__name__, sys.argv[1:], repr(sys.stdin.read()))")
    assert outcome.stdout == "__main__ [] ''\n"


def test_the_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "mine")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    outcome = run_program("import os, sys\nprint('SECRET_TOKEN' in os.environ, '/elsewhere' in sys.path)")
    assert outcome.stdout == "False False\n"


def test_the_directory_is_its_own_and_goes():
    outcome = run_program("import os\nopen('left', 'w').close()\nprint(os.getcwd())")
    assert outcome.returncode == 0
    directory = Path(outcome.stdout.strip())
    assert directory != Path.cwd()
    assert not directory.exists()


def test_wall_clock():
    assert run_program("import time\ntime.sleep(60)", FAST).returncode is None


def test_processor_time():
    outcome = run_program("while True: pass", Limits(cpu_seconds=1))
    assert outcome.returncode is not None
    assert outcome.returncode < 0


def test_memory():
    outcome = run_program("x = bytearray(1 << 30)", Limits(memory_bytes=1 << 29))
    assert "MemoryError" in outcome.stderr
    assert run_program("x = bytearray(1 << 28)", Limits(memory_bytes=1 << 29)).returncode == 0


def test_file_size():
    small = Limits(file_bytes=1 << 12)
    outcome = run_program("open('big', 'wb').write(bytes(1 << 20))", small)
    assert "File too large" in outcome.stderr
    outcome = run_program("import os\nwhile True: os.write(1, b'x' * 1000)", small)
    assert outcome.returncode != 0
    assert len(outcome.stdout) <= 1 << 12


def running(number):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("rest", ["", "time.sleep(60)"], ids=["leader ended", "leader killed"])
def test_child_processes_end_with_the_program(rest):
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"print(child.pid, flush=True)\n{rest}\n"
    )
    outcome = run_program(program, FAST)
    if os.geteuid() != 0:
        assert "BlockingIOError" in outcome.stderr
        return
    child = int(outcome.stdout)
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def test_a_machine_without_limits_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "_LAUNCHER", "import no_such_module")
    check_sandbox.cache_clear()
    try:
        with pytest.raises(SpecDecError, match="no_such_module"):
            run_program("print(1)")
    finally:
        check_sandbox.cache_clear()
