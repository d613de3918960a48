"""A wrong setting is refused where it is made, by name, and never reaches the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hf_paged.config import EngineConfig, KVGroup, parse_kv_cache_dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 8),
        ("block_size", 48),
        ("block_size", 512),
        ("block_size", 32.0),
        ("kv_cache_dtype", "int2"),
        ("kv_cache_dtype", "k=int8"),
        ("kv_cache_dtype", "k=int8,k=fp8"),
        ("kv_cache_dtype", "k=int8,v=auto,"),
        ("kv_cache_dtype", None),
        ("skip_layers", "0,1"),
        ("skip_layers", (-1,)),
        ("skip_layers", 3),
        ("num_blocks", 1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("max_num_seqs", 0),
        ("max_num_seqs", 10**12),  # each keeps a row in host memory
        ("max_num_batched_tokens", True),
        ("max_model_len", 1),
        ("max_model_len", 10**9),
        ("enable_prefix_caching", 1),
        ("swap_space", -1.0),
        ("swap_space", math.nan),
        ("swap_space", math.inf),
        ("cuda_graphs", "yes"),
        ("async_scheduling", 1),
        ("fuse", "yes"),
        ("seed", -1),
    ],
)
def test_a_value_no_engine_can_run_with_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as refusal:
        EngineConfig.parse({field: value})
    assert repr(value) in str(refusal.value)
    assert "allowed" in str(refusal.value)


def test_an_unknown_option_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"kv_dtype.*block_size.*kv_cache_dtype"):
        EngineConfig.parse({"kv_dtype": "int8"})


def test_parsing_leaves_the_callers_mapping_as_it_was() -> None:
    options = {"skip_layers": [0, 27], "kv_cache_dtype": "int8"}
    assert EngineConfig.parse(options).skip_layers == (0, 27)
    assert options == {"skip_layers": [0, 27], "kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("auto", ("auto", "auto")),
        ("fp8", ("fp8", "fp8")),
        ("k=int8,v=auto", ("int8", "auto")),
        ("v=fp8, k=int8", ("int8", "fp8")),
    ],
)
def test_k_and_v_may_have_formats_of_their_own_in_either_order(text: str, formats: tuple[str, str]) -> None:
    assert parse_kv_cache_dtype(text) == formats


def test_a_window_of_no_position_is_no_window() -> None:
    with pytest.raises(ValueError, match="window=0"):
        KVGroup(window=0)
