"""The container of GGUF files against gguf-py's own reader, and what is said of those that are not whole."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from engine.loader import ModelFileInvalid
from engine.loader.gguf_reader import GgufContainer


@pytest.fixture
def path(tmp_path):
    """A file with a value of each type, and tensors of three types of which one has an odd size."""
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for kind in ("uint8", "uint16", "uint32", "uint64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", 200)
    for kind in ("int8", "int16", "int32", "int64"):
        getattr(writer, f"add_{kind}")(f"test.{kind}", -100)
    writer.add_float32("test.float32", 0.5)
    writer.add_float64("test.float64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "dünn")
    writer.add_array("test.strings", ["", "a", "日本"])
    writer.add_array("test.numbers", [1, -2, 3])
    writer.add_array("test.floats", [0.25, 1e30])
    numbers = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    writer.add_tensor("odd", numbers[0, :3].copy())
    writer.add_tensor("half", numbers.astype(np.float16))
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor("quantised", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "all.gguf"


def test_metadata_and_tensors_are_those_of_gguf_pys_reader(path):
    ours, theirs = GgufContainer(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert len(fields) == 16
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors} == {"odd", "half", "quantised"}
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].type == tensor.tensor_type
        assert ours.stored(tensor.name).tobytes() == tensor.data.tobytes()


def test_what_was_forgotten_is_read_again_from_the_file(path):
    container = GgufContainer(path)
    before = container.stored("half").copy()
    container.forget("half")
    assert np.array_equal(container.stored("half"), before)


def test_no_beginning_of_a_file_is_a_file(path):
    whole = path.read_bytes()
    for kept in range(0, len(whole) - 64, 7):
        path.write_bytes(whole[:kept])
        with pytest.raises(ModelFileInvalid, match=r"all\.gguf"):
            GgufContainer(path)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (0, struct.pack("<I", 7), "first bytes"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 2**60), "all.gguf"),
        (16, struct.pack("<Q", 2**60), "all.gguf"),
        (24, struct.pack("<Q", 2**63), "string"),
    ],
    ids=["magic", "old version", "big-endian", "tensor count", "key count", "length of a key"],
)
def test_a_front_that_makes_no_sense_is_invalid(path, place, value, named):
    broken = bytearray(path.read_bytes())
    broken[place : place + len(value)] = value
    path.write_bytes(broken)
    with pytest.raises(ModelFileInvalid, match=named):
        GgufContainer(path)
