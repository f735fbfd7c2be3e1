"""Prompts with a common beginning share its pages: the same tokens, computed once, within memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.inference import Generator
from hyper_parallel.inference.kv_cache.page_pool import PagePool, keys_of
from inference.small_models import small

SYSTEM = [7 + place % 50 for place in range(70)]


def test_shared_prompts_have_the_same_bits_and_are_computed_once() -> None:
    model = small("gemma3")
    given = [[*SYSTEM, 3, 4], [*SYSTEM, 9], SYSTEM, [*SYSTEM[:40], 1, 2], [1, *SYSTEM]]
    settings = {"max_tokens": 12, "logprobs": True, "page": 16}
    generator, plain = Generator(model, **settings), Generator(model, **settings, prefix_cache=False)
    for found, expected in zip(generator(given), plain(given), strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == expected.logprobs
    assert plain.shared == 0
    # 4 whole pages of the second prompt, 4 of the third, 2 of the fourth; none of the last, which is moved by one.
    assert generator.shared == (4 + 4 + 2) * 16


def test_answers_to_one_prompt_share_its_pages() -> None:
    generator = Generator(small("llama"), page=16, temperature=1.0, n=6, max_tokens=8)
    answers = generator([SYSTEM])
    assert generator.shared == 5 * 70
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_pages_of_earlier_prompts_give_way() -> None:
    """Memory for one request at a time: what is kept is given up, the least recently used first."""
    model = small("llama")
    given = [[seed, *SYSTEM] for seed in (1, 2, 1, 1, 3, 2)]
    tight = Generator(model, page=16, pages=7, max_tokens=20)
    roomy = Generator(model, page=16, max_tokens=20, prefix_cache=False)
    assert [answer.tokens for answer in tight(given)] == [answer.tokens for answer in roomy(given)]
    assert tight.shared > 0


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 4)), max_size=60),
)
def test_no_page_is_lost_or_written_while_it_is_shared(pages: int, steps: list[tuple[int, int, int]]) -> None:
    pool, held = PagePool(pages), list[list[int]]()
    content = dict[int, bytes]()
    for kind, prompt, count in steps:
        if kind == 0 and held:
            pool.release(held.pop(prompt % len(held)))
            continue
        keys = keys_of([prompt] * (2 * count + 1), 2)
        taken = [page for key in keys if (page := pool.share(key)) is not None]
        assert all(content[page] == key for page, key in zip(taken, keys, strict=False))
        rest = pool.allocate(count - len(taken))
        if rest is None:
            pool.release(taken)
            continue
        for page, key in zip(rest, keys[len(taken) :], strict=True):
            assert not any(page in one for one in held)
            content[page] = key
            pool.register(key, page)
        held.append(taken + rest)
    for one in held:
        pool.release(one)
    assert pool.available == pages
    assert sorted(pool.allocate(pages) or []) == list(range(pages))
