"""`rows.jsonl`: one line per unit and repeat, on disk before the next is measured.

Each process appends to a file of its own; the run's end merges them. A kill can tear only the last line of a file,
which is dropped when the run is resumed.
"""

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_specdec import SpecDecError

from .config import RunConfig

Row = dict[str, Any]
CONFIG_FILE = "run.json"
ROWS_FILE = "rows.jsonl"
RESULTS_FILE = "results.json"


def key(row: Row) -> tuple[int, int]:
    """What a row is of: `(repeat, unit)`, which is also the order of rows in the file."""
    return row["repeat"], row["unit"]


def prepare_directory(config: RunConfig, resume: bool) -> Path:
    """Make the output directory, or check that what was measured there is of this configuration.

    Raises:
        SpecDecError: it holds another configuration's run, or any run while `resume` is false, or it cannot be made.
    """
    directory, now = Path(config.output), json.loads(json.dumps(config.to_dict()))
    kept = directory / CONFIG_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        measured = (directory / RESULTS_FILE).exists() or any(each.stat().st_size for each in row_files(directory))
        before = _read_json(kept)
    except (OSError, ValueError) as error:
        raise SpecDecError(f"--output {directory} cannot be used: {error}") from None
    if not measured:
        if before != now:
            write_atomically(kept, json.dumps(now, indent=1))
        return directory
    if not isinstance(before, dict):
        raise SpecDecError(f"{directory} holds a run whose {CONFIG_FILE} is missing or broken; give another --output.")
    other = sorted(name for name in {*before, *now} - {"output"} if before.get(name) != now.get(name))
    if other:
        told = f"{other[0]} was {before.get(other[0])!r} there and is {now.get(other[0])!r} now"
        raise SpecDecError(f"{directory} holds results of another configuration ({told}); give another --output.")
    if not resume:
        raise SpecDecError(f"{directory} holds a run of this configuration; add --resume, or give another --output.")
    return directory


def _read_json(path: Path) -> Any:
    """What a file holds; None where there is no file, or no JSON in it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def row_files(directory: Path) -> list[Path]:
    """The files of rows in a directory; a copy under another name is none."""
    return sorted(each for each in directory.glob("rows*.jsonl") if re.fullmatch(r"rows(-\d+)?\.jsonl", each.name))


def read_rows(directory: Path, told: Callable[[str], None]) -> list[Row]:
    """All rows in a directory, each once, in order. `told` hears of a torn last line, which is left out.

    Raises:
        SpecDecError: a line before the last is broken.
    """
    rows: dict[tuple[int, int], Row] = {}
    for path in row_files(directory):
        rows.update((key(row), row) for row in _read(path, told)[0])
    return [rows[each] for each in sorted(rows)]


def read_file(path: Path) -> list[Row]:
    """The complete rows of one file."""
    return _read(path, lambda message: None)[0]


def _is_row(value: Any) -> bool:
    """Whether this is a row, as far as its key and its methods show."""
    if not isinstance(value, dict) or not isinstance(value.get("methods"), dict):
        return False
    return all(isinstance(value.get(name), int) and value[name] >= 0 for name in ("unit", "repeat"))


def _read(path: Path, told: Callable[[str], None]) -> tuple[list[Row], int]:
    """The rows of one file, and the bytes that hold them."""
    rows, good = [], 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            complete = _is_row(row) and line.endswith(b"\n")
        except ValueError:
            complete = False
        if not complete:
            if number < len(lines):
                raise SpecDecError(f"{path} is broken at line {number}; mend or remove that line.")
            told(f"{path}: the last line is incomplete and was dropped; its unit is measured again.")
            break
        rows.append(row)
        good += len(line)
    return rows, good


class RowFile:
    """Appends rows to a file; each is on the disk when `write` returns. A torn last line is cut off first."""

    def __init__(self, path: Path):
        self._path = path
        if path.exists():
            os.truncate(path, _read(path, lambda message: None)[1])
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> "RowFile":
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()

    def write(self, row: Row) -> None:
        """Append a row.

        Raises:
            SpecDecError: the disk is full, or the file cannot be written.
        """
        try:
            line = json.dumps(row).encode() + b"\n"
            if self._file.write(line) != len(line):
                raise OSError("the disk is full")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SpecDecError(
                f"{self._path} cannot be written: {error}. Rows before it are kept: make room, then --resume."
            ) from None


def merge_rows(directory: Path, rows: Iterable[Row]) -> None:
    """Leave these rows, as ordered, in one file."""
    write_atomically(directory / ROWS_FILE, "".join(json.dumps(row) + "\n" for row in rows))
    for path in row_files(directory):
        if path.name != ROWS_FILE:
            path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    passing = path.with_name(path.name + ".part")
    try:
        with passing.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        passing.replace(path)
    except OSError as error:
        with suppress(OSError):
            passing.unlink()
        raise SpecDecError(f"{path} cannot be written: {error}. Rows already measured are kept.") from None
