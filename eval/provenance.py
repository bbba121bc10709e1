"""Where figures come from: versions, commit, machine, date."""

import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

PACKAGES = ("hf-specdec", "torch", "transformers", "accelerate", "datasets", "evaluate", "numpy")


def provenance(name: str, model: PreTrainedModel, processes: int) -> dict[str, Any]:
    """What results say about their origin: the model by the name it was asked for, and where it was measured."""
    device = model.device
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": _cpu(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        },
        "processes": processes,
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def comment(origin: Mapping[str, Any], prompts: str, figures: str) -> str:
    """What a YAML file says above a choice: when it was made, on which model, machine and prompts, and its figures."""
    facts = {
        "Chosen by hf-specdec plan": origin["date"],
        "model": f"{origin['model']}, {origin['dtype']}",
        "machine": ", ".join(f"{name} {value}" for name, value in origin["machine"].items()),
        "prompts": prompts,
        "figures": figures,
    }
    return "".join(f"# {name}: {' '.join(value.split())}\n" for name, value in facts.items())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that the harness runs from, with "+" where files differ from it."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:  # another project's checkout around a wheel
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
