"""The same weights in another of GGUF's formats, for an engine that computes in the format that it reads."""

from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

# What names the format of the file as a whole, and what the writer counts by itself.
_FILE_TYPE = "general.file_type"
_WRITTEN_ANYWAY = ("GGUF.", "general.architecture", _FILE_TYPE)


def rewrite_gguf(source: Path, target: Path, weights: str) -> None:
    """Write `source` anew with each matrix in `weights`, `BF16` or `Q8_0`; vectors and metadata stay as they are."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    kind = GGMLQuantizationType[weights]
    writer.add_file_type(LlamaFileType[f"MOSTLY_{weights}"])
    for name, field in reader.fields.items():
        if not name.startswith(_WRITTEN_ANYWAY):
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
