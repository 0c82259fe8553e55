"""Token for token what Transformers' `generate` gives, on the real SmolLM2, however the engine cuts up the work."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine import EngineConfig, SamplingParams
from engine.build import assemble_engine
from engine.loader import load
from engine.loader.locate import locate_model
from engine.messages import NewRequest
from engine.prompts import PromptEncoder

pytestmark = pytest.mark.model

QUESTIONS = Path(__file__).parents[1] / "data" / "gsm8k_test.jsonl"
CPU = torch.device("cpu")
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
# Two ways to sum the same float32 products differ in the last digits; logits closer than this are a tie.
TIE = 1e-3


@dataclass
class Reference:
    """Transformers' model, and its greedy continuations of prompts, padded on the left as it wants them."""

    model: torch.nn.Module
    end: list[int]

    def answers(self, prompts):
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=self.end,
                pad_token_id=0,
            )
        return [self._until_end(row) for row in output[:, longest:].tolist()]

    def best_answer(self, prompt, width):
        """The best of a beam search, and its score."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                num_beams=width,
                do_sample=False,
                eos_token_id=self.end,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        return self._until_end(output.sequences[0, len(prompt) :].tolist()), output.sequences_scores[0].item()

    def log_probs(self, token_ids):
        """`[n - 1, vocab_size]`: row i is about token i + 1."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([token_ids])).logits[0, :-1].float(), -1)

    def _until_end(self, ids):
        return next((ids[: place + 1] for place, token in enumerate(ids) if token in self.end), ids)

    def top_two_gap(self, context):
        with torch.inference_mode():
            best = self.model(torch.tensor([context])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


@pytest.fixture(scope="module")
def loaded():
    return load("demo", dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def reference(loaded):
    """Transformers' model with the weights as Transformers' own reader of GGUF files gives them.

    The same that `from_pretrained(..., gguf_file=...)` does, which insists on the accelerate package for it.
    """
    file = locate_model("demo").path
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    model = model.to(torch.float32).eval()
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights["tensors"], strict=False)
    # The output matrix is the embedding's, and not in the file a second time.
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return Reference(model, sorted(loaded.eos_token_ids))


def conversations(count):
    with QUESTIONS.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(count), lines, strict=False)]
    return [[{"role": "user", "content": row["question"]}] for row in rows]


def run(loaded, prompts, params=GREEDY, **options):
    """Answer `prompts` with an engine of its own, and return its outputs in order, and its statistics."""
    core = assemble_engine(EngineConfig("demo", **{"num_kv_blocks": 1024, **options}), loaded, CPU)
    core.add_requests(NewRequest(index, prompt, params) for index, prompt in enumerate(prompts))
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    core.scheduler.check_integrity()
    return sorted(outputs, key=lambda output: output.index), core.stats()


@pytest.fixture(scope="module")
def expected(loaded, reference):
    encoder = PromptEncoder(loaded.tokenizer, loaded.config.vocab_size)
    prompts = [tuple(prompt) for prompt in encoder.encode(conversations(8))]
    return dict(zip(prompts, reference.answers(prompts), strict=True))


def check_equal(outputs, expected):
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected[o.prompt_token_ids] for o in outputs]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default options"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks of 16 tokens"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_answers_are_those_of_transformers(loaded, expected, options):
    outputs, stats = run(loaded, conversations(8), **options)
    check_equal(outputs, expected)
    assert stats.preemptions == 0


def test_answers_from_a_warm_prefix_cache_are_the_same(loaded, expected):
    twice = conversations(8) * 2
    outputs, stats = run(loaded, twice, max_num_seqs=8, block_size=16)
    check_equal(outputs, expected)
    assert stats.cached_tokens > stats.prompt_tokens / 3


def test_answers_that_were_preempted_are_the_same(loaded, expected):
    outputs, stats = run(loaded, conversations(8), num_kv_blocks=42, block_size=16, max_model_len=512)
    check_equal(outputs, expected)
    assert stats.preemptions > 0


def test_logprobs_of_prompts_and_answers_are_those_of_transformers(loaded, reference):
    params = SamplingParams(max_tokens=12, n=2, logprobs=4, prompt_logprobs=2, seed=5)
    outputs, _ = run(loaded, conversations(2), params, max_num_batched_tokens=16)
    for output in outputs:
        for completion in output.outputs:
            token_ids = [*output.prompt_token_ids, *completion.token_ids]
            log_probs = reference.log_probs(token_ids)
            entries = [*output.prompt_logprobs[1:], *completion.logprobs]
            assert [entry.token_id for entry in entries] == token_ids[1:]
            for entry, row in zip(entries, log_probs, strict=True):
                assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=TIE)
                likeliest = row.topk(len(entry.top)).values.tolist()
                assert [one.logprob for one in entry.top] == pytest.approx(likeliest, abs=TIE)
            text = b"".join(entry.utf8 for entry in completion.logprobs)
            assert text.decode(errors="replace") == loaded.tokenizer.decode(list(completion.token_ids))


def check_searches(loaded, reference, count, width):
    """At most one search in 32 may go another way, and must come to a score as good."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, beam_width=width)
    outputs, _ = run(loaded, conversations(count), params)
    different = 0
    for output in outputs:
        (ours,) = output.outputs
        theirs, score = reference.best_answer(output.prompt_token_ids, width)
        assert ours.cumulative_logprob / len(ours.token_ids) == pytest.approx(score, abs=TIE)
        different += list(ours.token_ids) != theirs
    assert different <= count // 32


def test_a_beam_search_finds_what_transformers_finds(loaded, reference):
    check_searches(loaded, reference, count=3, width=3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_32_beam_searches_find_what_transformers_finds(loaded, reference):
    check_searches(loaded, reference, count=32, width=4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_64_answers_at_most_one_differs_and_only_at_a_tie(loaded, reference):
    outputs, _ = run(loaded, conversations(64))
    prompts = [output.prompt_token_ids for output in outputs]
    expected = [answer for start in range(0, 64, 8) for answer in reference.answers(prompts[start : start + 8])]
    different = 0
    for output, theirs in zip(outputs, expected, strict=True):
        ours = list(output.outputs[0].token_ids)
        if ours != theirs:
            different += 1
            same = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            assert reference.top_two_gap([*output.prompt_token_ids, *ours[:same]]) < TIE
    assert different <= 1
