"""Compiles every specialisation of the Triton kernels for every architecture, on a machine without a card.

    python -m tests.kernels.triton.offline [--json PATH] [MODULE ...]

It runs in a process of its own, in which Triton does not interpret, and prints what the machine code takes. Triton's
cache (`TRITON_CACHE_DIR`) keeps what has been compiled before.
"""

import argparse
import importlib
import inspect
import json
import multiprocessing
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels.triton
from kernels.triton.launch import Specialisation, launch_on

_PROCESSES = 2
_STORES = re.compile(r"\b(st\.global|cp\.async\.bulk\.|red\.|atom\.)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """One specialisation on one architecture; `spills` are bytes of a thread, `shared` those of a program.

    `tensor_memory` counts columns of sm_100's memory for matrix instructions; `tf32` says whether products of float32
    are of numbers that were cut to 10 bits.

    `error` is why it did not compile, and then the rest says nothing.
    """

    name: str
    architecture: int
    hot: bool
    matrix: bool
    error: str = ""
    registers: int = 0
    spills: int = 0
    shared: int = 0
    tensor_memory: int = 0
    wgmma: bool = False
    tf32: bool = False


def kernel_modules() -> list[str]:
    """Return the names of the modules of `kernels.triton`; some hold only what others share."""
    return [module.name for module in pkgutil.iter_modules(kernels.triton.__path__)]


def specialisations() -> list[Specialisation]:
    """Return all that are listed."""
    return [one for name in kernel_modules() for one in specialisations_of(name)]


def specialisations_of(module: str) -> tuple[Specialisation, ...]:
    """Return those that one module lists."""
    listed: tuple[Specialisation, ...] = vars(_module(module)).get("SPECIALISATIONS", ())
    return listed


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"kernels.triton.{name}")


def signature_of(one: Specialisation, meta: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Return the types, constants and attributes by which Triton compiles a specialisation.

    Raises `TypeError` if its arguments and those of its launch row are not those of the kernel.
    """
    parameters = one.kernel.params
    values = {**meta, **one.arguments}
    names = [parameter.name for parameter in parameters]
    if sorted(names) != sorted(values) or len(values) != len(meta) + len(one.arguments):
        missing, unknown, doubled = set(names) - set(values), set(values) - set(names), set(meta) & set(one.arguments)
        raise TypeError(f"missing {missing}, not in the kernel {unknown}, in the launch row as well {doubled}")
    types, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(parameters):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            types[parameter.name], constants[(place,)] = "constexpr", value
            continue
        types[parameter.name], _, divisor = value.partition(":")
        if divisor:
            attributes[(place,)] = [["tt.divisibility", int(divisor)]]
    return types, constants, attributes


def compile_one(module: str, index: int, architecture: int) -> Compiled:
    """Compile one of a module's specialisations."""
    one = specialisations_of(module)[index]
    about = {"name": one.name, "architecture": architecture, "hot": one.hot, "matrix": one.matrix}
    try:
        launch = launch_on(one.launch, architecture)
        types, constants, attributes = signature_of(one, dict(launch.meta))
        source = ASTSource(one.kernel, types, constants, attributes)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    except Exception as error:  # noqa: BLE001
        # Whatever it is belongs in the table, beside the kernel's name. The first of its causes says most.
        while error.__cause__ is not None:
            error = error.__cause__
        return Compiled(**about, error=f"{type(error).__name__}: {error}")
    if _STORES.search(compiled.asm["ptx"]) is None:
        # What Triton makes of some tiles that it cannot lower is a trap, without a word.
        return Compiled(**about, error="compiled to code that stores nothing")
    registers, spills = _usage(compiled.asm["cubin"])
    return Compiled(
        **about,
        registers=registers,
        spills=spills,
        shared=compiled.metadata.shared,
        tensor_memory=compiled.metadata.tmem_size or 0,
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        tf32="tf32" in compiled.asm["ptx"],
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it keeps in memory for want of more."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = _USAGE.search(report)
    if usage is None:
        raise ValueError(f"cuobjdump reports no resource usage: {report!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def compile_all(modules: Sequence[str]) -> Iterator[Compiled]:
    """Compile the specialisations of some modules, in their order."""
    work = [
        (module, index, architecture)
        for module in modules
        for index, one in enumerate(specialisations_of(module))
        for architecture in one.architectures
    ]
    # LLVM has threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, mp_context=context) as pool:
        yield from pool.map(compile_one, *zip(*work, strict=True), chunksize=4)


def unlisted_kernels() -> list[str]:
    """Return the functions named `..._kernel` that no specialisation compiles."""
    listed = {one.kernel.__name__ for one in specialisations()}
    return [
        f"{module}.{name}"
        for module in kernel_modules()
        for name, _ in inspect.getmembers(_module(module), lambda it: isinstance(it, triton.runtime.KernelInterface))
        if name.endswith("_kernel") and name not in listed
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as w4a16; all, if none is named")
    parser.add_argument("--json", type=Path, help="write the table here as JSON too")
    options = parser.parse_args()
    rows = []
    for row in compile_all(options.modules or kernel_modules()):
        rows.append(asdict(row))
        figures = f"{row.registers:4} registers {row.spills:5} B spilled {row.shared:7} B shared"
        figures += " wgmma" if row.wgmma else ""
        print(f"{row.name:60} sm_{row.architecture:<4}{row.error or figures}", flush=True)  # noqa: T201
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
