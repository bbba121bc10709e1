"""`synced_gpus`: ranks run the same number of forward passes until all are done, and each keeps its own text."""

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from cases import forward_widths, plain_model, spec_model
from conftest import prompt
from oracle import Oracle

WORLD = 2
NEW_TOKENS = 20


def work(rank: int, folder: str) -> None:
    """One rank: plain text alone, then the same text in step with the other rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        inputs = prompt(1 + 2 * rank, seed=rank)
        options = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        text = plain_model().generate(**options)[:, 24:].tolist()
        early = {"eos_token_id": text[0][4]} if rank == 0 else {}
        expected = plain_model().generate(**options, **early)
        for strategy in ("suffix", Oracle.of(text), Oracle.of(text, 0.3)):
            with forward_widths(spec_model()) as widths:
                output = spec_model().generate(
                    **options, **early, synced_gpus=True, assistant_strategy=strategy, return_dict_in_generate=True
                )
            assert torch.equal(output.sequences, expected), f"rank {rank} has other text"
            counts: list[int | None] = [None] * WORLD
            dist.all_gather_object(counts, len(widths))
            assert len(set(counts)) == 1, f"forward passes per rank: {counts}"
            own = 1 + max(row.num_spec_steps for row in output.speculation.rows)
            assert rank == 1 or strategy != "suffix" or len(widths) > own, "rank 0 must have waited for rank 1"
    finally:
        dist.destroy_process_group()


def test_ranks_stay_in_step(tmp_path):
    multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=WORLD, join=True)
