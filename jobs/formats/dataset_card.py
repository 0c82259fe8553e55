"""What tells Hugging Face's `datasets` which files of a folder are data, and what columns they have.

By itself it takes `_manifest.json` for a part, and the columns of JSON lines for what the first part has in its first
megabytes: a column of nulls, say, where rows that failed come later. `.huggingface.yaml` goes before both; readers that
do not know it pass over names that begin with a dot. It is written as JSON, which is YAML.
"""

from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from jobs.formats.json_columns import is_json_text
from jobs.formats.jsonl import dumps

DATASET_CARD = ".huggingface.yaml"

_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def dataset_card(files: str, columns: pa.Schema | None) -> bytes:
    """The card of a folder whose data are `files`, a glob; with `columns` where the files do not have them."""
    config: dict[str, Any] = {"config_name": "default", "data_files": [{"split": "train", "path": files}]}
    if columns is not None:
        config["features"] = [_named(field) for field in columns]
    return dumps({"configs": [config]}) + b"\n"


def _named(field: pa.Field) -> dict[str, Any]:
    return {"name": field.name, **_feature(field)}


def _feature(field: pa.Field) -> dict[str, Any]:
    """The type of a column of JSON, as `datasets` writes them."""
    if is_json_text(field):
        return {"dtype": "json"}
    if kinds.is_struct(field.type):
        return {"struct": [_named(inner) for inner in field.type]}
    if kinds.is_list(field.type):
        return {"list": _feature(field.type.value_field)}
    return {"dtype": _NAMES.get(str(field.type), str(field.type))}
