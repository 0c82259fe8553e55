import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    from engine.loader.gguf_file import GgufFile
    from engine.loader.gguf_tokenizer import gguf_tokenizer
    from engine.loader.locate import locate_model

    return gguf_tokenizer(GgufFile(locate_model("demo").path))
