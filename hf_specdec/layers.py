"""The layers of a decoder: where they are, and how a thread calls a model with some of them replaced.

Inside `replaced`, calls that this thread makes of the given modules go to their replacements; all other threads see
the model as it is. A replaced module has a `forward` of its own while any thread is inside, and its old one after.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

Replacement = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called with the module's own forward and its arguments, returns what the module is to return."""

MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "ff")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module] | None:
    """The decoder's layers in order, or None where they cannot be told from other modules.

    They are the one list in the decoder whose i-th element holds an attention module that calls itself layer i.
    """
    found = [
        each
        for each in model.get_decoder().modules()
        if isinstance(each, nn.ModuleList)
        and len(each)
        and all(_numbered(layer.modules(), layer, index) for index, layer in enumerate(each))
    ]
    return list(found[0]) if len(found) == 1 else None


def _numbered(modules: Any, layer: nn.Module, index: int) -> nn.Module | None:
    return next((each for each in modules if each is not layer and getattr(each, "layer_idx", None) == index), None)


def attention_of(layer: nn.Module, index: int) -> nn.Module | None:
    """The attention module of layer `index`, or None."""
    return _numbered(layer.children(), layer, index)


def mlp_of(layer: nn.Module) -> nn.Module | None:
    """The feed-forward module of a layer, or None where it is not a module of its own."""
    return next((each for name in MLP_NAMES if isinstance(each := getattr(layer, name, None), nn.Module)), None)


class _Thread(threading.local):
    replacements: Mapping[nn.Module, Replacement] = MappingProxyType({})


@dataclass
class _Installed:
    """How a module's `forward` was before, and how many threads replace it."""

    own: Callable[..., Any] | None
    users: int = 0


_thread = _Thread()
_lock = threading.Lock()
_installed: dict[nn.Module, _Installed] = {}


@contextmanager
def replaced(replacements: Mapping[nn.Module, Replacement]) -> Iterator[None]:
    """Calls of these modules by this thread go to their replacements inside."""
    before = _thread.replacements
    with _lock:
        for module in replacements:
            _install(module)
    _thread.replacements = replacements
    try:
        yield
    finally:
        _thread.replacements = before
        with _lock:
            for module in replacements:
                _remove(module)


def _install(module: nn.Module) -> None:
    if module not in _installed:
        _installed[module] = _Installed(vars(module).get("forward"))
        vars(module)["forward"] = _dispatching(module, module.forward)
    _installed[module].users += 1


def _remove(module: nn.Module) -> None:
    entry = _installed[module]
    entry.users -= 1
    if entry.users:
        return
    del _installed[module]
    if entry.own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = entry.own


def _dispatching(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        replacement = _thread.replacements.get(module)
        return forward(*args, **kwargs) if replacement is None else replacement(forward, args, kwargs)

    return dispatch


class OutputForms:
    """What modules return: the hidden states alone, or a tuple that begins with them. Seen once, then imitated."""

    def __init__(self) -> None:
        self._sizes: dict[nn.Module, int | None] = {}

    def seen(self, modules: Sequence[nn.Module]) -> Mapping[nn.Module, Replacement]:
        """Replacements that change nothing and note the form."""

        def noting(module: nn.Module) -> Replacement:
            def note(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                output = forward(*args, **kwargs)
                self._sizes[module] = len(output) if isinstance(output, tuple) else None
                return output

            return note

        return {module: noting(module) for module in modules}

    def identity(self, module: nn.Module) -> Replacement:
        """The hidden states pass through."""
        return lambda forward, args, kwargs: self._shaped(module, _hidden(args, kwargs))

    def nothing(self, module: nn.Module) -> Replacement:
        """Zeros, so that nothing is added to the residual stream."""
        return lambda forward, args, kwargs: self._shaped(module, torch.zeros_like(_hidden(args, kwargs)))

    def constant(self, module: nn.Module, hidden: torch.Tensor) -> Replacement:
        """These hidden states, whatever comes in."""
        return lambda forward, args, kwargs: self._shaped(module, hidden)

    def _shaped(self, module: nn.Module, hidden: torch.Tensor) -> Any:
        size = self._sizes.get(module)
        return hidden if size is None else (hidden, *[None] * (size - 1))


def recording(into: list[torch.Tensor]) -> Replacement:
    """The module runs, and the hidden states that it returns are appended to a list."""

    def record(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = forward(*args, **kwargs)
        into.append(output[0] if isinstance(output, tuple) else output)
        return output

    return record


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden
