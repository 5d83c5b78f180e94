"""The precision that states are stored in, and the way back.

bfloat16 and float32 keep aux and last hidden state alike. float8_e4m3 keeps aux in half of bfloat16's bytes, with one
float32 scale a token and boundary: the outliers of one row (they reach ten thousand times the median) then cost no
other row its bits. The last hidden state stays bfloat16, since in fp8 it would name other tokens as targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448; of more, some versions of torch make NaN
VALUES = 2**15  # turned at a time: they stay in a core's cache, and for so few torch takes no second thread
TABLE = torch.arange(256, dtype=torch.uint8).view(FP8).float()  # [256]; torch's own way from fp8 is five times as slow


def finite(tensor: Tensor) -> bool:
    """Whether every value is finite. Their sum tells, in one reading; values near float32's largest count as not."""
    wide = tensor if tensor.dtype in (torch.bfloat16, torch.float32, torch.float64) else tensor.float()
    return bool(wide.sum().isfinite())


def stored(aux: Tensor, last_hidden: Tensor, dtype: str) -> dict[str, Tensor]:
    """The states [T, A*H] and [R, H] as `capture.dtype` keeps them, by their names in `Features`. aux is a copy."""
    if dtype != "float8_e4m3":
        kept: torch.dtype = getattr(torch, dtype)
        return {"aux": aux.to(kept, copy=True), "last_hidden": last_hidden.to(kept)}
    boundaries = aux.shape[1] // last_hidden.shape[1]
    pieces = aux.split(_rows(aux))  # of [t, A*H]
    values, scales = zip(*(quantise(rows, boundaries) for rows in pieces), strict=True)
    return {
        "aux": torch.cat(values),  # [T, A*H]
        "aux_scale": torch.cat(scales),  # [T, A]
        "last_hidden": last_hidden.to(torch.bfloat16),  # [R, H]
    }


def quantise(aux: Tensor, boundaries: int) -> tuple[Tensor, Tensor]:
    """aux as fp8, and the scales that it is to be multiplied by: absmax / 448 of each token and boundary."""
    states = aux.float().unflatten(1, (boundaries, -1))  # [T, A, H]
    scale = states.abs().amax(-1) / FP8_MAX  # [T, A]
    divisor = torch.where(scale > 0, scale, 1.0)[..., None]  # a row of zeros stays one
    values = (states / divisor).clamp_(-FP8_MAX, FP8_MAX).to(FP8)  # [T, A, H]
    return values.flatten(1), scale  # [T, A*H], [T, A]


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 aux [T, A*H] that fp8 values [T, A*H] and their scales [T, A] stand for."""
    aux = torch.empty(values.shape, dtype=torch.bfloat16)  # [T, A*H]
    pieces = (tensor.split(_rows(values)) for tensor in (aux, values, scale))  # of [t, …] each
    for out, rows, scales in zip(*pieces, strict=True):
        states = TABLE.index_select(0, rows.view(torch.uint8).flatten().int())  # [t*A*H]
        states = states.view(rows.shape).unflatten(1, (scale.shape[1], -1))  # [t, A, H]
        out.copy_((states * scales[..., None]).flatten(1))
    return aux


def _rows(aux: Tensor) -> int:
    return max(1, VALUES // aux.shape[1])
