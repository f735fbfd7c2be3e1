"""A whole world of ranks in one process: a thread a rank, global tensors cut by their layouts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from hyper_parallel.checkpoint import Piece, Writer, read
from hyper_parallel.layout import Layout, Mesh

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float64]


class ThreadRanks:
    """Ranks that are threads: `checkpoint.Ranks` over a barrier."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, texts: list[str]) -> None:
        self.rank = rank
        self.world = world
        self._barrier = barrier
        self._texts = texts

    def gather(self, text: str) -> list[str]:
        self._texts[self.rank] = text
        self._barrier.wait()
        gathered = list(self._texts)
        self._barrier.wait()
        return gathered


def each_rank(world: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What `work` gives on each rank, or the exception that it raises there."""
    barrier, texts = threading.Barrier(world, timeout=60), [""] * world

    def one(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, world, barrier, texts))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def raised(results: list[Any]) -> list[Any]:
    """The results, unless a rank raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def local_of(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    return local_at(whole, layout, layout.mesh.coordinate(rank))


def local_at(whole: torch.Tensor, layout: Layout, coordinate: Mapping[str, int]) -> torch.Tensor:
    local = torch.zeros(layout.local_shape(coordinate), dtype=whole.dtype)
    for box in layout.boxes(coordinate):
        local[box.local_slices] = whole[box.global_slices]
    return local


def pieces_of(
    tensors: dict[str, torch.Tensor], layouts: dict[str, Layout], rank: int, *, empty: bool = False
) -> dict[str, Piece]:
    pieces = {}
    for name, whole in tensors.items():
        local = local_of(whole, layouts[name], rank)
        pieces[name] = Piece(torch.zeros_like(local) if empty else local, layouts[name])
    return pieces


def save_world(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    layouts: dict[str, Layout],
    mesh: Mesh,
    step: int = 1,
    state: dict[str, Any] | None = None,
    largest: dict[str, float] | None = None,
    **options: Any,
) -> list[Path]:
    """Every rank of `mesh` saves; the committed path, as each rank gives it."""

    def one(ranks: ThreadRanks) -> Path | None:
        with Writer(folder, mesh.world, ranks.rank, group=ranks, **options) as writer:
            writer.save(step, pieces_of(tensors, layouts, ranks.rank), state or {}, largest=largest)
            return writer.wait()

    return raised(each_rank(mesh.world, one))


def check_read(path: Path, tensors: dict[str, torch.Tensor], layouts: dict[str, Layout]) -> None:
    """Every rank of the layouts' mesh reads and gets exactly its part, bit for bit."""
    mesh = next(iter(layouts.values())).mesh
    for rank in range(mesh.world):
        got = pieces_of(tensors, layouts, rank, empty=True)
        read(path, got, rank=rank)
        for name, want in pieces_of(tensors, layouts, rank).items():
            assert same_bits(got[name].local, want.local), f"{name} on rank {rank}: {layouts[name]}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, which make random values of any type (NaNs among them)."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(
        0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).view(shape)


MESHES = st.lists(st.integers(1, 3), min_size=0, max_size=3).filter(lambda sizes: math.prod(sizes) <= 8)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(MESHES)
    return Mesh(*zip(("replicate", "shard", "tensor"), sizes, strict=False))


@st.composite
def layouts_on(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], fused: bool = True) -> Layout:
    """Any layout of `shape`: an axis splits some dim or holds copies; the first of a dim may split parts."""
    layout = Layout.replicated(mesh, shape)
    for axis in draw(st.permutations(mesh.names)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim < 0:
            continue
        parts = None
        if fused and not layout.dims[dim] and shape[dim] >= 3 and draw(st.booleans()):
            first = draw(st.integers(1, shape[dim] - 2))
            second = draw(st.integers(1, shape[dim] - first - 1))
            parts = (first, second, shape[dim] - first - second)
        layout = layout.split(dim, axis, parts)
    return layout


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
