"""The four products between two attentions of a few tokens as one kernel: output, gate-up, down, QKV of the next layer.

A product of few tokens spends as long at its ends as with its bytes: it waits for the one before, for activations, for
sums over programs. Here one program a multiprocessor goes through all four (`layer_chain.cu`), weights never stop
coming, activations reach the other programs in about a microsecond, and no product is launched. Norms, residual adds
and the activation are ends of products as in `folded_linear.py`, whose definitions say what is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from hf_paged.kernels.cuda_kernel import CudaKernel, TensorBox, TensorMaps, read_source, serves_processes
from hf_paged.kernels.folded_linear import folded_linear_reference, folded_sum_reference
from hf_paged.kernels.on_device import multiprocessors
from hf_paged.kernels.packed_weight import PackedWeight
from hf_paged.kernels.reference_fused import RMSNorm
from hf_paged.kernels.turn import turn

logger = logging.getLogger(__name__)

MAX_CHAIN_ROWS = 1
STEP = 128  # channels of a scale; with 16 outputs 1 KiB of words
GROUP = 16  # outputs that a program owns together
_WARPS = (16, 20, 12)  # that multiply, of which one is chosen
_SHARED_BYTES = 218 * 1024  # of 227 KiB: the small kernels that follow start beside a chain
_LEAST_STAGES = 4
_PROGRAMS = 132  # of an H200, where only sizes are asked for
_SCALES = {torch.float16: 0, torch.bfloat16: 1}


@dataclass(frozen=True, kw_only=True)
class ChainShape:
    """What is fixed when the kernel is compiled."""

    rows: int
    attended: int  # channels
    hidden: int
    mlp: int
    qkv: int  # outputs
    norms: tuple[tuple[float, float], tuple[float, float]]  # eps and offset of both
    ordered: bool  # some of the products read their channels in an order
    scales: torch.dtype
    programs: int

    @property
    def warps(self) -> int:
        """As many as leave the fewest steps of stages empty: each takes 128 channels."""
        hidden, mlp = self.hidden, self.mlp
        products = ((hidden, self.attended), (2 * mlp, hidden), (hidden, mlp), (self.qkv, hidden))
        return min(_WARPS, key=lambda warps: sum(n * warps * -(-k // (warps * STEP)) for n, k in products))

    @property
    def stages(self) -> int:
        return (_SHARED_BYTES - self._beside_bytes) // self._stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self._stage_bytes + self._beside_bytes

    @property
    def exchange_words(self) -> int:
        """int32 that programs hand to each other: two bf16, or a sum of squares of 16."""
        return self.rows * (self.hidden + self.mlp // 2 + self.hidden // 8)

    @property
    def _stage_bytes(self) -> int:
        return self.warps * (1024 + 2 * GROUP) + 16  # words, scales, barriers

    @property
    def _beside_bytes(self) -> int:
        """Of shared memory beside the ring: rows of a product, also as they come before they are put in an order, parts
        of the sums of two, factors, padding."""
        most = max(self.attended, self.hidden, self.mlp)
        stages = -(-most // (self.warps * STEP))
        x = self.rows * (stages * 2 * STEP + 16 * (self.rows > 1))
        groups = self._groups(self.hidden) + max(2 * self._groups(self.mlp), self._groups(self.qkv))
        unordered = self.rows * most * 2 if self.ordered else 0
        return self.warps * (-(-x // 128) * 128 + groups * GROUP * self.rows * 4) + unordered + 832

    def _groups(self, outputs: int) -> int:
        return -(-outputs // GROUP // self.programs)

    @property
    def defines(self) -> dict[str, object]:
        (eps, offset), (next_eps, next_offset) = self.norms
        return {
            "HALF": 0,
            "M": self.rows,
            "KO": self.attended,
            "HID": self.hidden,
            "INTER": self.mlp,
            "QKV": self.qkv,
            "PROGRAMS": self.programs,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "SCALE": _SCALES[self.scales],
            "EPS": f"{eps:e}f",
            "OFFSET": f"{offset:e}f",
            "NEXT_EPS": f"{next_eps:e}f",
            "NEXT_OFFSET": f"{next_offset:e}f",
            "ORDERED": int(self.ordered),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerChain:
    """What `layer_chain` multiplies with, and the norms after its two residual adds; see `of`."""

    weights: Sequence[PackedWeight]  # output, gate-up, down, QKV of the next layer
    bias: Tensor | None  # of QKV
    norms: tuple[RMSNorm, RMSNorm]
    orders: Sequence[Tensor | None]  # [K] 16 bits of each product: its channel i is channel orders[i] of what it reads

    @classmethod
    def of(
        cls,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor | None],
        norms: tuple[RMSNorm, RMSNorm],
    ) -> LayerChain | None:
        """None where something does not suit, or the compiler refuses. Weights as `can_fold` takes them."""
        scales = weights[0].scales.dtype
        if not all(_suits(weight, scales) for weight in weights):
            return None
        if any(bias is not None for bias in biases[:3]):
            return None
        orders = [None if weight.perm is None else weight.perm.to(torch.int16) for weight in weights]
        chain = cls(weights=weights, bias=biases[3], norms=norms, orders=orders)
        device = weights[0].packed.device
        shape = chain.shape(MAX_CHAIN_ROWS, multiprocessors(device) if device.type == "cuda" else _PROGRAMS)
        fits = shape.stages >= _LEAST_STAGES  # few multiprocessors have many outputs each, and no room for weights
        return chain if fits and (device.type != "cuda" or _compiles(shape, device.index)) else None

    @cached_property
    def maps(self) -> TensorMaps:
        """Of words and scales, on a GPU."""
        warps = self.shape(1, _PROGRAMS).warps
        words = [_words(weight, warps) for weight in self.weights]
        return TensorMaps([*words, *(_scales(weight, warps) for weight in self.weights)])

    def exchange_words(self, rows: int) -> int:
        """int32 of a row of `new_exchange`, at least."""
        return self.shape(rows, _PROGRAMS).exchange_words

    def shape(self, rows: int, programs: int) -> ChainShape:
        output, _, down, qkv = self.weights
        eps = [(norm.eps, norm.offset) for norm in self.norms]
        return ChainShape(
            rows=rows,
            attended=output.in_features,
            hidden=output.out_features,
            mlp=down.in_features,
            qkv=qkv.out_features,
            norms=(eps[0], eps[1]),
            ordered=any(order is not None for order in self.orders),
            scales=output.scales.dtype,
            programs=programs,
        )


def _suits(weight: PackedWeight, scales: torch.dtype) -> bool:
    return (
        weight.field_bits == weight.code_bits == 4
        and weight.zeros is None
        and weight.group_size == STEP
        and weight.in_features % STEP == 0
        and weight.in_features <= 1 << 16
        and weight.out_features % GROUP == 0
        and weight.scales.dtype == scales
        and scales in _SCALES
    )


def _words(weight: PackedWeight, box_steps: int) -> TensorBox:
    """Boxes of some steps of 16 outputs; four of those lie in a tile."""
    steps, tiles = weight.in_features // STEP, weight.packed.shape[0]
    strides = (1024, 4096, steps * 4096)
    return TensorBox(tensor=weight.packed, sizes=(256, 4, steps, tiles), strides=strides, box=(256, 1, box_steps, 1))


def _scales(weight: PackedWeight, box_steps: int) -> TensorBox:
    n, steps = weight.out_features, weight.in_features // STEP
    return TensorBox(tensor=weight.scales, sizes=(n, steps), strides=(2 * n,), box=(GROUP, box_steps))


def layer_chain_reference(attended: Tensor, residual: Tensor, chain: LayerChain) -> tuple[Tensor, Tensor]:
    """The definition of `layer_chain`."""
    output, gate_up, down, qkv = chain.weights
    norm, next_norm = (
        replace(norm, order=weight.perm) for norm, weight in zip(chain.norms, (gate_up, qkv), strict=True)
    )
    hidden, normed = folded_sum_reference(attended, output, None, residual, norm)
    assert normed is not None
    gated = folded_linear_reference(normed, gate_up, None, gated=True)
    hidden, normed = folded_sum_reference(gated, down, None, hidden, next_norm)
    assert normed is not None
    return hidden, folded_linear_reference(normed, qkv, chain.bias)


def new_exchange(chain: LayerChain, rows: int, chains: int) -> Tensor:
    """`[chains, words]` int32 for the calls of one step, each of which needs memory that none used before."""
    device = chain.weights[0].packed.device
    words = chain.exchange_words(rows)
    return torch.full((chains, -(-words // 4) * 4), -1, dtype=torch.int32, device=device)


def layer_chain(attended: Tensor, residual: Tensor, chain: LayerChain, exchange: Tensor) -> tuple[Tensor, Tensor]:
    """Attention's output `[M, K]` and the residual `[M, hidden]`, bf16 -> hidden states `[M, hidden]`, QKV `[M, N]`.

    M at most `MAX_CHAIN_ROWS`. `exchange`: a row of `new_exchange`. The programs wait for each other, so all must
    find places at the same time: a graph with a chain in it is replayed in a `turn`.
    """
    m, device = residual.shape[0], residual.device.index or 0
    shape = chain.shape(m, multiprocessors(residual.device))
    assert m <= MAX_CHAIN_ROWS and exchange.numel() >= shape.exchange_words, (m, exchange.shape, shape)
    hidden = torch.empty_like(residual)
    qkv = torch.empty((m, shape.qkv), dtype=residual.dtype, device=residual.device)
    norm, next_norm = chain.norms
    arguments: list[Tensor | TensorMaps | int | None] = [
        attended.contiguous(),
        residual.contiguous(),
        chain.maps,
        norm.weight,
        next_norm.weight,
        None if chain.bias is None else chain.bias.to(residual.dtype),
        *chain.orders,
        exchange,
        hidden,
        qkv,
    ]
    with torch.cuda.device(device):
        # weights are read before the kernel before has ended; in a captured graph none of them is written
        overlap = torch.cuda.is_current_stream_capturing()
        kernel, threads = _kernel(shape, device), 32 * shape.warps + 32
        with nullcontext() if overlap else turn(residual.device):
            kernel.launch(shape.programs, threads, arguments, overlap=overlap, cooperative=serves_processes(device))
    return hidden, qkv


@cache
def _compiles(shape: ChainShape, device: int) -> bool:
    try:
        with torch.cuda.device(device):
            _kernel(shape, device)
    except RuntimeError as error:
        logger.warning("products between two attentions run one by one: %s", error)
        return False
    return True


@cache
def _kernel(shape: ChainShape, device: int) -> CudaKernel:
    """Of the current device, which is `device`."""
    return CudaKernel(source(shape), "layer_chain", "sm_90a", shape.shared_bytes)


def source(shape: ChainShape) -> str:
    """The CUDA source with the shape's definitions."""
    return read_source(("hopper_instructions", "layer_chain"), shape.defines)
