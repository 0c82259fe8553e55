import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    import torch

    from engine.loader import load

    return load("demo", dtype=torch.bfloat16, device=torch.device("cpu")).tokenizer
