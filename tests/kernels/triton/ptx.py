"""A few instructions of PTX on numpy arrays: what Triton's interpreter lacks to run kernels with inline assembly."""

import re
from typing import Any, NamedTuple

import numpy as np
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

_STATEMENT = re.compile(r"(\w+)\.(\w+)\s+(.*)")


class Results(NamedTuple):
    """What an inline assembly call returns, as the interpreter's front end reads it."""

    handles: list[TensorHandle]

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def create_inline_asm(
    _builder: Any, asm: str, constraints: str, values: list[TensorHandle], types: list[Any], _pure: bool, pack: int
) -> Results:
    """Run a block of PTX that takes one register of a tensor's numbers and gives one of each result's numbers.

    Raises `NotImplementedError` for what no kernel here has.
    """
    (packed,) = values
    widths = [_get_np_dtype(one).itemsize * pack for one in types]
    if packed.data.itemsize * pack != 4 or set(widths) != {4} or constraints != ",".join(["=r"] * len(types) + ["r"]):
        raise NotImplementedError(f"inline PTX from {packed.data.dtype} by {pack} to {types}: {constraints}")
    registers = {f"${len(types)}": np.ascontiguousarray(packed.data).reshape(-1).view(np.uint32)}
    for statement in asm.strip().strip("{}").split(";"):
        if (text := statement.strip()) and not text.startswith(".reg"):
            _execute(text, registers)
    return Results(
        [
            TensorHandle(registers[f"${index}"].view(_get_np_dtype(one)).reshape(packed.data.shape), one.scalar)
            for index, one in enumerate(types)
        ]
    )


def _execute(statement: str, registers: dict[str, np.ndarray]) -> None:
    match = _STATEMENT.fullmatch(statement)
    if match is None:
        raise NotImplementedError(statement)
    operation, _, operands = match.groups()
    target, *names = (operand.strip() for operand in operands.split(","))
    sources = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in names]
    if operation == "shr":
        registers[target] = sources[0] >> sources[1]
    elif operation == "lop3":
        registers[target] = _looked_up(*sources)
    else:
        raise NotImplementedError(statement)


def _looked_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.uint32) -> np.ndarray:
    """Return words of which each bit is the table's bit at `4 * bit of a + 2 * bit of b + bit of c`."""
    result = np.zeros_like(a)
    for entry in range(8):
        if int(table) >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result
