"""Int8 rows of the KV cache: symmetric quantization in groups along the head size, with bfloat16 scales beside them.

For each token and head, and each of G groups of its values x (`pack`, `unpack`):

    s = bf16(max |x| / 127.5),   q = clamp(round(x / s), -127, 127),   x' = q · s

A head of D values is D + 2 G bytes: the q of all groups, then the scales. A token is rounded by itself, when it is
written: its bits depend neither on the tokens around it nor on how heads are spread over ranks. Grids along tokens
(KIVI, Liu et al. 2024: keys per channel) need a window of tokens that are not rounded yet, so that a token's values
would change with its age. Small groups keep channels of large keys apart from the others instead.

bfloat16 has the range of float32, so that no scale overflows; and as s is found from 127.5, no x' exceeds max |x|. A
group with an infinity or a NaN is read as NaN and infinities.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Values that share a scale, at most, where the head size has such a divisor."""
_LEAST = 8
"""A group of fewer values would be mostly scales."""
_SCALE_BYTES = 2


def groups_of(size: int) -> int:
    """Groups of a head of `size` values: as few equal ones of at most `GROUP` as there are, or one."""
    found = next((count for count in range(-(-size // GROUP), size + 1) if size % count == 0), 1)
    return found if size // max(found, 1) >= _LEAST else 1


def packed_size(size: int) -> int:
    """Bytes of a head of `size` values with its scales."""
    return size + _SCALE_BYTES * groups_of(size)


def pack(x: Tensor) -> Tensor:
    """Values [..., D] as int8 [..., D + 2 G]."""
    grouped = x.float().unflatten(-1, (groups_of(x.size(-1)), -1))
    scales = (grouped.abs().amax(-1, keepdim=True) / 127.5).bfloat16()
    # 0 / 0 is a zero, and so is whatever a scale that is not finite makes NaN or infinite when it is read.
    rounded = (grouped / scales).nan_to_num_(0.0, 127.0, -127.0).round_().clamp_(-127, 127)
    return torch.cat([rounded.flatten(-2).to(torch.int8), scales.squeeze(-1).view(torch.int8)], -1)


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """`out` [..., D], with the values of int8 [..., D + 2 G]."""
    size = out.size(-1)
    scales = packed[..., size:].contiguous().view(torch.bfloat16).unsqueeze(-1)
    out.copy_(packed[..., :size])
    # A product of an int8 and a bfloat16 is exact in float32, so that it is rounded once, to the dtype of `out`.
    if out.dtype != torch.float16:
        scales = scales.to(out.dtype)
    out.unflatten(-1, (groups_of(size), -1)).mul_(scales)
    return out
