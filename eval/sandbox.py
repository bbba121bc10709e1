"""Runs one Python program in a process of its own, within limits.

THIS IS NOT A SECURITY BOUNDARY. It keeps a program's mistakes (endless loops, huge lists, stray files) away from the
benchmark. It does not stop a program that means harm: one may read what the user may read, use the network, leave the
process group, and, when the user is root, start as many processes as it likes. Programs that nobody vouches for belong
in a container or a virtual machine without network, and this in there.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_specdec import SpecDecError

_LAUNCHER = """
import resource, runpy, sys
_, program, *limits = sys.argv
for name, limit in zip(("CPU", "AS", "FSIZE", "NPROC", "CORE"), map(int, limits)):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
sys.argv = [program]
runpy.run_path(program, run_name="__main__")
"""


@dataclass(frozen=True)
class Limits:
    """What a program may use; each is at most what the user may use.

    Args:
        wall_seconds: time until the program's process group is killed.
        cpu_seconds: processor time, whole seconds.
        memory_bytes: address space.
        file_bytes: size of each file it writes, of stdout and of stderr.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 24


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Args:
        returncode: exit status, minus the signal that ended it, or None when its time was up.
        stdout: what it wrote, at most `Limits.file_bytes`.
        stderr: likewise.
    """

    returncode: int | None
    stdout: str
    stderr: str


def run_program(source: str, limits: Limits = Limits()) -> Outcome:
    """Run a program as `__main__` by this interpreter, isolated from environment variables and from user packages.

    It starts in an empty directory that is removed afterwards, with no stdin and, unless the user is root, without the
    right to start processes or threads. What is left of its process group when it ends is killed.

    Raises:
        SpecDecError: this machine has no such limits.
    """
    check_sandbox()
    return _run(source, limits)


@functools.cache
def check_sandbox() -> None:
    """Raise `SpecDecError` if this machine cannot run programs within limits."""
    outcome = _run("", Limits())
    if outcome.returncode != 0:
        why = (outcome.stderr.strip().splitlines() or ["the interpreter did not start"])[-1]
        raise SpecDecError(
            f"Programs cannot be run within limits on this machine: {why}. Run metrics that execute code on Linux, or "
            "do not allow them to."
        )


def _run(source: str, limits: Limits) -> Outcome:
    numbers = (limits.cpu_seconds, limits.memory_bytes, limits.file_bytes, 1, 0)  # 1: no further process; 0: no core
    with (
        tempfile.TemporaryDirectory(prefix="hf_specdec_", ignore_cleanup_errors=True) as directory,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        program = Path(directory, "program.py")
        program.write_text(source, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-c", _LAUNCHER, str(program), *map(str, numbers)]
        environment = {
            "HOME": directory,
            "TMPDIR": directory,
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            returncode: int | None = process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="replace"))
    return Outcome(returncode, *texts)
