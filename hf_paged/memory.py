"""How many blocks fit: a real forward at the largest step shows what activations need, the rest is for keys and
values."""

from __future__ import annotations

import logging
import math

import psutil
import torch

from hf_paged.config import EngineConfig
from hf_paged.kv_cache import KVCache
from hf_paged.model_runner import ModelRunner
from hf_paged.packed_model import PackedModel
from hf_paged.request import Request, ScheduledRequest, SchedulerOutput
from hf_paged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

GIB = 1 << 30
CPU_SHARE = 0.25  # of the free CPU memory: other programs live there too
_SAMPLER_COPIES = 4  # fp32 copies of all logits that sampling may hold at once
_GRAPH_BYTES = 1 << 30  # captured steps keep their activations; 14 batch sizes of a 7B model take less


def resolve_num_blocks(config: EngineConfig, model: PackedModel, empty: KVCache, *, max_model_len: int) -> int:
    """Blocks to allocate, the null block included: `config.num_blocks`, or what the free memory holds.

    On a GPU that is `gpu_memory_utilization` of the card, less what is in use and the peak of a profiling forward. On a
    CPU a quarter of the free memory. Never more than all rows at their longest can use.

    Args:
        empty: a `KVCache` without blocks, to ask for sizes.

    Raises:
        ValueError: not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    device = model.device
    if device.type == "cuda":
        free = _free_after_profile(config, model, empty, max_model_len)
    else:
        free = int(psutil.virtual_memory().available * CPU_SHARE)
    free -= empty.fixed_bytes
    useful = config.max_num_seqs * math.ceil(max_model_len / config.block_size) * len(empty.groups) + 1
    num_blocks = min(free // empty.block_bytes, useful)
    if num_blocks < 2:
        remedy = "free memory, or give num_blocks"
        if device.type == "cuda":
            remedy = "raise gpu_memory_utilization or lower max_num_batched_tokens"
        raise ValueError(
            f"{free / GIB:.2f} GiB are left for the KV cache, less than two blocks of {empty.block_bytes} bytes; "
            f"{remedy}"
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB, %s",
        num_blocks,
        config.block_size,
        num_blocks * empty.block_bytes / GIB,
        config.kv_cache_dtype,
    )
    return num_blocks


def call_num_blocks(rows_blocks: int, longest_blocks: int, empty: KVCache, device: torch.device) -> int:
    """Blocks of a pool for one call, the null block included: all that its rows can ever use, if half the free memory
    holds them, else what that holds, but always the longest row. Rows seldom use all that `max_new_tokens` allows, and
    those that find no block wait.

    Args:
        rows_blocks: what all rows use at their longest, in all groups.
        longest_blocks: what one row uses at its longest.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    free -= empty.fixed_bytes
    return min(rows_blocks, max(free // 2 // empty.block_bytes, longest_blocks)) + 1


def check_size(asked: str, num_bytes: int, device: torch.device) -> None:
    """Refuse what no memory of this machine can ever hold, before an allocator says so in bytes.

    Raises:
        ValueError: `num_bytes` are more than the device has.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = psutil.virtual_memory().total + psutil.swap_memory().total
    if num_bytes > total:
        raise ValueError(
            f"{asked}: {num_bytes / GIB:,.1f} GiB are more than the {total / GIB:,.1f} GiB of {device}; allowed: fewer "
            "blocks (num_blocks, or rows times prompt and max_new_tokens) or less swap_space"
        )


def _free_after_profile(config: EngineConfig, model: PackedModel, empty: KVCache, max_model_len: int) -> int:
    """Bytes left on the GPU beside everything in use and the activations of the largest step."""
    device = model.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    page_bytes = _run_largest_step(config, model, empty, max_model_len)
    peak = torch.cuda.max_memory_allocated(device) - before - page_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_use = total - free
    sampling = _SAMPLER_COPIES * config.max_num_seqs * model.vocab_size * 4
    return int(total * config.gpu_memory_utilization) - in_use - peak - sampling - _GRAPH_BYTES


@torch.inference_mode()
def _run_largest_step(config: EngineConfig, model: PackedModel, empty: KVCache, max_model_len: int) -> int:
    """A prefill of `max_num_batched_tokens` tokens in as few sequences as allowed; the bytes of the pages it used."""
    length = min(config.max_num_batched_tokens, max_model_len)
    num_seqs = min(max(config.max_num_batched_tokens // length, 1), config.max_num_seqs)
    blocks_each = math.ceil(length / config.block_size)
    cache = KVCache(
        empty.specs, empty.formats, num_blocks=1 + num_seqs * blocks_each, block_size=config.block_size,
        num_recent=num_seqs if config.kv_recent_block else 0,
    )  # fmt: skip
    runner = ModelRunner(model, cache, config, max_model_len=max_model_len)
    scheduled = []
    for i in range(num_seqs):
        request = Request(f"profile-{i}", [0] * length, SamplingParams())
        request.row = i
        blocks = list(range(1 + i * blocks_each, 1 + (i + 1) * blocks_each))
        request.block_tables = [blocks for _ in cache.groups]
        scheduled.append(ScheduledRequest(request, length, 0, True))
    runner.forward(SchedulerOutput(scheduled=scheduled, admitted=[item.request for item in scheduled]))
    torch.cuda.synchronize(model.device)
    return cache.num_bytes
