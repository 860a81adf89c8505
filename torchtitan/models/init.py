"""Initial weights from a counter-based generator: every layout starts from the same bits.

Element i of a parameter is a pure function of (seed, the parameter's name, i), where i counts the
elements of the unsharded parameter in row-major order. So each rank evaluates only its own shard:
nothing is drawn in full, sent or skipped. The alternatives are a "seed checkpoint" made on one
device, or torch's generator advanced for each shard, whose numbers depend on the device and on how
the tensor was split.

An element takes two steps. First a 64-bit hash of i under the parameter's 128-bit key: two rounds
of xor-shift and multiply, those of splitmix64 (doi:10.1145/2660193.2660195), with half of the key
mixed in before each. Then 25 bits of it, an odd number over 2^24 between -1 and 1, through the
inverse of the truncated normal's distribution function. This inverse is a rational function of our
own and not `erfinv`: single additions, multiplications and divisions are rounded alike by every
processor, while `erfinv` differs between CPU libraries and GPUs. The work is done in chunks that
stay in the cache; neither chunk nor thread count touches a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

# private: only this describes FSDP over TP on one tensor dimension, and DTensors carry it
from torch.distributed.tensor.placement_types import _StridedShard

CUTOFF = 3.0
"""A `Normal` is truncated at this many standard deviations; `QUANTILE` is fitted for it."""

GOLDEN = 0x9E3779B97F4A7C15
ROUND_1 = 0xBF58476D1CE4E5B9
ROUND_2 = 0x94D049BB133111EB

# Highest power first, P and Q of g(v) = P(v) / Q(v), such that x g(1 - x^2) is the inverse: at x in
# (-1, 1), g = sqrt(2) erfinv(x erf(CUTOFF / sqrt(2))) / x. A minimax fit to 2.2e-6, relative. In v,
# unlike in x^2, all coefficients are positive and float32 loses nothing; g(0) is below CUTOFF.
QUANTILE_P = (38639.16, 275470.789, 174642.365, 20236.9301, 524.086392, 2.9999935)
QUANTILE_Q = (77475.0801, 225435.069, 95819.7554, 8711.02074, 192.934778, 1.0)

CPU_CHUNK = 1 << 17
"""Elements for each thread at a time: 4 MB of buffers. Half of it costs 10 % more time."""
GPU_CHUNK = 1 << 22
"""Elements at a time on a GPU: 128 MB of buffers, enough to fill one."""


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0, truncated at `CUTOFF` standard deviations (those before truncation)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value in every element."""

    value: float


Init = Normal | Constant


class Initializable(Protocol):
    """A module with an initialization rule for each parameter."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield names, which are the same in every layout, and parameters."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers. There must be none."""

    def initial(self, name: str) -> Init:
        """Return the rule for a parameter, or raise for an unknown name."""


@torch.no_grad()
def initialize(model: Initializable, *, seed: int) -> None:
    """Fill every parameter, or this rank's shard of it, in place and without communication.

    Works on plain tensors and DTensors, on CPU and GPU, in any float dtype (the float32 value is
    rounded). Parameters must have storage: call it after `to_empty()`.
    """
    assert not list(model.buffers()), "nothing fills buffers after to_empty()"
    for name, parameter in model.named_parameters():
        rule = model.initial(name)
        assert not parameter.is_meta, f"{name} is on the meta device: call to_empty() first"
        local = local_part(parameter)
        if isinstance(rule, Constant):
            local.fill_(rule.value)
        else:
            fill_normal(
                local, std=rule.std, key=make_key(name, seed=seed), offsets=local_offsets(parameter)
            )


def make_key(name: str, *, seed: int) -> tuple[int, int]:
    """Hash the seed and a parameter's name to two 64-bit numbers."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    first, second = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))
    return _signed(first), _signed(second)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_offsets(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return one int64 vector per dimension; their outer sum is this rank's flat global indices.

    Shards are cut as by `torch.chunk`, like DTensor and FSDP2 do. They may be uneven or empty, and
    several mesh axes may shard one dimension in any order.
    """
    indices = [torch.arange(size, device="cpu") for size in parameter.shape]
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the parameter's mesh"
        for axis, placement in enumerate(parameter.placements):
            degree, rank = parameter.device_mesh.size(axis), coordinate[axis]
            if isinstance(placement, (_StridedShard, Shard)):
                indices[placement.dim] = _shard(indices[placement.dim], placement, degree, rank)
            else:
                assert isinstance(placement, Replicate), f"no rule fills a {placement} tensor"
        # FSDP2's placements do not describe how it cuts the uneven shards of another axis
        assert tuple(map(len, indices)) == tuple(parameter.to_local().shape), (
            f"{tuple(parameter.shape)} must divide evenly by tp to be sharded by FSDP as well"
        )
    strides = torch.empty(parameter.shape, device="meta").stride()
    return [index * stride for index, stride in zip(indices, strides, strict=True)]


def _shard(
    index: torch.Tensor, placement: Shard | _StridedShard, degree: int, rank: int
) -> torch.Tensor:
    """Pick the indices of one rank of a mesh axis."""
    # strided: another axis, listed later, has already cut the dimension into split_factor pieces
    num_pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
    shards = [index[:0]]
    for piece in index.chunk(num_pieces):
        shards += piece.chunk(degree)[rank : rank + 1]  # chunk may return fewer: nothing is left
    return torch.cat(shards)


def fill_normal(
    out: torch.Tensor,
    *,
    std: float,
    key: tuple[int, int],
    offsets: Sequence[torch.Tensor],
    chunk: int | None = None,
) -> None:
    """Fill `out` with values of the truncated normal distribution.

    `std` is that before truncation. `offsets` are the global indices of the elements, as one vector
    per dimension, to be added; `chunk` elements are filled at a time.
    """
    if out.numel() == 0:
        return
    # a Weyl sequence: index times an odd constant; it distributes over the sum of the offsets
    rows, cols = (part.to(out.device) * _signed(GOLDEN) for part in _as_matrix(offsets))
    out_RC = out.view(len(rows), len(cols))
    chunk = chunk or (GPU_CHUNK if out.is_cuda else CPU_CHUNK * torch.get_num_threads())
    width = min(chunk, len(cols))
    height = min(chunk // width, len(rows))
    integers = torch.empty(2, height * width, dtype=torch.int64, device=out.device)
    floats = torch.empty(4, height * width, dtype=torch.float32, device=out.device)
    for top in range(0, len(rows), height):
        for left in range(0, len(cols), width):
            part_RC = out_RC[top : top + height, left : left + width]
            bits, spare = integers[:, : part_RC.numel()]
            sums_RC = bits.view(part_RC.shape)
            torch.add(rows[top : top + height, None], cols[left : left + width], out=sums_RC)
            _hash(bits, key=key, spare=spare)
            x, *spares = floats[:, : part_RC.numel()]
            _uniform_to_normal(x.copy_(bits), spares=spares)
            part_RC.copy_(x.mul_(std).view(part_RC.shape))


def _as_matrix(offsets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the offsets of all dimensions but the last, so that any shape is rows and columns."""
    rows = zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    for part in offsets[:-1]:
        rows = (rows[:, None] + part).flatten()
    return rows, offsets[-1] if offsets else zero


def _hash(z: torch.Tensor, *, key: tuple[int, int], spare: torch.Tensor) -> None:
    """Turn multiples of GOLDEN into odd random numbers between -2^24 and 2^24, in place."""
    for half_key, shift, multiplier in zip(key, (30, 27), (ROUND_1, ROUND_2), strict=True):
        z.bitwise_xor_(half_key)
        # int64 shifts copy the sign bit: masked away, the shift is that of an unsigned number
        torch.bitwise_right_shift(z, shift, out=spare).bitwise_and_((1 << (64 - shift)) - 1)
        z.bitwise_xor_(spare).mul_(_signed(multiplier))
    # the top bits of a product depend on every bit below: no last xor-shift is needed
    z.bitwise_right_shift_(39).bitwise_or_(1)


def _uniform_to_normal(x: torch.Tensor, *, spares: Sequence[torch.Tensor]) -> None:
    """Map odd integers between -2^24 and 2^24, uniform, to the truncated normal, in place."""
    v, p, q = spares
    x.mul_(2.0**-24)
    torch.mul(x, x, out=v).neg_().add_(1.0)
    for out, (first, second, *coefficients) in ((p, QUANTILE_P), (q, QUANTILE_Q)):
        torch.mul(v, first, out=out).add_(second)
        for coefficient in coefficients:
            out.mul_(v).add_(coefficient)
    x.mul_(p).div_(q)


def _signed(number: int) -> int:
    """Read 64 bits as the two's complement integer that torch.int64 holds."""
    return number - (1 << 64) if number >> 63 else number
