from __future__ import annotations

import pytest
import scipy.stats
import torch

from tests.models.reference import TINY, VARIANTS, random_decoder, reference_of
from torchtitan.generate.sampling import generate
from torchtitan.models.cache import KVCache

PROMPT = [5, 200, 17, 17, 3]


@pytest.mark.promise("generation")
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_greedy_text_is_the_public_models_and_that_without_a_cache(variant):
    model = random_decoder(VARIANTS[variant])
    [ids] = generate(model, [PROMPT], max_new_tokens=40, temperature=0)
    text = torch.tensor([PROMPT + ids])  # each token is the likeliest after those before it
    for logits in (reference_of(model)(text).logits, model(text)):
        assert logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist() == ids
    sees_one = model.config.window == 1  # each token gives the next, and text soon repeats itself
    assert len(set(ids)) > (3 if sees_one else 5)


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model = random_decoder(TINY)
    before = torch.get_rng_state()
    first, again, other = (
        generate(model, [PROMPT], max_new_tokens=20, seed=seed) for seed in (3, 3, 4)
    )
    assert first == again != other
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.promise("generation")
@pytest.mark.parametrize(("variant", "temperature"), [("scaled", 0), ("normed heads, tied", 1.5)])
def test_each_of_many_texts_is_the_one_that_its_prompt_gives_alone(variant, temperature):
    """Of other lengths, ending at other places, two of them alike."""
    model = random_decoder(VARIANTS[variant])
    prompts = [PROMPT, [7], PROMPT[:3], list(range(40)), PROMPT]
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    stop = generate(model, [PROMPT], **settings)[0][3]
    settings["stop_ids"] = {stop}
    alone = [generate(model, [prompt], **settings)[0] for prompt in prompts]
    assert generate(model, prompts, **settings) == alone
    assert len({len(ids) for ids in alone}) > 1


@pytest.mark.parametrize("variant", ["scaled", "latent"])
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([4, 4, 300, 4, 4, 4, 4, 4], [7, 1]),
        ([20, 9, 14, 32, 11], [5]),
        ([310, 1, 30, 2, 60, 300], [2, 2, 2]),
    ],
)
def test_prompts_of_unequal_lengths_take_at_most_twice_the_columns_of_each_alone(
    variant, lengths, rows, monkeypatch
):
    """And give the same texts."""
    model = random_decoder(VARIANTS[variant])
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(263, (length,), generator=generator).tolist() for length in lengths]
    shapes = []
    split = KVCache.split

    def recorded(cache: KVCache, *, num_more: int) -> None:
        split(cache, num_more=num_more)
        num_rows, _, num_columns, _ = cache.layers["0"].stored[0].shape
        shapes.append((num_rows, num_columns))

    monkeypatch.setattr(KVCache, "split", recorded)
    settings = {"max_new_tokens": 5, "temperature": 1.5}
    alone = [generate(model, [prompt], **settings)[0] for prompt in prompts]
    assert shapes == [(1, length + 4) for length in lengths]
    shapes.clear()
    assert generate(model, prompts, **settings) == alone
    assert [num_rows for num_rows, _ in shapes] == rows
    assert sum(r * c for r, c in shapes) <= 2 * sum(length + 4 for length in lengths)


@pytest.mark.promise("generation")
@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_k"), [(2.0, None), (1.5, 6)])
def test_draws_follow_the_models_distribution(temperature, top_k):
    model = random_decoder(TINY)
    logits = model(torch.tensor([PROMPT]))[0, -1].detach().double() / temperature
    kept = logits.topk(top_k or 263).indices
    expected = torch.zeros(263, dtype=torch.float64)
    expected[kept] = logits[kept].softmax(0)
    drawn = [
        generate(model, [PROMPT], max_new_tokens=1, temperature=temperature, top_k=top_k, seed=s)
        for s in range(600)
    ]
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=263).double()
    assert counts[expected == 0].sum() == 0
    common = expected * 600 >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).numpy()
    predicted = torch.cat([expected[common], expected[~common].sum()[None]]).numpy() * 600
    used = predicted > 0
    assert used.sum() > 1
    assert scipy.stats.chisquare(observed[used], predicted[used]).pvalue > 1e-3
