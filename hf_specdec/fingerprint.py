"""Does a user's logits processor keep state between calls?

A copy is called twice and its attributes are compared after the first and the second call. What is set once (a tensor
moved to a device, a prepared table) is no state; what changes at each call is.
"""

import copy
import types
from typing import Any

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def changes_when_called(processor: Any, input_ids: torch.Tensor, vocab_size: int) -> str | None:
    """Why the processor cannot be called on several prefixes at once, or None when it can.

    Args:
        processor: called as `processor(input_ids, scores)`.
        input_ids: the prompt, shape `(B, L)`.
        vocab_size: width of the scores for the trial.
    """
    shared = {id(value): value for value in vars(processor).values() if isinstance(value, torch.nn.Module)}
    try:
        trial = copy.deepcopy(processor, shared)
    except Exception as error:
        return f"cannot be copied to find out whether it keeps state ({type(error).__name__}: {error})"
    first = input_ids if input_ids.shape[1] else input_ids.new_zeros(input_ids.shape[0], 1)
    longer = torch.cat([first, first[:, -1:]], dim=1)
    devices = [input_ids.device] if input_ids.device.type == "cuda" else []
    prints = []
    with torch.random.fork_rng(devices=devices):
        before = torch.get_rng_state()
        for prefix in (first, longer):
            try:
                trial(prefix, torch.zeros(prefix.shape[0], vocab_size, device=prefix.device))
            except Exception as error:
                if not prints:
                    return None
                return f"fails when called twice ({type(error).__name__}: {error})"
            prints.append(fingerprint(trial))
        if not torch.equal(before, torch.get_rng_state()):
            return "draws from the global generator"
    return "keeps state between calls" if prints[0] != prints[1] else None


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
        return [fingerprint(cell.cell_contents, depth - 1, seen) for cell in value.__closure__ or ()]
    if isinstance(value, types.MethodType):
        return fingerprint(value.__self__, depth - 1, seen)
    if hasattr(value, "__dict__"):
        return (type(value).__qualname__, fingerprint(vars(value), depth - 1, seen))
    return repr(type(value))
