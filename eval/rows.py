"""`rows.jsonl`: one line per unit and repeat, on disk before the next is measured.

Each process appends to a file of its own; the run's end merges them. A kill can tear only the last line of a file,
which is dropped when the run is resumed.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_specdec import SpecDecError

from .config import RunConfig

Row = dict[str, Any]
CONFIG_FILE = "run.json"
ROWS_FILE = "rows.jsonl"


def key(row: Row) -> tuple[int, int]:
    """What a row is of: `(repeat, unit)`, which is also the order of rows in the file."""
    return row["repeat"], row["unit"]


def prepare_directory(config: RunConfig, resume: bool) -> Path:
    """Make the output directory, or check that it belongs to this configuration.

    Raises:
        SpecDecError: it holds another configuration's results, or rows while `resume` is false, or it cannot be made.
    """
    directory = Path(config.output)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / CONFIG_FILE
        if not kept.exists():
            if row_files(directory):
                raise SpecDecError(f"{directory} holds rows without {CONFIG_FILE}; give another --output.")
            write_atomically(kept, json.dumps(config.to_dict(), indent=1))
            return directory
        before = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SpecDecError(f"--output {directory} cannot be used: {error}") from None
    now = json.loads(json.dumps(config.to_dict()))
    other = sorted(name for name in {*before, *now} - {"output"} if before.get(name) != now.get(name))
    if other:
        told = f"{other[0]} was {before.get(other[0])!r} there and is {now.get(other[0])!r} now"
        raise SpecDecError(f"{directory} holds results of another configuration ({told}); give another --output.")
    if row_files(directory) and not resume:
        raise SpecDecError(f"{directory} holds rows of this configuration; add --resume, or give another --output.")
    return directory


def row_files(directory: Path) -> list[Path]:
    """The files of rows in a directory."""
    return sorted(directory.glob("rows*.jsonl"))


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


def _read(path: Path, told: Callable[[str], None]) -> tuple[list[Row], int]:
    """The rows of one file, and the bytes that hold them."""
    rows, good = [], 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            complete = isinstance(row, dict) and {"unit", "repeat", "methods"} <= row.keys() and line.endswith(b"\n")
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
    """Leave all rows in one file, in order."""
    ordered = sorted(rows, key=key)
    write_atomically(directory / ROWS_FILE, "".join(json.dumps(row) + "\n" for row in ordered))
    for path in row_files(directory):
        if path.name != ROWS_FILE:
            path.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    passing = path.with_name(path.name + ".part")
    try:
        with passing.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        passing.replace(path)
    except OSError as error:
        raise SpecDecError(f"{path} cannot be written: {error}. Rows already measured are kept.") from None
