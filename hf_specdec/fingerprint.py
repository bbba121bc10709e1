"""Is a user's logits processor a function of one row's prefix and scores alone?

A copy is called on two prefixes and on the first one again. Its attributes may be set once (a tensor moved to a
device, a prepared table), but what changes at each call is state; so is anything that makes the same call give
another answer. In a batch, one row's scores must not change with the other rows.
"""

import copy
import types
from typing import Any

import torch

from .noise import generator_kept

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def changes_when_called(processor: Any, input_ids: torch.Tensor, vocab_size: int) -> str | None:
    """Why the processor cannot be called on several prefixes at once, or None when it can.

    Args:
        processor: called as `processor(input_ids, scores)`.
        input_ids: the prompt, shape `(B, L)`.
        vocab_size: width of the scores for the trial.
    """
    try:
        trial = copy_callable(processor)
    except Exception as error:
        return f"cannot be copied to find out whether it keeps state ({type(error).__name__}: {error})"
    first = input_ids if input_ids.shape[1] else input_ids.new_zeros(input_ids.shape[0], 1)
    longer = torch.cat([first, first[:, -1:]], dim=1)
    generator = torch.Generator().manual_seed(0)
    shape = 2, first.shape[0], vocab_size
    scores = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(first.device)
    trials = [(first, scores[0]), (longer, scores[0]), (first, scores[0])]
    for kept in (0, -1):
        prefix, others = (first + 1) % vocab_size, scores[1].clone()
        prefix[kept], others[kept] = first[kept], scores[0][kept]
        trials.append((prefix, others))
    prints: list[Any] = []
    answers: list[torch.Tensor] = []
    with generator_kept(input_ids.device):
        before = torch.get_rng_state()
        for prefix, given in trials:
            try:
                answers.append(trial(prefix, given.clone()))
            except Exception as error:
                if not prints:
                    return None
                return f"fails when called twice ({type(error).__name__}: {error})"
            prints.append(fingerprint(trial))
        if not torch.equal(before, torch.get_rng_state()):
            return "draws from the global generator"
    if prints[0] != prints[1] or not torch.equal(answers[0], answers[2]):
        return "keeps state between calls"
    if not torch.equal(answers[0][0], answers[3][0]) or not torch.equal(answers[0][-1], answers[4][-1]):
        return "lets one row's scores depend on the other rows"
    return None


def copy_callable(value: Any) -> Any:
    """A deep copy that shares modules (models) and also copies what a plain function closes over."""
    if isinstance(value, types.FunctionType):
        cells = tuple(types.CellType(copy_callable(cell.cell_contents)) for cell in value.__closure__ or ())
        copied = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, copy.deepcopy(value.__defaults__), cells or None
        )
        copied.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__)
        return copied
    shared = {id(each): each for each in attributes(value).values() if isinstance(each, torch.nn.Module)}
    return copy.deepcopy(value, shared)


def attributes(value: Any) -> dict[str, Any]:
    """Attributes by name, those in slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = getattr(cls, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def fingerprint(value: Any, depth: int = 8, seen: frozenset[int] = frozenset()) -> Any:
    """A comparable summary of an object's state."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.detach().cpu().reshape(-1).tolist())
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if depth == 0 or id(value) in seen:
        return type(value).__qualname__
    seen = seen | {id(value)}
    if isinstance(value, dict):
        return [(fingerprint(key, depth - 1, seen), fingerprint(item, depth - 1, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [fingerprint(item, depth - 1, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, torch.nn.Module):
        return type(value).__qualname__
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        return [fingerprint(each, depth - 1, seen) for each in (*held, value.__defaults__, value.__kwdefaults__)]
    if isinstance(value, types.MethodType):
        return fingerprint(value.__self__, depth - 1, seen)
    return (type(value).__qualname__, fingerprint(attributes(value), depth - 1, seen))
