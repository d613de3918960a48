"""Registration: only paged calls change, twice is once, and everything can be undone."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_zoo import prompts, tiny_model
from transformers import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.quantizers import auto

import hf_paged

IDS = torch.stack(prompts((6, 6)))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    yield
    hf_paged.register()


def tokens(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=5, do_sample=False, **options)


def state() -> list[Any]:
    """Everything in Transformers that registration may touch."""
    return [
        GenerationMixin.generate,
        dict(ALL_ATTENTION_FUNCTIONS),
        dict(ALL_MASK_ATTENTION_FUNCTIONS),
        dict(auto.AUTO_QUANTIZER_MAPPING),
        dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING),
    ]


def test_unregister_restores_transformers_exactly() -> None:
    """Compared with a process that never imported the package, name by name."""
    hf_paged.unregister()
    names = [getattr(GenerationMixin.generate, "__module__", None), *(sorted(map(str, part)) for part in state()[1:])]
    script = (
        "from transformers import GenerationMixin as G; from transformers.quantizers import auto as a;"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as m;"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as f;"
        "print([G.generate.__module__, *(sorted(map(str, part)) for part in"
        " (f, m, a.AUTO_QUANTIZER_MAPPING, a.AUTO_QUANTIZATION_CONFIG_MAPPING))])"
    )
    clean = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert clean.stdout.strip().splitlines()[-1] == str(names)
    assert not hasattr(GenerationMixin.generate, "__hf_paged_original__")


def test_register_twice_is_register_once() -> None:
    hf_paged.unregister()
    before = state()
    hf_paged.register()
    hf_paged.register()
    hf_paged.unregister()
    assert state() == before
    hf_paged.unregister()
    assert state() == before


def test_a_second_import_replaces_the_first_hook_instead_of_stacking() -> None:
    hf_paged.unregister()
    original = GenerationMixin.generate
    hf_paged.register()
    importlib.reload(hf_paged)
    assert GenerationMixin.generate.__wrapped__ is original
    hf_paged.unregister()
    assert GenerationMixin.generate is original


_IMPORT_ANEW = """
import gc, sys
from transformers import GenerationMixin
original = GenerationMixin.generate
import hf_paged
for name in [name for name in sys.modules if name.partition(".")[0] == "hf_paged"]:
    del sys.modules[name]
gc.collect()
import hf_paged
assert GenerationMixin.generate is not original
hf_paged.unregister()
assert GenerationMixin.generate is original
"""


def test_the_package_can_be_imported_anew() -> None:
    """Notebooks and test runners drop its modules; torch keeps the operators that the first import defined."""
    subprocess.run([sys.executable, "-c", _IMPORT_ANEW], check=True)


def test_a_wrapper_around_the_hook_is_kept_and_named_when_undoing() -> None:
    """Another plugin that wraps generate after us must not lose its patch, nor be left calling a ghost."""
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        hf_paged.register()
        assert GenerationMixin.generate is theirs
        with pytest.raises(RuntimeError, match="wrapped after"):
            hf_paged.unregister()
    finally:
        GenerationMixin.generate = ours


def test_plain_calls_see_no_difference() -> None:
    model = tiny_model("llama")
    with_us = tokens(model)
    hf_paged.unregister()
    assert torch.equal(tokens(model), with_us)
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_untouched_by_paged_calls_and_by_unregistering() -> None:
    model = tiny_model("llama")
    dense, config = tokens(model), copy.deepcopy(model.config)
    weights = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    assert torch.equal(tokens(model, cache_implementation="paged"), dense)
    hf_paged.unregister()
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation
    assert all(torch.equal(w, weights[n][1]) for n, w in model.named_parameters())
    assert torch.equal(tokens(model), dense)


def test_without_the_hook_custom_generate_serves_pages() -> None:
    model = tiny_model("llama")
    dense = tokens(model)
    hf_paged.unregister()
    with pytest.raises(ValueError, match="not registered"):
        tokens(model, custom_generate=hf_paged.generate)
    hf_paged.register(hook=False)
    assert not hasattr(GenerationMixin.generate, "__hf_paged_original__")
    assert torch.equal(tokens(model, custom_generate=hf_paged.generate, cache_config={"block_size": 16}), dense)
    with pytest.raises(ValueError, match="unknown cache_config keys"):
        tokens(model, custom_generate=hf_paged.generate, cache_config={"page_size": 16})


def test_models_survive_deepcopy_and_pickle_after_a_paged_call() -> None:
    model = tiny_model("llama")
    paged = tokens(model, cache_implementation="paged")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(tokens(twin, cache_implementation="paged"), paged)
        assert torch.equal(tokens(twin), paged)


def _in_child(model: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put(tokens(model, cache_implementation="paged").tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_process_generates_what_its_parent_does() -> None:
    model = tiny_model("llama")
    torch.set_num_threads(1)  # a fork inherits no worker threads
    expected = tokens(model, cache_implementation="paged").tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(model, queue))
    child.start()
    try:
        assert queue.get(timeout=60) == expected
    finally:
        child.join(timeout=60)
    assert child.exitcode == 0


def test_the_public_names_exist() -> None:
    assert all(getattr(hf_paged, name) is not None for name in hf_paged.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = hf_paged.Missing
