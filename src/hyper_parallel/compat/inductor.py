"""PyTorch's compiler, Inductor: a flat graph in, an artifact in a folder out, and back.

Each artifact has its own folder with everything that loading it reads (kernels, wrappers, Inductor's cache entries), so
that the folder can be checked as a whole. `environment` describes what an artifact is compiled for; a cache must make
it a part of its keys.
"""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hyper_parallel.compat.fx_graph import fake_mode_with_symbols

Region = Callable[..., Sequence[torch.Tensor]]
"""Tensors to tensors."""

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Shape, stride in elements, dtype, device."""

_ARTIFACT = "artifact"
_OPTIONS: dict[str, Any] = {
    # The step of every rank must come out the same, so nothing is chosen by timing it.
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}


def missing() -> str | None:
    """The part that is missing to compile for this machine's CPU; None when nothing is."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "a C++ compiler (set CXX, or install g++ or clang++)"
    return None


def environment(folder: Path) -> dict[str, str]:
    """The environment that code made for a graph depends on.

    Finding out compiles and loads small programs, in `folder`: Inductor's own cache has a name in the system's folder
    for temporary files that anybody can foresee.
    """
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with temporary_cache_dir(str(folder)):
        return {**_machine(), "threads": str(torch.get_num_threads())}


@functools.cache
def _machine() -> dict[str, str]:
    from torch._inductor import config
    from torch._inductor.codecache import torch_key
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    compiler = get_cpp_compiler()
    found = {
        "torch": torch.__version__,
        "torch sources": torch_key().hex(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "vectors": f"{torch.backends.cpu.get_cpu_capability()} {pick_vec_isa()}",
        "compiler": f"{compiler} {get_compiler_version_info(compiler)}",
        "config": repr(sorted(config.save_config_portable().items(), key=lambda item: item[0])),
        "options": repr(_OPTIONS),
    }
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        found["accelerator"] = f"{module.get_device_name()} {torch.version.cuda}"
    return found


def compile_into(folder: Path, graph: fx.Graph, inputs: Sequence[Spec]) -> None:
    """Compile a flat graph of ATen operators, in-place ones included, for inputs that share no memory.

    Raises whatever the compiler raises.
    """
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    mode = fake_mode_with_symbols()
    with mode:
        examples: list[Any] = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in inputs
        ]
    with temporary_cache_dir(str(folder)), torch.no_grad():
        artifact = _compile(fx.GraphModule({}, graph), examples, mode)
        artifact.save(path=str(folder / _ARTIFACT))


def _compile(module: fx.GraphModule, examples: list[Any], mode: Any) -> Any:
    """The artifact of a module, which may be changed. `examples`: its inputs, fake tensors of `mode`."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    options = {"config_patches": dict(_OPTIONS)}
    if "fake_mode" in inspect.signature(standalone_compile).parameters:
        return standalone_compile(
            module,
            examples,
            dynamic_shapes="from_example_inputs",
            options=options,
            fake_mode=mode,
            donate_graph_module=True,
        )
    # Releases without the argument (PyTorch 2.11) take the mode of a surrounding trace.
    with tracing(TracingContext(mode)):
        return standalone_compile(module, examples, dynamic_shapes="from_tracing_context", options=options)


def load(folder: Path) -> Region:
    """What `compile_into` left in a folder. Raises whatever the compiler's own loading raises."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
    from torch._inductor.standalone_compile import CompiledArtifact

    with temporary_cache_dir(str(folder)):
        artifact: Region = CompiledArtifact.load(path=str(folder / _ARTIFACT))
    return artifact
