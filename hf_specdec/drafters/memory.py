"""What all memories that outlive a call share: a lock, a file, and how a strategy is given one."""

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..errors import SpecDecError
from .base import NEW_MEMORY, write_whole

AnyMemory = TypeVar("AnyMemory", bound="Memory")


class Memory(ABC):
    """What one call leaves for the next. Safe to share between threads.

    Class attributes:
        kind: which memory it is, for messages and in the file.

    Attributes:
        path: the file this memory was last loaded from or saved to, or None.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.path: str | None = None
        self._lock = threading.RLock()

    @classmethod
    def _file_format(cls) -> str:
        return f"hf_specdec {cls.kind} memory 1"

    @abstractmethod
    def __getstate__(self) -> dict[str, Any]:
        """Its bounds, `path` and content, JSON-able."""

    @classmethod
    @abstractmethod
    def _restored(cls: type[AnyMemory], content: Mapping[str, Any]) -> AnyMemory:
        """The memory of a file's content. Raises `ValueError` for content that makes none."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a JSON file, replacing it in one step. Raises `SpecDecError` where that cannot be."""
        content = {"format": self._file_format(), **self.__getstate__()}
        del content["path"]
        write_whole(path, json.dumps(content))
        self.path = os.fspath(path)

    @classmethod
    def load(cls: type[AnyMemory], path: str | os.PathLike[str]) -> AnyMemory:
        """Read a file that `save` wrote. Raises `SpecDecError` when it is not one."""
        name = cls.__name__
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != cls._file_format():
                raise ValueError(f"its format is {content['format']!r}, not {cls._file_format()!r}")
            memory = cls._restored(content)
        except FileNotFoundError as error:
            raise SpecDecError(
                f"There is no {cls.kind} memory at {os.fspath(path)!r}; make one with `{name}().save(path)`."
            ) from error
        except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError, SpecDecError) as error:
            raise SpecDecError(
                f"{os.fspath(path)!r} cannot be read as a {cls.kind} memory ({error}); pass a file that "
                f"`{name}.save` wrote, or delete it and start a new memory."
            ) from error
        memory.path = os.fspath(path)
        return memory


def is_token(value: Any) -> bool:
    """A token id as a file holds it."""
    return type(value) is int and 0 <= value < 2**31


def as_memory(owner: str, given: Any, kind: type[AnyMemory], new: Callable[[], AnyMemory]) -> AnyMemory | None:
    """The memory that a strategy's setting stands for: itself, a saved one's path, "new", or None for none.

    Args:
        owner: the strategy, for messages.
        new: makes an empty one.

    Raises:
        SpecDecError: it stands for none, or the file cannot be read.
    """
    if given is None or isinstance(given, kind):
        return given
    if given == NEW_MEMORY:
        return new()
    if isinstance(given, (str, os.PathLike)):
        return kind.load(given)
    raise SpecDecError(
        f"{owner}: memory={type(given).__name__} is neither a {kind.__name__}, nor the path of a saved one, nor "
        f"{NEW_MEMORY!r}."
    )


def memory_setting(memory: Any) -> str | None:
    """A strategy's memory for YAML and JSON: its path, or "new" if it was never saved."""
    return memory.path or NEW_MEMORY if isinstance(memory, Memory) else None
