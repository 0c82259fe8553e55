"""Turn a model's folder into OpenVINO's files, in an interpreter that has optimum-intel.

PYTHON openvino_export.py FOLDER TARGET int8|none
"""

import sys

from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main(folder: str, target: str, weights: str) -> None:
    """Write the model, its weights as 8-bit integers if asked for, and the tokenizer."""
    model = OVModelForCausalLM.from_pretrained(folder, export=True, load_in_8bit=weights == "int8", compile=False)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
