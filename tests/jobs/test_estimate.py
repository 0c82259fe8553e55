"""An estimate counts what is there, says what it is based on, and claims no time that nothing was measured for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.estimate import Estimate, estimate
from jobs.formats.jsonl import dumps
from jobs.profile import Capacity, DecodeRate, Profile, load_profile, profile_path
from jobs.settings import Settings
from jobs.spec import Input, InputFile, RecordRows
from jobs.storage import Stores
from tests.jobs.specs import openai_spec

BLOCK = 4
PROFILE = Profile(
    model="tiny",
    dtype="float32",
    device="cpu",
    host="here",
    measured_at=1_700_000_000,
    max_model_len=100,
    max_num_seqs=8,
    block_size=BLOCK,
    kv_tokens=400,
    prefill_tokens_per_second=1000.0,
    decode=(DecodeRate(rows=2, tokens_per_second=20), DecodeRate(rows=8, tokens_per_second=50)),
)


def by_characters(prompts: Sequence[Any]) -> list[Sequence[int] | Exception]:
    """A token a character of the message; there is none for a question mark."""
    texts = [prompt[0]["content"] for prompt in prompts]
    return [ValueError("?") if "?" in text else [ord(character) for character in text] for text in texts]


def of(
    folder: Path, rows: list[Any], *, profile: Profile | None = None, max_rows: int = 1000, **fields: Any
) -> Estimate:
    stores = Stores(Settings())
    info = stores.put(f"{folder}/in.jsonl", b"".join(dumps(row) + b"\n" for row in rows))
    own = {"profile": profile, "capacity": fields.pop("capacity", None), "mean_answer": fields.pop("mean_answer", None)}
    spec = openai_spec(
        rows=RecordRows(prompt_column="prompt"),
        input=Input(files=(InputFile(url=info.url, size=info.size, etag=info.etag),)),
        storage_url=str(folder),
        **fields,
    )
    limits = Settings(max_shard_rows=10)
    return estimate(spec, stores, limits, by_characters, max_rows=max_rows, **own)


def prompts(*texts: str, **columns: Any) -> list[Any]:
    return [{"prompt": text, **columns} for text in texts]


def test_rows_are_counted_and_bad_ones_named(tmp_path: Path) -> None:
    found = of(tmp_path, [{"prompt": "abc"}, {"text": "x"}, {"prompt": "abcde"}, {"prompt": "what?"}])
    assert (found.rows, found.bad_rows, found.sampled) == (4, 1, False)
    assert [error.line for error in found.first_errors] == [2]
    assert found.prompts is not None
    assert (found.prompts.rows, found.prompts.refused, found.prompts.total) == (3, 1, 8)
    assert found.prompts.longest.line == 3
    assert (found.prompts.longest.row, found.prompts.longest.tokens) == (2, 5)


def test_the_histogram_has_every_row_at_the_power_of_two_that_holds_it(tmp_path: Path) -> None:
    found = of(tmp_path, prompts(*("a" * n for n in (1, 2, 3, 4, 5, 8, 9, 16, 17)))).prompts
    assert found is not None
    assert found.histogram == {1: 1, 2: 1, 4: 2, 8: 2, 16: 2, 32: 1}
    assert (found.median, found.mean, found.p99) == (5, 65 / 9, 17)


def test_shared_blocks_are_those_that_an_earlier_row_began_with(tmp_path: Path) -> None:
    """Blocks of four: the second row shares two, the third one; the fourth shares what is no whole block, and the
    last has a block of the first's in another place."""
    found = of(
        tmp_path, prompts("aaaabbbbcccc1", "aaaabbbbdddd1", "aaaaeeee1", "aaa", "bbbbaaaa1"), profile=PROFILE
    ).prompts
    assert found is not None
    assert found.block_size == BLOCK
    assert found.shared == pytest.approx((8 + 4) / found.total)


def test_the_last_token_of_a_prompt_is_never_shared(tmp_path: Path) -> None:
    found = of(tmp_path, prompts("aaaabbbb", "aaaabbbb"), profile=PROFILE).prompts
    assert found is not None
    assert found.shared == 4 / 16


def test_a_large_input_is_counted_in_shards_all_over_it_and_scaled_up(tmp_path: Path) -> None:
    rows = prompts(*("a" * (1 + n // 100) for n in range(1000)))
    whole, part = of(tmp_path, rows), of(tmp_path, rows, max_rows=100)
    assert whole.prompts is not None
    assert part.prompts is not None
    assert (whole.sampled, part.sampled) == (False, True)
    assert (part.rows, part.prompts.rows) == (1000, 100)
    assert whole.prompts.total == part.prompts.total == sum(1 + n // 100 for n in range(1000))


def test_answers_are_their_limits_or_what_is_expected(tmp_path: Path) -> None:
    rows = [*prompts("a", "b", max_tokens=7), *prompts("c", max_tokens=3)]
    assert of(tmp_path, rows).answer_tokens == 17
    expected = of(tmp_path, rows, mean_answer=2)
    assert (expected.answer_tokens, expected.answers_are_limits) == (6, False)
    assert of(tmp_path, [*rows, *prompts("d")]).answer_tokens is None


def test_no_profile_no_time(tmp_path: Path) -> None:
    found = of(tmp_path, prompts("a", max_tokens=7))
    assert (found.fit, found.duration) == (None, None)


def test_time_is_what_is_not_shared_by_the_measured_rate_and_answers_by_the_rate_of_as_many_rows(
    tmp_path: Path,
) -> None:
    texts = [chr(97 + n) * 41 for n in range(4)]
    found = of(tmp_path, prompts(*texts, max_tokens=9), profile=PROFILE)
    assert found.fit is not None
    assert found.duration is not None
    # 50 tokens a row in a pool of 400, and four rows: half way from 2 to 8 is a third.
    assert found.fit.rows_at_once == 8
    assert found.duration.prefill == pytest.approx(164 / 1000)
    assert found.duration.decode == pytest.approx(36 / 30)
    assert found.duration.gpu_hours == pytest.approx((0.164 + 1.2) / 3600)
    assert "here" in found.duration.basis
    assert "float32" in found.duration.basis
    assert of(tmp_path, prompts("a"), profile=PROFILE).duration is None


def test_rows_that_do_not_fit_the_pool_or_the_model_are_told(tmp_path: Path) -> None:
    found = of(tmp_path, prompts("a" * 99, "b" * 100, "c" * 150, max_tokens=50), profile=PROFILE).fit
    assert found is not None
    assert (found.rows_at_once, found.too_long) == (2, 2)


def test_what_fits_is_known_without_a_measurement_where_the_capacity_is(tmp_path: Path) -> None:
    room = Capacity(kv_tokens=800, max_num_seqs=64, max_model_len=120, block_size=BLOCK, basis="by its headers")
    found = of(tmp_path, prompts("a" * 99, "b" * 100, "c" * 150, max_tokens=50), capacity=room)
    assert found.fit is not None
    assert (found.fit.rows_at_once, found.fit.too_long, found.fit.basis) == (4, 1, "by its headers")
    assert found.duration is None
    asked_for = of(tmp_path, prompts("a" * 50, max_tokens=50), profile=PROFILE, capacity=room)
    assert asked_for.fit is not None
    assert asked_for.fit.kv_tokens == 800
    assert asked_for.duration is not None


def test_a_model_that_does_not_fit_holds_no_row_and_takes_no_time(tmp_path: Path) -> None:
    room = Capacity(kv_tokens=0, max_num_seqs=64, max_model_len=0, block_size=BLOCK, basis="")
    found = of(tmp_path, prompts("a", max_tokens=5), profile=PROFILE, capacity=room)
    assert found.fit is not None
    assert (found.fit.rows_at_once, found.duration) == (0, None)


def test_rates_between_what_was_measured_lie_between() -> None:
    rates = [PROFILE.decode_tokens_per_second(rows) for rows in (1, 2, 5, 8, 100)]
    assert rates == [10, 20, 35, 50, 50]


def test_a_profile_is_kept_by_model(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    assert load_profile("tiny", None, settings) is None
    path = profile_path("tiny", None, settings)
    path.parent.mkdir(parents=True)
    path.write_text(PROFILE.model_dump_json())
    assert load_profile("tiny", None, settings) == PROFILE
    assert load_profile("another", None, settings) is None
    path.write_text('{"model": "of another version"}')
    assert load_profile("tiny", None, settings) is None


def test_rates_of_a_quantised_model_are_not_those_of_the_model(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    quantised = PROFILE.model_copy(update={"dtype": "int8"})
    profile_path("tiny", None, settings).parent.mkdir(parents=True)
    profile_path("tiny", "int8", settings).write_text(quantised.model_dump_json())
    assert load_profile("tiny", None, settings) is None
    profile_path("tiny", None, settings).write_text(PROFILE.model_dump_json())
    assert load_profile("tiny", None, settings) == PROFILE
    assert load_profile("tiny", "int8", settings) == quantised
    assert load_profile("tiny", None, settings, kv_cache_dtype="int8") is None
    in_int8 = PROFILE.model_copy(update={"dtype": "float32 kv-int8"})
    profile_path("tiny", None, settings, kv_cache_dtype="int8").write_text(in_int8.model_dump_json())
    assert load_profile("tiny", None, settings, kv_cache_dtype="int8") == in_int8
    assert load_profile("tiny", None, settings) == PROFILE


def test_it_is_json_for_programs(tmp_path: Path) -> None:
    found = of(tmp_path, [*prompts("abc", max_tokens=1), {"text": 1}], profile=PROFILE).as_dict()
    assert found["prompts"]["longest"] == {"row": 0, "line": 1, "tokens": 3}
    assert found["first_errors"][0]["line"] == 2
    dumps(found)
