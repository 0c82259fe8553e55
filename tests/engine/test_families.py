"""Every family and every kind of rotary embedding against Transformers' own model, however tokens are cut into steps.

A case is a line of the table in `tests.engine.families`. Prompts are longer than the windows; norms and biases are
random, so that a switch that is not heeded shows.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
)

from engine import LLM, SamplingParams
from engine.loader import load
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from tests.engine.families import CASES, FAMILY_CASES, SMALL, Case, longrope, random_model, tokens
from tests.engine.models_fixture import PagedRun

CPU = torch.device("cpu")
PROMPT, ANSWER = 70, 32


class Pair(NamedTuple):
    """The same model twice: Transformers' and ours, in float32."""

    reference: PreTrainedModel
    decoder: Decoder


def build(case: Case, folder: Path) -> Pair:
    reference = random_model(case.config(**{**SMALL, **case.fields}))
    reference.save_pretrained(folder)
    loaded = load(str(folder), dtype=torch.float32, device=CPU, model_impl="native", max_model_len=case.max_model_len)
    if case.max_model_len is not None:
        # Transformers derives dynamic frequencies from the longest sequence so far.
        with torch.inference_mode():
            reference(torch.zeros(1, case.max_model_len, dtype=torch.int64))
    return Pair(reference, loaded.decoder)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return build(CASES[request.param], tmp_path_factory.mktemp("model"))


def reference_logits(pair: Pair, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return pair.reference(torch.tensor([ids])).logits[0]


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_has_the_logits_of_transformers(pair):
    ids = tokens(PROMPT)
    expected = reference_logits(pair, ids)
    assert expected.std() > 0.5
    assert_close(PagedRun(pair.decoder).step({"a": ids})["a"], expected)


def test_a_prompt_in_chunks_among_others_has_the_logits_of_transformers(pair):
    ids, other = tokens(PROMPT), tokens(50, 1)
    run = PagedRun(pair.decoder)
    steps = [
        run.step({"other": other[:20], "a": ids[:33]}),
        run.step({"a": ids[33:34], "other": other[20:21]}),
        run.step({"a": ids[34:69]}),
        run.step({"other": other[21:], "a": ids[69:]}),
    ]
    assert_close(torch.cat([step["a"] for step in steps]), reference_logits(pair, ids))


def test_greedy_decoding_has_the_tokens_and_the_logits_of_transformers(pair):
    ids = tokens(PROMPT, 2)
    run = PagedRun(pair.decoder)
    logits = [run.step({"a": ids})["a"][-1:]]
    answer = []
    while len(answer) < ANSWER:
        answer.append(int(logits[-1].argmax()))
        logits.append(run.step({"a": answer[-1:]})["a"])
    generated = pair.reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, PROMPT), max_new_tokens=ANSWER, do_sample=False
    )
    assert answer == generated[0, PROMPT:].tolist()
    assert_close(torch.cat(logits), reference_logits(pair, ids + answer)[PROMPT - 1 :])


def test_every_family_has_a_case():
    covered = {AutoModelForCausalLM._model_mapping[case.config].__name__ for case in FAMILY_CASES.values()}
    assert covered >= FAMILIES.keys() - {"Gemma3ForConditionalGeneration"}


@pytest.mark.parametrize(("max_model_len", "prompt", "admitted"), [(None, 30, 64), (128, 70, 128)])
def test_the_longest_sequence_that_an_engine_admits_decides_how_longrope_turns(
    tmp_path, max_model_len, prompt, admitted
):
    case = Case(Phi3Config, {"hidden_size": 128, **longrope(64)})
    reference = random_model(case.config(**{**SMALL, **case.fields}))
    reference.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_kv_blocks=65, max_model_len=max_model_len)
    assert llm.info.max_model_len == admitted
    ids = tokens(prompt)
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=ANSWER))
    generated = reference.generate(torch.tensor([ids]), max_new_tokens=ANSWER, do_sample=False)
    assert list(output.outputs[0].token_ids) == generated[0, prompt:].tolist()


# Families by how they round: what is added to norm weights, where norms round, what scales embeddings.
ROUNDING = {
    "llama": LlamaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "granite": GraniteConfig,
    "olmo2": Olmo2Config,
}


@pytest.mark.parametrize("name", ROUNDING)
def test_in_bfloat16_embeddings_and_norms_round_as_in_transformers(tmp_path, name):
    fields = {"vocab_size": 112, "final_logit_softcapping": None, "embedding_multiplier": 1.5}
    model = random_model(ROUNDING[name](**{**SMALL, **fields})).bfloat16()
    with torch.no_grad():
        for module, parameter in model.named_parameters():
            if "layers" in module:
                # With layers that add nothing, and a head that selects, logits are the final norm of embeddings.
                parameter.zero_()
        model.lm_head.weight.copy_(torch.eye(112))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    foreign = {"final_logit_softcapping", "embedding_multiplier"} - FAMILIES[fields["architectures"][0]].fields
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if k not in foreign}))
    decoder = load(str(tmp_path), dtype=None, device=CPU, model_impl="native").decoder
    ids = list(range(112))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    assert torch.equal(PagedRun(decoder).step({"a": ids})["a"], expected.float())
