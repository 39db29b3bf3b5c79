"""Convolutions and max pools of many clients on a GPU, in Triton, which comes with PyTorch for GPUs.

PyTorch computes the convolutions of K clients as one with K groups. Here each is a product of matrices whose factors
are read from the images themselves (an implicit GEMM): pixels by input channels for the outputs and for the derivative
by the image, output channels by pixels for the derivative by the weights. Tensors [K, B, C, H, W] lie in memory as
[K, B, H, W, C], so that rows of the factors are contiguous, and weights [K, O, C, kh, kw] as [K, kh, kw, O, C].

Matrix units multiply shorter numbers than float32. So a float32 is split into two: of bfloat16, which keeps sixteen
bits of it, where PyTorch may round to TF32's eleven; of TF32 otherwise, which keeps all that float32 has. Of the four
products of two such sums, the smallest is left out.
"""

# The kernels have no docstrings or types: Triton compiles them.
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language import constexpr

TILE = {"ROWS": 128, "OUTPUTS_EACH": 128, "CHANNELS_EACH": 32, "num_warps": 8, "num_stages": 3}
"""Pixels and output channels of a tile of outputs, and the input channels of each product; fewer if there are fewer."""

WEIGHT_TILE = {"ROWS": 32, "OUTPUTS_EACH": 128, "WEIGHTS_EACH": 128, "num_warps": 8, "num_stages": 3}
"""Pixels of each product, and a tile of weights: output channels, and input channels at each place of the kernel."""

PROGRAMS = 264
"""Programs that a GPU should have at least: two for each multiprocessor of an H100."""

LEAST_STEPS = 8
"""Products that a program adds at least, if there are so many."""

POOLED = 1024
"""Values that one program of a pool computes."""


def conv(x: torch.Tensor, w: torch.Tensor, padding: int) -> torch.Tensor:
    """x [K, B, C, H, W] and w [K, O, C, kh, kw] to y [K, B, O, h, w]."""
    return _conv(x, w, (padding, padding), adjoint=False)


def conv_input(g: torch.Tensor, w: torch.Tensor, padding: int) -> torch.Tensor:
    """d <g, conv(x, w)> / d x: a convolution of g with the kernels upside down, from outputs to inputs."""
    return _conv(g, w, (w.shape[3] - 1 - padding, w.shape[4] - 1 - padding), adjoint=True)


def _conv(x: torch.Tensor, w: torch.Tensor, padding: tuple[int, int], adjoint: bool) -> torch.Tensor:
    clients, images, channels, height, width = x.shape
    outputs, kernel = w.shape[2 if adjoint else 1], w.shape[3:]
    x, w = _channels_last(x), w.permute(0, 3, 4, 1, 2).contiguous()
    size = height + 2 * padding[0] - kernel[0] + 1, width + 2 * padding[1] - kernel[1] + 1
    y = x.new_empty(clients, images, *size, outputs)
    if y.numel():
        tile = _fitted(TILE, OUTPUTS_EACH=outputs, CHANNELS_EACH=channels)
        rows = triton.cdiv(images * size[0] * size[1], tile["ROWS"])
        grid = (rows * triton.cdiv(outputs, tile["OUTPUTS_EACH"]), clients)
        shape = (height, width, *size, *padding, channels, outputs, *kernel)
        _conv_kernel[grid](x, w, y, images, *shape, adjoint, _is_exact(), **tile)
    return y.permute(0, 1, 4, 2, 3)


def conv_weight(x: torch.Tensor, g: torch.Tensor, padding: int, height: int, width: int) -> torch.Tensor:
    """d <g, conv(x, w)> / d w for w of ``height`` x ``width``."""
    clients, images, channels, *size = x.shape
    outputs, out = g.shape[2], g.shape[3:]
    x, g = _channels_last(x), _channels_last(g)
    weights = height * width * channels
    tile = _fitted(WEIGHT_TILE, OUTPUTS_EACH=outputs, WEIGHTS_EACH=weights)
    if tile["OUTPUTS_EACH"] * tile["WEIGHTS_EACH"] < 128 * 128:
        tile |= {"num_warps": 4, "num_stages": 4}
    tiles = triton.cdiv(outputs, tile["OUTPUTS_EACH"]) * triton.cdiv(weights, tile["WEIGHTS_EACH"])
    steps = triton.cdiv(images * math.prod(out), tile["ROWS"])
    # Several programs share the pixels of a tile where there are fewer tiles than a GPU can run.
    steps = max(min(steps, LEAST_STEPS), triton.cdiv(steps, max(1, PROGRAMS // (tiles * clients))))
    parts = triton.cdiv(images * math.prod(out), tile["ROWS"] * steps)
    w = x.new_empty(clients, parts, height, width, outputs, channels)
    if w.numel():
        shape = (*size, *out, padding, padding, channels, outputs, height, width)
        _weight_kernel[tiles, parts, clients](x, g, w, images, *shape, steps, _is_exact(), **tile)
    return (w.sum(1) if parts != 1 else w[:, 0]).permute(0, 3, 4, 1, 2)


def pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """2x2 max pool of [K, B, C, H, W]: values, and which of the four was the first largest (uint8)."""
    x = _channels_last(x)
    clients, images, height, width, channels = x.shape
    y = x.new_empty(clients, images, height // 2, width // 2, channels)
    which = torch.empty_like(y, dtype=torch.uint8)
    _run_pool(_pool_kernel, y, x, y, which, height, width, channels)
    return y.permute(0, 1, 4, 2, 3), which.permute(0, 1, 4, 2, 3)


def pick(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """The values of x at the places that ``which`` gives."""
    x, which = _channels_last(x), _channels_last(which)
    y = torch.empty_like(which, dtype=x.dtype)
    _run_pool(_pick_kernel, y, x, y, which, *x.shape[2:])
    return y.permute(0, 1, 4, 2, 3)


def spread(g: torch.Tensor, which: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Each gradient at the place of its maximum, zeros elsewhere."""
    g, which = _channels_last(g), _channels_last(which)
    clients, images, *_, channels = g.shape
    # A last row or column that no pool reads.
    make = g.new_zeros if height % 2 or width % 2 else g.new_empty
    x = make(clients, images, height, width, channels)
    _run_pool(_spread_kernel, g, x, g, which, height, width, channels)
    return x.permute(0, 1, 4, 2, 3)


def _run_pool(kernel, pooled, x, y, which, height: int, width: int, channels: int) -> None:
    if pooled.numel():
        grid = (triton.cdiv(pooled.numel(), POOLED),)
        kernel[grid](x, y, which, pooled.numel(), height, width, channels, POOLED)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """[K, B, C, H, W] as [K, B, H, W, C], contiguous: no copy where memory has this order."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _fitted(tile: dict[str, int], **needed: int) -> dict[str, int]:
    """A tile with sides no larger than needed: powers of two, of which matrix units take 16 at least."""
    return tile | {side: min(tile[side], max(16, triton.next_power_of_2(size))) for side, size in needed.items()}


def _is_exact() -> bool:
    """Whether factors of products must not be rounded."""
    return not torch.backends.cudnn.allow_tf32


@triton.jit
def _add_product(a, b, total, EXACT: constexpr):
    if EXACT:
        return tl.dot(a, b, total, input_precision="tf32x3")
    a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
    a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit
def _conv_kernel(
    x,
    w,
    y,
    images,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    OUT_HEIGHT: constexpr,
    OUT_WIDTH: constexpr,
    ABOVE: constexpr,
    LEFT: constexpr,
    CHANNELS: constexpr,
    OUTPUTS: constexpr,
    KERNEL_HEIGHT: constexpr,
    KERNEL_WIDTH: constexpr,
    ADJOINT: constexpr,
    EXACT: constexpr,
    ROWS: constexpr,
    OUTPUTS_EACH: constexpr,
    CHANNELS_EACH: constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    rows = images * OUT_HEIGHT * OUT_WIDTH
    x += client * images * (HEIGHT * WIDTH * CHANNELS)
    w += client * (KERNEL_HEIGHT * KERNEL_WIDTH * OUTPUTS * CHANNELS)
    y += client * rows * OUTPUTS
    tiles: constexpr = (OUTPUTS + OUTPUTS_EACH - 1) // OUTPUTS_EACH
    m = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(0) % tiles * OUTPUTS_EACH + tl.arange(0, OUTPUTS_EACH)
    row = m // OUT_WIDTH % OUT_HEIGHT - ABOVE
    column = m % OUT_WIDTH - LEFT
    image = m // (OUT_WIDTH * OUT_HEIGHT)
    first = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
    blocks: constexpr = (CHANNELS + CHANNELS_EACH - 1) // CHANNELS_EACH
    total = tl.zeros((ROWS, OUTPUTS_EACH), dtype=tl.float32)
    for i in range(KERNEL_HEIGHT * KERNEL_WIDTH * blocks):
        place = i // blocks
        c = i % blocks * CHANNELS_EACH + tl.arange(0, CHANNELS_EACH)
        down, right = place // KERNEL_WIDTH, place % KERNEL_WIDTH
        inside = (m < rows) & (row + down >= 0) & (row + down < HEIGHT)
        inside = (inside & (column + right >= 0) & (column + right < WIDTH))[:, None]
        pixels = x + (first + (down * WIDTH + right) * CHANNELS)[:, None] + c[None, :]
        if ADJOINT:
            place = KERNEL_HEIGHT * KERNEL_WIDTH - 1 - place
            weights = w + (place * CHANNELS + c)[:, None] * OUTPUTS + o[None, :]
        else:
            weights = w + (place * OUTPUTS + o)[None, :] * CHANNELS + c[:, None]
        if CHANNELS % CHANNELS_EACH == 0:
            a = tl.load(pixels, mask=inside, other=0.0)
        else:
            a = tl.load(pixels, mask=inside & (c < CHANNELS)[None, :], other=0.0)
        if CHANNELS % CHANNELS_EACH == 0 and OUTPUTS % OUTPUTS_EACH == 0:
            b = tl.load(weights)
        else:
            b = tl.load(weights, mask=(o < OUTPUTS)[None, :] & (c < CHANNELS)[:, None], other=0.0)
        total = _add_product(a, b, total, EXACT)
    tl.store(y + m[:, None] * OUTPUTS + o[None, :], total, mask=(m < rows)[:, None] & (o < OUTPUTS)[None, :])


@triton.jit
def _weight_kernel(
    x,
    g,
    w,
    images,
    HEIGHT: constexpr,
    WIDTH: constexpr,
    OUT_HEIGHT: constexpr,
    OUT_WIDTH: constexpr,
    ABOVE: constexpr,
    LEFT: constexpr,
    CHANNELS: constexpr,
    OUTPUTS: constexpr,
    KERNEL_HEIGHT: constexpr,
    KERNEL_WIDTH: constexpr,
    STEPS: constexpr,
    EXACT: constexpr,
    ROWS: constexpr,
    OUTPUTS_EACH: constexpr,
    WEIGHTS_EACH: constexpr,
):
    PLACES: constexpr = KERNEL_HEIGHT * KERNEL_WIDTH
    client = tl.program_id(2).to(tl.int64)
    rows = images * OUT_HEIGHT * OUT_WIDTH
    x += client * images * (HEIGHT * WIDTH * CHANNELS)
    g += client * rows * OUTPUTS
    w += (client * tl.num_programs(1) + tl.program_id(1)) * (OUTPUTS * PLACES * CHANNELS)
    tiles: constexpr = (PLACES * CHANNELS + WEIGHTS_EACH - 1) // WEIGHTS_EACH
    o = tl.program_id(0) // tiles * OUTPUTS_EACH + tl.arange(0, OUTPUTS_EACH)
    j = tl.program_id(0) % tiles * WEIGHTS_EACH + tl.arange(0, WEIGHTS_EACH)
    place = j // CHANNELS
    offset = (place // KERNEL_WIDTH * WIDTH + place % KERNEL_WIDTH) * CHANNELS + j % CHANNELS
    total = tl.zeros((OUTPUTS_EACH, WEIGHTS_EACH), dtype=tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(1) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        row = m // OUT_WIDTH % OUT_HEIGHT - ABOVE
        column = m % OUT_WIDTH - LEFT
        pixel = (m // (OUT_WIDTH * OUT_HEIGHT) * HEIGHT + row) * WIDTH + column
        # One bit for each row and each column of the kernel: whether the image has pixels there.
        rows_inside = tl.zeros((ROWS,), dtype=tl.int32)
        columns_inside = tl.zeros((ROWS,), dtype=tl.int32)
        for k in tl.static_range(KERNEL_HEIGHT):
            rows_inside |= ((m < rows) & (row + k >= 0) & (row + k < HEIGHT)).to(tl.int32) << k
        for k in tl.static_range(KERNEL_WIDTH):
            columns_inside |= ((column + k >= 0) & (column + k < WIDTH)).to(tl.int32) << k
        gradients = g + m[None, :] * OUTPUTS + o[:, None]
        if OUTPUTS % OUTPUTS_EACH == 0:
            a = tl.load(gradients, mask=(m < rows)[None, :], other=0.0)
        else:
            a = tl.load(gradients, mask=(m < rows)[None, :] & (o < OUTPUTS)[:, None], other=0.0)
        down, right = place // KERNEL_WIDTH, place % KERNEL_WIDTH
        mask = (rows_inside[:, None] >> down[None, :]) & (columns_inside[:, None] >> right[None, :]) & 1 == 1
        if PLACES * CHANNELS % WEIGHTS_EACH != 0:
            mask = mask & (place < PLACES)[None, :]
        b = tl.load(x + (pixel * CHANNELS)[:, None] + offset[None, :], mask=mask, other=0.0)
        total = _add_product(a, b, total, EXACT)
    weights = w + place[None, :] * (OUTPUTS * CHANNELS) + o[:, None] * CHANNELS + j[None, :] % CHANNELS
    tl.store(weights, total, mask=(o < OUTPUTS)[:, None] & (place < PLACES)[None, :])


@triton.jit
def _corner(i, HEIGHT: constexpr, WIDTH: constexpr, C: constexpr):
    """The first of the four values [N, HEIGHT, WIDTH, C] that are pooled into value i."""
    pixel, rows, columns = i // C, HEIGHT // 2, WIDTH // 2
    row, column = pixel // columns % rows, pixel % columns
    return ((pixel // (columns * rows) * HEIGHT + 2 * row) * WIDTH + 2 * column) * C + i % C


@triton.jit
def _pool_kernel(x, y, which, count, HEIGHT: constexpr, WIDTH: constexpr, C: constexpr, POOLED: constexpr):
    i = tl.program_id(0).to(tl.int64) * POOLED + tl.arange(0, POOLED)
    first = x + _corner(i, HEIGHT, WIDTH, C)
    best = tl.load(first, mask=i < count)
    of = tl.zeros((POOLED,), dtype=tl.int32)
    for k in tl.static_range(1, 4):
        value = tl.load(first + (k // 2 * WIDTH + k % 2) * C, mask=i < count)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        of = tl.where(better, k, of)
    tl.store(y + i, best, mask=i < count)
    tl.store(which + i, of.to(tl.uint8), mask=i < count)


@triton.jit
def _pick_kernel(x, y, which, count, HEIGHT: constexpr, WIDTH: constexpr, C: constexpr, POOLED: constexpr):
    i = tl.program_id(0).to(tl.int64) * POOLED + tl.arange(0, POOLED)
    of = tl.load(which + i, mask=i < count, other=0).to(tl.int32)
    places = _corner(i, HEIGHT, WIDTH, C) + (of // 2 * WIDTH + of % 2) * C
    tl.store(y + i, tl.load(x + places, mask=i < count), mask=i < count)


@triton.jit
def _spread_kernel(x, y, which, count, HEIGHT: constexpr, WIDTH: constexpr, C: constexpr, POOLED: constexpr):
    i = tl.program_id(0).to(tl.int64) * POOLED + tl.arange(0, POOLED)
    of = tl.load(which + i, mask=i < count, other=0).to(tl.int32)
    value = tl.load(y + i, mask=i < count, other=0.0)
    first = x + _corner(i, HEIGHT, WIDTH, C)
    for k in tl.static_range(4):
        tl.store(first + (k // 2 * WIDTH + k % 2) * C, tl.where(of == k, value, 0.0), mask=i < count)
